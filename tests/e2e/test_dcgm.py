"""The whole daemon on NVIDIA's own bindings of DCGM, over a stand-in engine that fails in every way the real one does.

After each failure the books balance (every page that is read must keep the law), the other GPUs have lost nothing,
what was not seen says why, and nothing is left on the engine.
"""

import json
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from decimal import Decimal
from pathlib import Path

import pytest

from tests.dcgm_stub.bindings import missing, unpack
from tests.dcgm_stub.build import LIBRARY, build
from tests.e2e.running import ROOT, Daemon, Page, daemon
from tests.shared_library import compiler
from tests.waiting import wait_for

pytestmark = pytest.mark.e2e
PERIOD = Decimal("0.2")
LATE = 2 * PERIOD + 2
"""Seconds until it sees again: two periods, and what two busy cores may need beside."""
ALL = ("0", "1", "2")
COUNTED = ("connections", "groups", "field_groups", "watches")
EAR = """
import atexit, ctypes, json, os, signal

def tell(*_):
    stub = ctypes.CDLL(os.environ["DCGM_STUB_LIBRARY"])
    counts = {what: stub.dcgmStubCount(what.encode()) for what in COUNTED}
    counts["connects"] = stub.dcgmStubCalls(b"dcgmConnect_v2")
    with open(os.environ["DCGM_STUB_COUNTS"] + ".draft", "w") as file:
        json.dump(counts, file)
    os.replace(file.name, os.environ["DCGM_STUB_COUNTS"])

signal.signal(signal.SIGUSR1, tell)
atexit.register(tell)
"""
"""Runs inside the daemon, which alone can ask its stand-in what is on the engine: at SIGUSR1, and when it has ended."""


class HostEngine:
    """The engine's script, in the real time of both sides, and what there is on it."""

    def __init__(self, folder: Path) -> None:
        self._script, self._counts = folder / "world.txt", folder / "counts.json"
        self._incarnation = 0
        self._standing = [f"listen {folder / 'engine'}", "count 3"]
        self.says()
        ear, library = folder / "ear", build()
        ear.mkdir()
        (ear / "sitecustomize.py").write_text(f"COUNTED = {COUNTED}\n{EAR}")
        self.env = {
            "PYTHONPATH": f"{ear}:{ROOT}",
            "DCGM_BINDINGS": f"{unpack(folder / 'bindings', library=library)}",
            "DCGM_STUB_SCRIPT": f"{self._script}",
            "DCGM_STUB_LIBRARY": f"{library / LIBRARY}",
            "DCGM_STUB_COUNTS": f"{self._counts}",
            "GPU_EFFICIENCY_DCGM_ADDRESS": f"unix:{folder / 'engine'}",
            "GPU_EFFICIENCY_SAMPLING_PAUSE_FILE": f"{folder / 'pause'}",
        }

    def says(self, *lines: str) -> None:
        """All that is the matter from now on."""
        draft = self._script.with_suffix(".draft")
        draft.write_text("\n".join([*self._standing, f"engine up {self._incarnation}", *lines, ""]))
        draft.replace(self._script)

    def stands(self, *lines: str) -> None:
        """What holds whatever else is the matter."""
        self._standing += lines
        self.says()

    def restarts(self, *lines: str) -> None:
        """Another process answers at the same address."""
        self._incarnation += 1
        self.says(*lines)

    def counts(self, served: Daemon) -> dict[str, int]:
        """What there is on it now."""
        self._counts.unlink(missing_ok=True)
        served.program.process.send_signal(signal.SIGUSR1)
        wait_for(self._counts.exists, "the counts of the stand-in")
        return self.left()

    def left(self) -> dict[str, int]:
        found: dict[str, int] = json.loads(self._counts.read_text())
        return found


@pytest.fixture(name="engine")
def _engine(tmp_path: Path) -> HostEngine:
    if compiler() is None:
        pytest.skip("needs a C compiler to build the stand-in DCGM")
    if reason := missing():
        pytest.skip(reason)
    return HostEngine(tmp_path)


