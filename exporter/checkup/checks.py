"""All checks, in the order in which they are made and told. One row a check; refuses to know how one looks."""

from exporter.checkup import Check, always, driver, jobs, machine, places, sampling, storing, telemetry
from exporter.checkup.driver import DRIVER, PROFILING
from exporter.checkup.jobs import JOBS
from exporter.checkup.machine import CLOCK, PROGRAM, USER
from exporter.checkup.places import FILES, PORTS
from exporter.checkup.sampling import SAMPLE
from exporter.checkup.telemetry import TELEMETRY

AREAS = {
    PROGRAM: "This program and its machine",
    USER: "Its user",
    CLOCK: "Clock",
    DRIVER: "NVIDIA driver",
    TELEMETRY: "Sources of telemetry",
    PROFILING: "Profiling",
    JOBS: "Who holds the GPUs",
    FILES: "Files and folders",
    PORTS: "Addresses",
    SAMPLE: "What a scrape would show",
}
"""In the order in which they are told."""

CHECKS = (
    Check(PROGRAM, "versions", machine.look_at_program),
    Check(USER, "rights", machine.look_at_user),
    Check(CLOCK, "synchronised", machine.look_at_clock),
    Check(DRIVER, "devices", driver.look_at_devices),
    Check(DRIVER, "module", driver.look_at_module),
    Check(DRIVER, "library", driver.look_at_library, seconds=20.0, needed=driver.by_nvml),
    Check(TELEMETRY, "pause", telemetry.look_for_pause),
    Check(TELEMETRY, "dcgm", telemetry.look_at_dcgm, seconds=20.0, needed=telemetry.needs("dcgm")),
    Check(
        TELEMETRY, "dcgm-exporter", telemetry.look_at_dcgm_exporter, seconds=12.0,
        needed=telemetry.needs("dcgm-exporter"),
    ),
    Check(TELEMETRY, "nvml", telemetry.look_at_nvml, seconds=20.0, needed=telemetry.needs("nvml")),
    Check(TELEMETRY, "source", telemetry.look_at_choice, needed=always),
    Check(PROFILING, "restriction", driver.look_at_profiling),
    Check(JOBS, "slurm", jobs.look_at_slurm, seconds=15.0, needed=jobs.needs("slurm")),
    Check(JOBS, "kubernetes", jobs.look_at_kubernetes, seconds=12.0, needed=jobs.needs("kubernetes")),
    Check(JOBS, "mapping-dir", jobs.look_at_mapping, needed=jobs.needs("mapping-dir")),
    Check(JOBS, "processes", jobs.look_at_processes, needed=jobs.needs("processes")),
    Check(JOBS, "scheduler", jobs.look_at_choice, needed=always),
    Check(FILES, "folders", places.look_at_folders, needed=always),
    Check(FILES, "secrets", places.look_at_secrets, needed=always),
    Check(FILES, "store", storing.look_at_store),
    Check(PORTS, "web config", places.look_at_web, needed=always),
    Check(PORTS, "ports", places.look_at_ports, seconds=15.0, needed=always),
    Check(SAMPLE, "sample", sampling.look_at_sample, seconds=30.0, needed=always),
)  # fmt: skip
"""Those that look at a source or scheduler come before the choice among them, and the choice before the sample. Without
persistence mode the driver starts anew for each look, which takes a second or two a GPU: hence the long limits."""
