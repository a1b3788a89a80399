"""The description of a test's Slurm cluster, and the configuration files that follow from it.

slurm.conf, slurmdbd.conf, gres.conf, cgroup.conf (each has a manual page of section 5) and the scripts around jobs.
"""

from pathlib import Path

from msgspec import Struct

USER = "games"
"""The jobs' user: slurmd starts none for root by default, and Debian has this user everywhere."""
OWNER = "slurm"
"""Slurm's own user (SlurmUser)."""
CPUS = 64


class Plan(Struct, frozen=True):
    """A cluster. `DIR` in a text stands for the rig's own directory, as the cluster's programs see it."""

    nodes: int = 2
    gpus: int = 8
    """Number of device nodes: DIR/dev/nvidia0 and so on."""
    gres: str = "gpu:h100:8"
    gres_lines: tuple[str, ...] = ("Name=gpu Type=h100 File=DIR/dev/nvidia[0-7]",)
    """gres.conf; the order of its lines is Slurm's order of the GPUs."""
    cgroups: bool = False
    """Whether jobs are tracked by cgroups and may open only their own GPUs."""
    unified: bool = False
    """Whether those are of control groups v2, which 26.05 names by SLUID."""
    job_id_paths: bool = False
    """Whether 26.05 names them by job id after all (cgroup.conf(5), CgroupJobIdPaths)."""
    slice: str = ""
    """The systemd slice of 26.05's groups (cgroup.conf(5), CgroupSlice); empty: system.slice."""
    prolog_flags: str = "Alloc"
    partition: str = ""
    """More settings of the partition."""
    settings: tuple[str, ...] = ()
    """More lines of slurm.conf."""
    mapping: bool = False
    """Whether the project's prolog and epilog write a mapping directory for each node."""
    accounting: bool = False
    """Whether slurmdbd keeps records of the jobs."""
    backup: str = ""
    """The host's name as a second slurmctld sees it, which takes over when the first is gone; empty: there is none."""
    bare_nodes: int = 0
    """How many nodes, the last ones, have no file in the folders that Prolog and Epilog name."""
    root: Path = Path("/")
    """Root of the cluster's programs: the host, or a tree with another version."""


class Place(Struct, frozen=True):
    """A rig's directory and the ports of its nodes."""

    directory: str
    """As the cluster's programs see it: below the plan's root."""
    host: str
    controller_port: int
    accounting_port: int
    node_ports: dict[str, int]
    """By node name."""


def slurm_conf(plan: Plan, place: Place) -> str:
    """slurm.conf: short timeouts, loopback only, a port for each daemon."""
    folder = place.directory
    tracking = "cgroup" if plan.cgroups else "linuxproc"
    lines = [
        f"ClusterName={next(iter(place.node_ports))}",
        f"SlurmctldHost={place.host}(127.0.0.1)",
        *(_backup(plan.backup) if plan.backup else ()),
        f"SlurmctldPort={place.controller_port}",
        f"SlurmUser={OWNER}",
        f"SlurmctldPidFile={folder}/state/slurmctld.pid",
        f"SlurmctldLogFile={folder}/log/slurmctld.log",
        f"SlurmdLogFile={folder}/log/slurmd-%n.log",
        f"SlurmdPidFile={folder}/spool/slurmd-%n.pid",
        f"SlurmdSpoolDir={folder}/spool/%n",
        f"StateSaveLocation={folder}/state",
        "AuthType=auth/munge",
        f"AuthInfo=socket={folder}/munge/socket",
        "CommunicationParameters=NoCtldInAddrAny,NoInAddrAny",
        "SlurmdParameters=config_overrides",
        f"ProctrackType=proctrack/{tracking}",
        f"TaskPlugin=task/{'cgroup' if plan.cgroups else 'none'}",
        "JobAcctGatherType=jobacct_gather/none",
        "SelectType=select/cons_tres",
        "SelectTypeParameters=CR_Core_Memory",
        "GresTypes=gpu,shard,mps",
        "MpiDefault=none",
        "SwitchType=switch/none",
        "ReturnToService=2",
        "SchedulerParameters=sched_interval=1,bf_interval=1,batch_sched_delay=0,sched_min_interval=0",
        "MailProg=/bin/true",
        f"PrologFlags={plan.prolog_flags}",
        f"Prolog={folder}/etc/prolog.d/*",
        f"Epilog={folder}/etc/epilog.d/*",
        "KillWait=1",
        *plan.settings,
        *(_accounting(place) if plan.accounting else ()),
        *(_node(plan, place, name) for name in place.node_ports),
        f"PartitionName=gpu Nodes={','.join(place.node_ports)} Default=YES MaxTime=7-0 DefMemPerCPU=100 State=UP"
        f" {plan.partition}".rstrip(),
    ]
    return "".join(f"{line}\n" for line in lines)