@pytest.fixture(name="serve")
def _serve(tmp_path: Path, engine: HostEngine) -> Iterator[Callable[..., Daemon]]:
    with ExitStack() as stack:
        pace = ("--sampling.interval-seconds", f"{PERIOD}")
        yield lambda **env: stack.enter_context(
            daemon(tmp_path, "serve", "--source", "dcgm", *pace, **engine.env | env)
        )
    left = engine.left()
    assert {what: left[what] for what in COUNTED} == dict.fromkeys(COUNTED, 0)


def useful(page: Page, *gpus: str) -> bool:
    """Each of these GPUs has had useful time, and has it now."""
    seen, states = page.by("gpu", "seconds_total", leak="useful"), page.states()
    return all(seen.get(gpu) and states[gpu][0] == "active" for gpu in gpus)


def unseen(page: Page) -> dict[str, Decimal]:
    return page.by("gpu", "seconds_total", leak="unobserved")


def grown(served: Daemon, since: Page, *gpus: str) -> Page:
    """A page by which these GPUs have more useful time than on that one."""
    before = since.by("gpu", "seconds_total", leak="useful")

    def more(page: Page) -> bool:
        now = page.by("gpu", "seconds_total", leak="useful")
        return useful(page, *gpus) and all(now[gpu] > before[gpu] for gpu in gpus)

    return served.until(more, f"useful time of {gpus} grows")


def begun(served: Daemon) -> Page:
    """The first page on which every GPU is seen."""
    return served.until(lambda page: useful(page, *ALL), "useful time of all")


def failed(served: Daemon, since: Page) -> Page:
    """A page by which the source has failed once more."""
    before = since.total("faults_total", kind="source_failed")
    return served.until(lambda page: page.total("faults_total", kind="source_failed") > before, "the source fails")


# -- the connection --


def test_an_engine_that_restarts_breaks_or_is_down_is_met_again_and_left_as_it_was(
    serve: Callable[..., Daemon], engine: HostEngine, tmp_path: Path
) -> None:
    known = tmp_path / "inventory.json"
    served = serve(GPU_EFFICIENCY_INVENTORY_FILE=f"{known}")
    page = begun(served)
    there = engine.counts(served)
    assert (there["connections"], there["groups"]) == (1, 3)
    for trouble in ("restart", "drop", "down"):
        if trouble == "restart":
            engine.restarts()
        else:
            engine.says({"drop": f"drop {engine.counts(served)['connects']}", "down": "engine down"}[trouble])
        lost = failed(served, since=page)
        assert set(lost.states().values()) <= {("unobserved", "source_failed"), ("active", "computing")}
        engine.says()
        page = grown(served, lost, *ALL)
        assert page.total("unobserved_seconds_total", reason="source_failed") > 0
        now = engine.counts(served)
        assert {what: now[what] for what in COUNTED} == {what: there[what] for what in COUNTED}
    assert "the connection is dead, a new one is needed" in served.program.log()
    inventory = known.read_text()
    goes_blind(served, engine, page)
    assert known.read_text() == inventory


def goes_blind(served: Daemon, engine: HostEngine, page: Page) -> None:
    """After a fatal Xid the engine has no value of any GPU: it says what to do, and no GPU is another one or gone."""
    gpus = page.by("uuid", "paid_seconds_total").keys()
    engine.says("engine blind", "gpu 1 xid 119 1")
    blind = failed(served, since=page)
    what_to_do = "then `systemctl restart nvidia-dcgm`"
    assert what_to_do in served.program.log()
    wait_for(lambda: what_to_do in served.get("/readyz").text, "/readyz names it")
    assert served.get("/readyz").status_code == 200
    assert what_to_do in served.get("/api/v1/node").json()["node"]["last_error"]
    wait_for(lambda: "names none of them" in served.get("/readyz").text, "it is met again, blind")
    blind = failed(served, since=blind)
    engine.restarts()
    back = grown(served, blind, *ALL)
    assert back.by("uuid", "paid_seconds_total").keys() == blind.by("uuid", "paid_seconds_total").keys() == gpus
    wait_for(lambda: what_to_do not in served.get("/readyz").text, "the error is over")


