"""The whole daemon on a stand-in `libnvidia-ml.so.1`: eight GPUs, one lost and back, a driver that hangs, a stop."""

import http.client
import re
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from exporter import __version__
from exporter.core.exposition import render
from exporter.core.ledger import Ledger
from exporter.core.pipeline import advance
from exporter.core.snapshot import DaemonMetadata, take_snapshot
from exporter.trace import read_trace
from tests.e2e.running import Daemon, Page, command, daemon, environment, running
from tests.nvml_stub.build import LIBRARY, build
from tests.waiting import wait_for

pytestmark = pytest.mark.e2e
ALL = [f"{index}" for index in range(8)]
PACE = ("--sampling.interval-seconds", "0.5")
STOP_SECONDS = 10.0
"""What a stop may take here; in peace it is 3 s at most, but two cores may be busy with other tests."""


class Driver:
    """The stand-in's script: what the driver does from now on."""

    def __init__(self, folder: Path) -> None:
        self.script = folder / "world.txt"
        self.says()
        self.env = {"LD_LIBRARY_PATH": f"{build()}", "NVML_STUB_SCRIPT": f"{self.script}"}

    def says(self, *lines: str) -> None:
        draft = self.script.with_suffix(".draft")
        draft.write_text("".join(f"{line}\n" for line in lines))
        draft.replace(self.script)


@pytest.fixture(name="driver")
def _driver(tmp_path: Path) -> Driver:
    return Driver(tmp_path)


@pytest.fixture(name="serve")
def _serve(tmp_path: Path, driver: Driver) -> Iterator[Callable[..., Daemon]]:
    with ExitStack() as stack:
        yield lambda **env: stack.enter_context(
            daemon(tmp_path, "serve", "--source", "nvml", *PACE, **driver.env, **env)
        )


def useful(page: Page) -> Any:
    return page.total("seconds_total", leak="useful")


def unseen(page: Page) -> Any:
    return page.total("seconds_total", leak="unobserved")


def test_eight_gpus_each_second_of_each_accounted_for(serve: Callable[..., Daemon]) -> None:
    served = serve()
    page = served.until(useful, "useful time")
    assert page.states() == dict.fromkeys(ALL, ("active", "computing"))
    assert page.by("source", "source_info", scheduler="processes") == {"nvml": 1}
    assert page.total("simulated") == 0
    assert [float(value) for _, value in page.rows("power_watts")] == [500.0] * 8
    assert len(page.rows("allocation_info")) == 8
    later = served.after(4)
    assert unseen(later) == 0
    assert len(set(later.by("gpu", "paid_seconds_total").values())) == 1
    lost = later.total("seconds_total", layer="ectr")
    wait = lost - later.total("seconds_total", leak="exposed_communication")  # estimated, as the job has eight GPUs
    assert float(wait / later.total("paid_seconds_total")) == pytest.approx(0.1, abs=0.01)
    ectr = 1 - float(lost / later.total("paid_seconds_total"))
    assert float(later.total("node_ectr_ratio")) == pytest.approx(ectr, abs=0.01)


def test_the_page_and_the_interface_show_what_the_hardware_says_now(serve: Callable[..., Daemon]) -> None:
    served = serve()
    served.until(useful, "useful time")
    gpus = served.get("/api/v1/gpus").json()
    assert gpus["node"]["simulated"] is False
    assert [gpu["index"] for gpu in gpus["gpus"]] == ALL
    assert {gpu["power_watts"] for gpu in gpus["gpus"]} == {500.0}
    assert {gpu["temperature_celsius"] for gpu in gpus["gpus"]} == {60.0}
    page = served.get("/").text
    assert "SIMULATED" not in page
    assert page.count('<span class="now">live</span>') == 8