def _backup(host: str) -> tuple[str, ...]:
    return f"SlurmctldHost={host}(127.0.0.2)", "SlurmctldTimeout=5", "DebugFlags=NO_CONF_HASH"


def _accounting(place: Place) -> tuple[str, ...]:
    return (
        "AccountingStorageType=accounting_storage/slurmdbd",
        "AccountingStorageHost=127.0.0.1",
        f"AccountingStoragePort={place.accounting_port}",
        f"AccountingStoragePass={place.directory}/munge/socket",
        "AccountingStoreFlags=job_comment",
    )


def slurmdbd_conf(place: Place) -> str:
    """slurmdbd.conf: the database is found by its socket (MYSQL_UNIX_PORT)."""
    folder = place.directory
    lines = [
        "AuthType=auth/munge",
        f"AuthInfo=socket={folder}/munge/socket",
        f"DbdHost={place.host}",
        "DbdAddr=127.0.0.1",
        f"DbdPort={place.accounting_port}",
        "CommunicationParameters=NoInAddrAny",
        f"SlurmUser={OWNER}",
        f"LogFile={folder}/log/slurmdbd.log",
        f"PidFile={folder}/state/slurmdbd.pid",
        "StorageType=accounting_storage/mysql",
        "StorageHost=localhost",
    ]
    return "".join(f"{line}\n" for line in lines)


def _node(plan: Plan, place: Place, name: str) -> str:
    return (
        f"NodeName={name} NodeHostname={place.host} NodeAddr=127.0.0.1 Port={place.node_ports[name]} CPUs={CPUS}"
        f" Sockets=2 CoresPerSocket={CPUS // 2} ThreadsPerCore=1 RealMemory=64000 Gres={plan.gres} State=UNKNOWN"
    )


def gres_conf(plan: Plan, place: Place) -> str:
    """The plan's lines."""
    return "".join(f"{line}\n" for line in plan.gres_lines).replace("DIR", place.directory)


def cgroup_conf(plan: Plan) -> str:
    """cgroup.conf: only devices are constrained; cores and memory are simulated, so they cannot be."""
    devices = "yes" if plan.cgroups else "no"
    plugin = "CgroupPlugin=cgroup/v2\nIgnoreSystemd=yes\n" if plan.unified else ""
    plugin += "CgroupJobIdPaths=yes\n" if plan.job_id_paths else ""
    plugin += f"CgroupSlice={plan.slice}\n" if plan.slice else ""
    return f"{plugin}ConstrainCores=no\nConstrainDevices={devices}\nConstrainRAMSpace=no\n"


def around_job(plan: Plan, place: Place, script: str) -> dict[str, str]:
    """The script in prolog.d or epilog.d: records the job's GPUs on its node and its SLUID, and runs the project's own.

    A prolog's SLURM_JOB_GPUS is of its node (Slurm, Prolog and Epilog Guide): the values that tests compare with.
    """
    folder = place.directory
    note = (
        f"note={folder}/given/{script}.$SLURM_JOB_ID.$SLURMD_NODENAME\n"
        'echo "${SLURM_JOB_GPUS:-} ${SLURM_JOB_SLUID:-}" >"$note.new" && mv "$note.new" "$note"\n'
    )
    own = f"GPU_EFFICIENCY_JOBS_DIR={folder}/jobs/$SLURMD_NODENAME exec {folder}/etc/slurm-{script}.sh\n"
    programs = {"10-note.sh": note} | ({"50-gpu-efficiency.sh": own} if plan.mapping else {})
    return {name: f"#!/bin/sh\n{program}" for name, program in programs.items()}