@pytest.mark.parametrize("where", ["read", "connect"])
def test_while_the_engine_hangs_scrapes_are_answered_and_the_time_is_unobserved(
    where: str, serve: Callable[..., Daemon], engine: HostEngine
) -> None:
    served = serve(GPU_EFFICIENCY_SAMPLING_DEADLINE_SECONDS="0.6")
    begun(served)
    if where == "read":
        engine.says("sleep dcgmGetValuesSince_v2 1800")
    else:
        engine.restarts("sleep dcgmConnect_v2 1800")
    unseen_all = {("unobserved", "source_hung")}  # a busy machine can make a fault of its own, which ends by itself
    hung = served.until(lambda page: set(page.states().values()) == unseen_all, "the hang is told")
    assert served.get("/readyz").status_code == 200
    assert hung.total("faults_total", kind="source_hung") > 0
    assert hung.rows("power_watts") == []
    engine.says()
    wait_for(lambda: "source answers again" in served.program.log(), "the call returns")
    answered = served.page()
    back = grown(served, hung, *ALL)
    assert all(unseen(back)[gpu] - unseen(answered)[gpu] <= LATE for gpu in ALL)
    assert back.total("unobserved_seconds_total", reason="source_hung") > 0
    assert engine.counts(served)["connections"] == 1


def test_an_engine_that_lets_every_request_time_out_is_left_and_met_again(
    serve: Callable[..., Daemon], engine: HostEngine
) -> None:
    served = serve()
    page = begun(served)
    engine.says("engine hung 200")
    lost = failed(served, since=page)
    assert "(timeout): the connection is dead" in served.program.log()
    engine.says()
    grown(served, lost, *ALL)
    assert engine.counts(served)["connections"] == 1


# -- one GPU --


def one_gpu(served: Daemon, engine: HostEngine, trouble: str, seen: tuple[str, str]) -> None:
    """GPU 0 alone is in trouble, shows it, and is back; the others have not lost a millisecond."""
    before = served.page()
    engine.says(trouble)
    bad = served.until(lambda page: page.states()["0"] == seen, f"{trouble}: {seen}")
    during = grown(served, bad, "1", "2")
    assert during.states()["0"] == seen
    assert during.total("seconds_total", leak="useful", gpu="0") == bad.total("seconds_total", leak="useful", gpu="0")
    engine.says()
    back = grown(served, during, *ALL)
    assert unseen(back)["1"] == unseen(before)["1"]
    assert unseen(back)["2"] == unseen(before)["2"]
    paid = back.by("gpu", "paid_seconds_total")
    assert max(paid.values()) - min(paid.values()) <= LATE  # of what is settled; the newest moments come one by one


def test_a_gpu_in_trouble_is_told_by_its_reason_and_the_others_lose_nothing(
    serve: Callable[..., Daemon], engine: HostEngine
) -> None:
    served = serve()
    begun(served)
    for kind in ("blank", "not_permissioned"):
        one_gpu(served, engine, f"gpu 0 blank 1001 {kind}", ("unobserved", "blank"))
    no_data = "\n".join(f"gpu 0 status {field} -14" for field in (1001, 1002, 1004, 1005, 1006, 1007, 1008, 1016))
    one_gpu(served, engine, no_data, ("unobserved", "stale"))
    one_gpu(served, engine, "gpu 0 lost", ("unavailable", "lost"))
    one_gpu(served, engine, "gpu 0 gone", ("unavailable", "missing"))
    assert engine.counts(served)["groups"] == 3


def test_fields_without_a_value_are_absent_and_cost_no_time(serve: Callable[..., Daemon], engine: HostEngine) -> None:
    """Blanks of every type: doubles, wide and narrow integers."""
    served = serve()
    before = begun(served)
    for kind in ("blank", "not_found", "not_supported", "not_permissioned"):
        narrow = [f"gpu 0 blank {field} int32_{kind}" for field in (203, 150, 112)]
        wide = [f"gpu 0 blank {field} {kind}" for field in (155, 156, 100, 252, 1003, 1004, 1009, 1011)]
        engine.says(*narrow, *wide)
        served.until(lambda page: "0" not in page.by("gpu", "power_watts"), f"no power: {kind}")
        bare = served.after(2)
        assert bare.states()["0"] == ("active", "computing")
        assert "0" not in bare.by("gpu", "power_watts") | bare.by("gpu", "temperature_celsius")
        engine.says()
        served.until(lambda page: "0" in page.by("gpu", "power_watts"), f"power again: {kind}")
    assert unseen(served.page()) == unseen(before)