def test_a_gpu_lost_is_unavailable_and_paid_for_and_its_return_is_seen(
    serve: Callable[..., Daemon], driver: Driver
) -> None:
    served = serve()
    served.until(useful, "useful time")
    driver.says("gpu 3 lost")
    lost = served.until(lambda page: page.states()["3"] == ("unavailable", "lost"), "GPU 3 lost")
    lost = served.after(4)
    assert {index for index, (state, _) in lost.states().items() if state == "active"} == set(ALL) - {"3"}
    assert lost.by("gpu", "power_watts").keys() == set(ALL) - {"3"}
    assert "GPU 3 (GPU-5700b000-0000-0000-0000-000000000003) is lost" in served.program.log()
    driver.says()
    served.until(lambda page: page.states()["3"] == ("active", "computing"), "GPU 3 is back")
    back = served.after(2)
    assert len(set(back.by("gpu", "paid_seconds_total").values())) == 1
    unavailable = back.by("gpu", "seconds_total", leak="unavailable")
    assert {index for index, seconds in unavailable.items() if seconds} == {"3"}
    assert unavailable["3"] >= lost.total("seconds_total", leak="unavailable") > 0


def test_while_nvml_hangs_scrapes_are_answered_and_the_time_is_unobserved(
    serve: Callable[..., Daemon], driver: Driver
) -> None:
    served = serve(GPU_EFFICIENCY_SAMPLING_DEADLINE_SECONDS="1")
    before = served.until(useful, "useful time")
    driver.says("gpu 2 sleep nvmlDeviceGetTemperature 5000")
    hung = served.until(lambda page: page.total("faults_total", kind="source_hung"), "the hang is told")
    assert served.get("/readyz").status_code == 200
    assert set(hung.states().values()) == {("unobserved", "source_hung")}
    assert hung.rows("power_watts") == []
    during = served.after(4)
    assert during.total("paid_seconds_total") > hung.total("paid_seconds_total")
    assert useful(during) == useful(hung) >= useful(before)
    driver.says()
    back = served.until(lambda page: useful(page) > useful(hung), "useful time again")
    assert {state for state, _ in back.states().values()} == {"active"}
    assert back.total("unobserved_seconds_total", reason="source_hung") > 0
    assert served.program.log().count("source answers again") == 1


def test_a_hang_shorter_than_the_deadline_loses_nothing(serve: Callable[..., Daemon], driver: Driver) -> None:
    served = serve(GPU_EFFICIENCY_SAMPLING_DEADLINE_SECONDS="60")
    served.until(useful, "useful time")
    driver.says("gpu 2 sleep nvmlDeviceGetTemperature 3000")
    during = served.after(4)
    driver.says()
    after = served.until(lambda page: useful(page) > useful(during), "useful time again")
    assert unseen(after) == 0
    assert after.total("faults_total", kind="source_hung") == 0


def test_sigterm_ends_it_soon_and_well_even_while_nvml_hangs_and_clients_stay(
    serve: Callable[..., Daemon], driver: Driver
) -> None:
    served = serve(GPU_EFFICIENCY_SAMPLING_DEADLINE_SECONDS="1")
    served.until(useful, "useful time")
    driver.says("gpu 0 sleep nvmlDeviceGetTemperature 600000")
    served.until(lambda page: page.total("faults_total", kind="source_hung"), "the hang is told")
    kept = http.client.HTTPConnection("127.0.0.1", served.port, timeout=30)
    kept.request("GET", "/metrics", headers={"Connection": "keep-alive"})
    assert kept.getresponse().read()
    silent = socket.create_connection(("127.0.0.1", served.port))
    began = time.monotonic()
    assert served.program.end() == 0
    assert time.monotonic() - began < STOP_SECONDS
    kept.close()
    silent.close()


def no_nvml(folder: Path) -> dict[str, str]:
    """An environment in which no program finds a usable NVML, whatever the machine has."""
    (folder / LIBRARY).write_bytes(b"not a library")
    return environment(LD_LIBRARY_PATH=f"{folder}", GPU_EFFICIENCY_DCGM_EXPORTER_URL="http://127.0.0.1:1/metrics")


