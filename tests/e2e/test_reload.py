"""The whole daemon while its configuration changes: SIGHUP, a ConfigMap's swap, a bad file; and people's names."""

import os
import signal
import subprocess
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path

import pytest

from exporter.schedulers.privacy import UserMask
from exporter.trace import read_trace
from tests.e2e.running import Daemon, Page, command, daemon, environment, running
from tests.nvml_stub.build import build
from tests.waiting import wait_for

pytestmark = pytest.mark.e2e
PACE = ("--sampling.interval-seconds", "0.5")
KEY = b"an old secret of this cluster"
USER = "games"
"""A name that /etc/passwd has, and that no text of ours does."""


class Site:
    """A config map as the kubelet mounts it, a mapping directory, a job's process, and the daemon that sees them."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.mount, self.jobs = folder, folder / "mount", folder / "jobs"
        self.mount.mkdir()
        self.jobs.mkdir()
        (self.jobs / "0").write_text("4711\n")
        self.generation = 0
        self.says(price=2.0)
        (self.mount / "config.toml").symlink_to("..data/config.toml")
        self.config = self.mount / "config.toml"

    def says(self, text: str = "", *, price: float = 2.0) -> None:
        """A new generation of the whole mount, swapped in at once."""
        self.generation += 1
        made = self.mount / f"..{self.generation}"
        made.mkdir()
        listen = '[web]\nlisten_address = "127.0.0.1:0"\n'
        mapping = f'[mapping_dir]\npath = "{self.jobs}"\n'
        price_row = f"[[prices]]\nper_gpu_hour = {price}\n"
        (made / "config.toml").write_text(f'scheduler = "mapping-dir"\n{listen}{mapping}{price_row}{text}')
        (self.mount / "..new").symlink_to(made.name)
        (self.mount / "..new").rename(self.mount / "..data")


@pytest.fixture(name="site")
def _site(tmp_path: Path) -> Site:
    return Site(tmp_path)


@pytest.fixture(name="served")
def _served(site: Site, tmp_path: Path) -> Iterator[Daemon]:
    words = ("--config", f"{site.config}", "--source", "nvml", *PACE)
    with daemon(tmp_path, "serve", *words, LD_LIBRARY_PATH=f"{build()}") as made:
        yield made


def told(page: Page, name: str) -> Decimal:
    return page.total(f"config_{name}")


def price(page: Page) -> set[Decimal]:
    return {value for _, value in page.rows("price_per_gpu_hour")}


def team(page: Page) -> set[str]:
    return {labels["team"] for labels, _ in page.rows("job_info", job_id="4711")}


def zombie(page: Page) -> Decimal:
    (found,) = (value for labels, value in page.rows("threshold") if labels["name"] == "zombie_batch_seconds")
    return found


def test_what_changes_is_taken_and_not_a_second_is_lost(site: Site, served: Daemon) -> None:
    """One daemon, one after another: a swap, SIGHUP, a bad file, one that needs a restart, all taken back."""
    begun = served.until(lambda page: page.total("seconds_total", leak="useful"), "useful time")
    assert (price(begun), team(begun), zombie(begun)) == ({Decimal(2)}, {""}, Decimal(1800))
    assert [told(begun, name) for name in ("last_reload_successful", "restart_needed")] == [1, 0]

    site.says('[[workload.rules]]\nteam = "hep"\nname = ".*"\n', price=3.0)
    swapped = served.until(lambda page: price(page) == {Decimal(3)} and team(page) == {"hep"}, "price and team")
    since = told(swapped, "last_reload_success_timestamp_seconds")
    assert since > told(begun, "last_reload_success_timestamp_seconds")

    site.says('[[workload.rules]]\nteam = "bio"\nname = ".*"\n[policy]\nzombie_batch_seconds = 900\n', price=4.0)
    served.program.process.send_signal(signal.SIGHUP)
    hupped = served.until(lambda page: price(page) == {Decimal(4)} and team(page) == {"bio"}, "SIGHUP is heeded")
    assert zombie(hupped) == 900

    site.says("[prices\n", price=5.0)
    bad = served.until(lambda page: not told(page, "last_reload_successful"), "the bad file is refused")
    assert (price(bad), team(bad), zombie(bad)) == ({Decimal(4)}, {"bio"}, Decimal(900))
    assert "is rejected, and the old one stays in use" in served.program.log()

    site.says('[host]\npool = "spot"\n', price=6.0)
    served.program.process.send_signal(signal.SIGHUP)
    waits = served.until(lambda page: price(page) == {Decimal(6)}, "a good one is taken again")
    assert [told(waits, name) for name in ("last_reload_successful", "restart_needed")] == [1, 1]
    warned = [line for line in served.program.log().splitlines() if "a restart is needed" in line]
    assert len(warned) == 1
    assert "host.pool" in warned[0]

    site.says(price=2.0)
    served.program.process.send_signal(signal.SIGHUP)
    again = served.until(lambda page: price(page) == {Decimal(2)}, "all taken back")
    assert (told(again, "restart_needed"), zombie(again), team(again)) == (Decimal(0), Decimal(1800), {""})

    again.keeps_the_law()
    assert again.total("seconds_total", leak="unobserved") == begun.total("seconds_total", leak="unobserved") == 0
    before, after = begun.by("gpu", "paid_seconds_total"), again.by("gpu", "paid_seconds_total")
    passed = again.total("observation_timestamp_seconds") - begun.total("observation_timestamp_seconds")
    assert all(abs(after[gpu] - before[gpu] - passed) < 2 for gpu in before)  # of what a tick takes to read
    assert again.total("job_paid_seconds_total", job_id="4711") == after["0"]
    started = [page.total("job_start_timestamp_seconds", job_id="4711") for page in (begun, again)]
    assert abs(started[0] - started[1]) < 1  # the same moment, told by a wall clock that is being set
    billed = again.by("team", "account_seconds_total")
    assert all(billed[name] > 0 for name in ("", "hep", "bio"))
    assert served.program.end() == 0


@pytest.fixture(name="worker")
def _worker(tmp_path: Path) -> Iterator[dict[str, str]]:
    """Somebody's process on GPU 0: what the stand-in is to be told, for the daemon's environment."""
    if os.getuid() != 0:
        pytest.skip("needs another user's process")
    with subprocess.Popen(["sleep", "600"], user=USER, cwd="/") as process:
        script = tmp_path / "world.txt"
        script.write_text(f"gpu 0 idle\ngpu 0 process {process.pid} 1000000\n")
        try:
            yield {"LD_LIBRARY_PATH": f"{build()}", "NVML_STUB_SCRIPT": f"{script}"}
        finally:
            process.kill()


def hashing(folder: Path) -> Path:
    """A configuration that tells people by a hash, and judges them by their names."""
    (folder / "key").write_bytes(KEY)
    (folder / "key").chmod(0o400)
    config = folder / "config.toml"
    config.write_text(
        f'[privacy]\nusers = "hash"\nkey_file = "{folder}/key"\n[[workload.rules]]\nteam = "arcade"\nuser = "{USER}"\n'
    )
    return config


def test_no_page_no_log_and_no_trace_has_a_user_s_name(tmp_path: Path, worker: dict[str, str]) -> None:
    hidden, config = UserMask(KEY).user(USER), hashing(tmp_path)
    words = ("--config", f"{config}", "--source", "nvml", "--scheduler", "processes", *PACE)
    with daemon(tmp_path, "serve", *words, **worker) as served:
        page = served.until(lambda page: page.rows("job_info", user=hidden), "the hash of the user")
        assert {labels["team"] for labels, _ in page.rows("job_info", user=hidden)} == {"arcade"}
        assert all(labels["job_id"].startswith(f"{hidden}/") for labels, _ in page.rows("job_info", user=hidden))
        jobs = served.get("/api/v1/jobs").json()["jobs"]
        assert hidden in {job["owner"]["user"] for job in jobs}
        said = [served.get(path).text for path in ("/metrics", "/", "/api/v1/jobs", "/api/v1/gpus", "/readyz")]
        said.append(served.program.log())
    trace = tmp_path / "trace.jsonl"
    made = subprocess.run(
        command("record", f"{trace}", "--duration", "2", *words), env=environment(**worker), check=True, timeout=60,
        capture_output=True, text=True,
    )  # fmt: skip
    said += [made.stdout, made.stderr, trace.read_text()]
    assert hidden in trace.read_text()
    assert [text for text in said if USER in text or KEY.decode() in text] == []
    with read_trace(trace) as recorded:
        assert sum(1 for _ in recorded) > 1


def test_a_demo_heeds_it_too_and_without_a_file_sighup_ends_nothing(tmp_path: Path) -> None:
    with daemon(tmp_path, "demo", "--preroll", "60") as made:
        made.program.process.send_signal(signal.SIGHUP)
        wait_for(lambda: "started without --config" in made.program.log(), "the signal is heeded")
        assert told(made.page(), "last_reload_successful") == 1
        assert made.program.end() == 0


def test_the_cluster_s_instance_takes_what_it_can(tmp_path: Path) -> None:
    """And names what it uses and cannot take; prices are none of its business."""
    config, listen = tmp_path / "c.toml", '[cluster]\nscheduler = "slurm"\nlisten_address = "127.0.0.1:0"\n'
    config.write_text(listen)
    with running(command("cluster", "--config", f"{config}"), tmp_path / "cluster.log", environment()) as program:
        wait_for(lambda: "serving" in program.log(), "it serves")
        config.write_text(f'{listen}max_jobs = 7\n[log]\nformat = "json"\n[[prices]]\nper_gpu_hour = 1.0\n')
        program.process.send_signal(signal.SIGHUP)
        wait_for(lambda: "was read again: log.format\n" in program.log(), "SIGHUP is heeded")
        wait_for(lambda: "a restart is needed to apply changes of cluster.max_jobs;" in program.log(), "the rest")
        assert program.end() == 0