def test_a_gpu_lost_while_the_engine_restarts_does_not_hide_the_others(
    serve: Callable[..., Daemon], engine: HostEngine
) -> None:
    """It comes back without a name, and is refused by every group."""
    served = serve()
    page = begun(served)
    engine.restarts("gpu 0 lost")
    lost = grown(served, failed(served, since=page), "1", "2")
    served.until(lambda page: page.states()["0"] == ("unavailable", "lost"), "GPU 0 is lost")
    assert useful(lost, "1", "2")
    engine.says()
    served.until(lambda page: useful(page, *ALL), "all are back")


# -- profiling, and the layout --


REFUSED = {
    -33: "datacenter-gpu-manager-4-proprietary",
    -29: "the host engine does not run as root",
    -17: "NVreg_RestrictProfilingToAdminUsers=0",
    -37: "another program holds the counters",
}


def test_refused_counters_are_told_with_what_to_do_and_a_new_layout_is_seen_while_running(
    serve: Callable[..., Daemon], engine: HostEngine
) -> None:
    """Both are looked at every ten seconds: one wait for the two."""
    engine.stands("count 7")
    refused = [f"gpu {gpu} profiling {code}" for gpu, code in enumerate(REFUSED)]
    engine.says(*refused)
    served = serve()
    first = served.until(lambda page: useful(page, "4", "5", "6"), "the others' useful time")
    for gpu, words in enumerate(REFUSED.values()):
        # More than one where the machine was so busy that the engine was left and met again.
        lines = [line for line in served.program.log().splitlines() if f"GPU {gpu} (GPU-" in line]
        assert lines
        assert all("profiling_refused" in line and words in line for line in lines)
    poor = first.states()
    assert {poor[f"{gpu}"][0] for gpu in range(4)} == {"active"}  # as the driver's own utilisation shows them
    engine.stands("gpu 5 mig 3g.40gb 2g.20gb")
    cut = served.until(lambda page: len(page.states()) == 9, "the instances")
    whole = served.until(lambda page: useful(page, "0", "1", "2", "3", "4", "6"), "the counters are given back")
    instances = [gpu for gpu in cut.states() if gpu.startswith("5:")]
    page = served.until(lambda page: useful(page, *instances), "the instances' useful time")
    paid = page.by("gpu", "paid_seconds_total")
    board = sum(paid[gpu] for gpu in ("5", *instances))
    assert abs(board - paid["6"]) <= LATE
    assert page.states()["5"][0] == "unallocated"
    for other in ("4", "6"):
        assert unseen(page)[other] == unseen(whole)[other] == unseen(first)[other]
    now = engine.counts(served)
    assert (now["connections"], now["groups"]) == (1, 8)  # seven boards, and the instances of one


def test_another_clients_pause_is_blank_and_ours_is_paused_and_taken_back(
    serve: Callable[..., Daemon], engine: HostEngine, tmp_path: Path
) -> None:
    engine.stands("gpu * gpm 0")  # newer boards cannot be paused
    served = serve()
    before = begun(served)
    engine.says("paused 1")
    blank = served.until(lambda page: set(page.states().values()) == {("unobserved", "blank")}, "the others' pause")
    assert useful(before, *ALL)
    engine.says()
    page = grown(served, blank, *ALL)
    (tmp_path / "pause").touch()
    paused = served.until(lambda page: set(page.states().values()) == {("unobserved", "paused")}, "our pause")
    engine.says(f"drop {engine.counts(served)['connects']}")  # nobody notices before the pause is over
    engine.says()
    (tmp_path / "pause").unlink()
    back = grown(served, paused, *ALL)
    assert back.total("unobserved_seconds_total", reason="paused") > 0
    assert back.total("unobserved_seconds_total", reason="blank") >= page.total(
        "unobserved_seconds_total", reason="blank"
    )