@pytest.mark.parametrize("words", [("serve", "--web.listen-address", "127.0.0.1:0"), ("record", "trace.jsonl")])
def test_without_a_gpu_it_ends_with_status_3_and_says_what_was_tried_and_what_to_do(
    words: tuple[str, ...], tmp_path: Path
) -> None:
    with running(command(*words), tmp_path / "said", no_nvml(tmp_path)) as program:
        assert program.gone() == 3
        said = program.log()
    assert "\n  tried nvml: NVML: libnvidia-ml.so.1 not found: is the NVIDIA driver installed" in said
    assert "\n  tried dcgm-exporter: http://127.0.0.1:1/metrics could not be read" in said
    assert "`gpu-efficiency demo` serves a simulated node instead." in said
    assert "Traceback" not in said
    assert not (tmp_path / "trace.jsonl").exists()


def test_a_driver_that_is_not_loaded_is_status_3_too(driver: Driver, tmp_path: Path) -> None:
    driver.says("driver gone")
    with running(command("serve", "--source", "nvml"), tmp_path / "said", environment(**driver.env)) as program:
        assert program.gone() == 3
        assert "tried nvml: NVML: the kernel driver is not loaded" in program.log()


def test_a_port_in_use_is_status_1_with_what_to_do(
    serve: Callable[..., Daemon], driver: Driver, tmp_path: Path
) -> None:
    taken = f"127.0.0.1:{serve().port}"
    words = command("serve", "--source", "nvml", "--web.listen-address", taken)
    with running(words, tmp_path / "said", environment(**driver.env)) as program:
        assert program.gone() == 1
        assert f"gpu-efficiency: cannot listen on {taken}: address in use" in program.log()


def test_what_is_recorded_replays_to_the_same_bytes_as_in_this_process(driver: Driver, tmp_path: Path) -> None:
    trace, env = tmp_path / "trace.jsonl", environment(**driver.env)
    with running(command("record", f"{trace}", "--source", "nvml", *PACE), tmp_path / "said", env) as program:
        wait_for(lambda: program.alive() and trace.exists() and trace.read_bytes().count(b"\n") > 5, "observations")
        driver.says("gpu 5 lost")
        wait_for(lambda: program.alive() and b'"condition":"lost"' in trace.read_bytes(), "GPU 5 lost")
        assert program.end() == 0
        assert re.search(rf"^\d+ observations in {trace}$", program.log(), re.MULTILINE)
    replayed = replay(trace, tmp_path / "once")
    assert replay(trace, tmp_path / "twice") == replayed
    assert here(trace) == replayed
    page = Page(replayed).keeps_the_law()
    assert page.states()["5"] == ("unavailable", "lost")
    assert {state for index, (state, _) in page.states().items() if index != "5"} == {"active"}
    assert page.total("seconds_total", leak="unavailable", gpu="5") > 0
    assert page.total("simulated") == 1


def test_a_recording_for_a_while_ends_by_itself_and_whole(driver: Driver, tmp_path: Path) -> None:
    trace, words = tmp_path / "trace.jsonl.gz", ("--source", "nvml", "--duration", "2", *PACE)
    with running(command("record", f"{trace}", *words), tmp_path / "said", environment(**driver.env)) as program:
        assert program.gone() == 0
    page = Page(replay(trace, tmp_path / "replayed")).keeps_the_law()
    assert {state for state, _ in page.states().values()} == {"active"}
    assert 0 < page.total("paid_seconds_total", gpu="0") <= 3
    assert unseen(page) == 0


def replay(trace: Path, said: Path) -> str:
    with running(command("replay", f"{trace}", "--metrics"), said, environment()) as program:
        assert program.gone() == 0
        return program.log()


def here(trace: Path) -> str:
    """What the same observations come to without the command around them."""
    ledger = Ledger()
    with read_trace(trace) as read:
        for observation in read:
            advance(ledger, observation)
        host = read.header.host
    meta = DaemonMetadata(version=__version__, source="replay", simulated=True, host=host)
    return render(take_snapshot(ledger, meta)).decode()
