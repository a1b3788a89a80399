"""The child that makes the loads, as a process of its own, on a stand-in libcuda and a stand-in PyTorch."""

import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest

from benchmarks.known.loads import LOADS, Load
from benchmarks.known.stage import Child, Report, StageError
from benchmarks.machine import ROOT
from exporter.clock import SystemClock
from exporter.core.model import MS, SECOND
from exporter.trace import read_trace
from tests.clocks import JumpClock
from tests.nvml_stub.build import LIBRARY, build
from tests.shared_library import compiler

pytestmark = pytest.mark.slow

HERE = Path(__file__).parent
PRETENDED = HERE / "pretended"
SMALL_SECONDS = 50e-6
_BY_NAME = {load.name: load for load in LOADS}


@pytest.fixture(scope="session")
def libcuda() -> Iterator[Path]:
    """The folder of the stand-in library."""
    cc = compiler()
    if cc is None:
        pytest.skip("needs a C compiler to build the stand-in libcuda")
    flags = ["-shared", "-fPIC", "-O2", "-std=gnu11", "-Wall", "-Wextra", "-Werror", "-Wl,-soname,libcuda.so.1"]
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / "libcuda.so.1"
        subprocess.run([cc, *flags, "-o", str(library), str(HERE / "cuda_stub.c")], check=True)
        yield Path(folder)


def short(name: str, **other: Any) -> Load:
    """One of LOADS, for as short as can be."""
    return msgspec.structs.replace(_BY_NAME[name], **{"seconds": 0.2, "warm": 0.0, **other})


class Told:
    """All that a child said of some loads."""

    def __init__(self, libcuda: Path | None, *loads: Load, torch: bool = False, fail: str = "") -> None:
        environment = {**os.environ, "CUDA_STUB_FAIL": fail, "LD_LIBRARY_PATH": str(libcuda or "")}
        environment["PYTHONPATH"] = str(PRETENDED) if torch else ""
        done = subprocess.run(
            [sys.executable, "-m", "benchmarks.known.child"],
            cwd=ROOT,
            env=environment,
            input=b"".join(msgspec.json.encode(load) + b"\n" for load in loads),
            capture_output=True,
            check=True,
        )
        self.log = done.stderr.decode()
        self.hello, *told = [json.loads(line) for line in done.stdout.splitlines()]
        self.by_load: list[list[dict[str, Any]]] = [[]]
        self.ends: list[tuple[str, str]] = []
        for each in told:
            if each["event"] == "lap":
                self.by_load[-1].append(each)
            else:
                self.ends.append((each["outcome"], each["reason"]))
                self.by_load.append([])
        self.laps = self.by_load[0]


def test_the_reduced_set_says_what_it_is(libcuda: Path) -> None:
    hello = Told(libcuda).hello
    assert (hello["set"], hello["multiprocessors"]) == ("cuda", 132)
    assert "PyTorch" in hello["reason"]


@pytest.mark.parametrize(
    ("name", "flops", "moved"),
    [
        ("spin", 0, 0),
        ("spin_one_block", 0, 0),
        # 264 blocks of 8 warps, 20,000 rounds of 8 instructions of 2*16*8*16.
        ("mma", 264 * 8 * 20_000 * 8 * 4096, 0),
        ("copy", 0, 2 * 2**29),
        ("copy_kernel", 0, 2 * 2**29),
        ("small_kernels", 0, 0),
    ],
)
def test_a_load_tells_what_each_lap_did(libcuda: Path, name: str, flops: int, moved: int) -> None:
    told = Told(libcuda, short(name))
    assert told.ends == [("done", "")]
    assert told.laps
    for lap in told.laps:
        assert (lap["flops"], lap["bytes"]) == (flops * lap["launches"], moved * lap["launches"])
        assert lap["launches"] >= 1
        assert 0 < lap["busy"] <= (lap["end"] - lap["start"]) / SECOND
    assert all(one["end"] <= other["start"] for one, other in pairwise(told.laps))
    assert told.log == ""  # no memory was left behind


def test_a_lap_lasts_until_the_device_is_done(libcuda: Path) -> None:
    """A spin is 50 ms long, however soon its launch returns."""
    for lap in Told(libcuda, short("spin")).laps:
        assert lap["end"] - lap["start"] >= lap["launches"] * 50 * MS


def test_a_spin_takes_every_multiprocessor_or_one_and_the_child_the_gpu_it_was_given(
    libcuda: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LD_LIBRARY_PATH", str(libcuda))
    monkeypatch.setenv("CUDA_STUB_TELL", "1")
    child, clock = Child(python=sys.executable, uuid="GPU-7", folder=tmp_path, clock=SystemClock()), SystemClock()
    for name in ("spin", "spin_one_block", "small_kernels"):
        play(child, short(name), clock)
    child.close()
    told = (tmp_path / "child.log").read_text().splitlines()
    assert told == ["spin: 264 blocks of 32 threads on GPU-7", "spin: 1 blocks of 32 threads on GPU-7"]


def test_small_kernels_come_at_half_the_pace_they_need(libcuda: Path) -> None:
    for lap in Told(libcuda, short("small_kernels")).laps:
        assert lap["launches"] > 1
        assert lap["busy"] / lap["launches"] >= SMALL_SECONDS * 0.999
        assert (lap["end"] - lap["start"]) / SECOND >= 2 * lap["busy"] * (1 - 1 / lap["launches"])


def test_a_load_with_gaps_rests_as_long_as_it_works(libcuda: Path) -> None:
    laps = Told(libcuda, short("mma", duty=0.5, seconds=0.5)).laps
    assert len(laps) > 1
    for one, other in pairwise(laps):
        assert other["start"] - one["end"] >= (one["end"] - one["start"]) * 0.999


def test_an_idle_context_does_nothing(libcuda: Path) -> None:
    laps = Told(libcuda, short("idle_context")).laps
    assert laps
    assert {(lap["busy"], lap["flops"], lap["launches"]) for lap in laps} == {(0.0, 0, 0)}


def test_warming_up_is_not_told(libcuda: Path) -> None:
    first, second, _ = Told(libcuda, short("spin"), short("spin", warm=0.6)).by_load
    assert second[0]["start"] - first[-1]["end"] >= 600 * MS
    assert second[-1]["end"] - second[0]["start"] >= 100 * MS  # its 200 ms begin when it is warm


def test_without_pytorch_products_are_skipped_and_the_others_run(libcuda: Path) -> None:
    told = Told(libcuda, short("bf16_4096"), short("mma"))
    assert [outcome for outcome, _ in told.ends] == ["skipped", "done"]
    assert told.ends[0][1].startswith("needs PyTorch: ")
    assert "--python" in told.ends[0][1] or "cannot use this GPU" in told.ends[0][1]


@pytest.mark.parametrize("name", ["bf16_1024", "fp16_4096", "tf32_4096", "fp8_4096"])
def test_with_pytorch_a_product_counts_its_operations(libcuda: Path, name: str) -> None:
    load = short(name, size=64)
    told = Told(libcuda, load, torch=True)
    assert told.hello["set"] == "torch"
    assert told.ends == [("done", "")]
    assert told.laps
    assert {lap["flops"] / lap["launches"] for lap in told.laps} == {2 * 64**3}
    assert told.log == "a library that talks\n"


def test_a_library_that_raises_fails_its_load_alone(libcuda: Path) -> None:
    told = Told(libcuda, short("transformer"), short("mma"), torch=True)  # the stand-in has no layers
    assert [outcome for outcome, _ in told.ends] == ["failed", "done"]
    assert "Error: " in told.ends[0][1]


@pytest.mark.parametrize(
    ("fail", "reason"),
    [
        ("cuMemAlloc_v2 2", "libcuda: cuMemAlloc_v2: out of memory (error 2)"),
        ("cuLaunchKernel 999", "libcuda: cuLaunchKernel: stand-in error (error 999)"),
        ("cuInit 100", "libcuda: cuInit: stand-in error (error 100)"),
        ("cuModuleLoadData 218", "libcuda: cuModuleLoadData: stand-in error (error 218)"),
    ],
)
def test_what_the_driver_refuses_is_told_in_its_words(libcuda: Path, fail: str, reason: str) -> None:
    assert Told(libcuda, short("spin"), fail=fail).ends == [("skipped", reason)]


def test_without_a_driver_nothing_runs_and_the_reason_is_told(tmp_path: Path) -> None:
    (tmp_path / "libcuda.so.1").write_bytes(b"not a library")
    told = Told(tmp_path, short("spin"), short("idle_context"))
    assert told.hello["set"] == "none"
    assert [outcome for outcome, _ in told.ends] == ["skipped", "skipped"]
    assert all("libcuda.so.1 could not be loaded" in reason for _, reason in told.ends)


# -- the parent's side --


def play(child: Child, load: Load, clock: SystemClock) -> Report:
    child.begin(load)
    while not child.over():
        clock.wait(clock.now() + 20 * MS, threading.Event())
    return child.report()


@pytest.fixture
def crew(libcuda: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Child]:
    monkeypatch.setenv("LD_LIBRARY_PATH", str(libcuda))
    child = Child(python=sys.executable, uuid="GPU-0", folder=tmp_path, clock=SystemClock())
    yield child
    child.close()


def test_the_parent_hears_the_laps_of_each_load_alone(crew: Child) -> None:
    clock = SystemClock()
    before = clock.now()
    one, two = play(crew, short("spin"), clock), play(crew, short("mma"), clock)
    assert (one.end.outcome, two.end.outcome) == ("done", "done")
    assert one.laps[-1].end <= two.laps[0].start
    assert before <= one.laps[0].start  # both sides read the same clock
    assert two.laps[-1].end <= clock.now() + MS
    assert one.laps[0].flops == 0 < two.laps[0].flops
    assert crew.hello().set == "cuda"


def test_a_child_that_dies_fails_its_load_and_the_next_gets_a_new_one(
    libcuda: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LD_LIBRARY_PATH", str(libcuda))
    once, hello = tmp_path / "once", '{"event": "hello", "versions": "longer than what the next one says at first"}'
    dying = f"touch {once}; echo '{hello}'; echo no more >&2; exit 1"
    python = script(tmp_path, f'if [ ! -e {once} ]; then {dying}; fi; exec {sys.executable} "$@"')
    child, clock = Child(python=str(python), uuid="GPU-0", folder=tmp_path, clock=SystemClock()), SystemClock()
    first = play(child, short("spin"), clock)
    assert (first.end.outcome, first.laps) == ("failed", ())
    assert first.end.reason.startswith("the child ended: no more (")
    second = play(child, short("spin"), clock)
    assert second.end.outcome == "done"
    assert second.laps
    assert child.hello().multiprocessors == 132
    child.close()


def test_a_child_that_never_ends_is_killed(tmp_path: Path) -> None:
    clock = JumpClock()
    python = script(tmp_path, "exec sleep 600")
    child = Child(python=str(python), uuid="GPU-0", folder=tmp_path, clock=clock)
    child.begin(short("spin"))
    assert not child.over()
    clock.wait(clock.now() + 200 * SECOND, threading.Event())
    assert child.over()
    assert child.report().end.reason == "no end after 120 s more than it should take"


def test_an_interpreter_that_is_not_there_is_told(tmp_path: Path) -> None:
    child = Child(python=str(tmp_path / "nosuch"), uuid="GPU-0", folder=tmp_path, clock=SystemClock())
    with pytest.raises(StageError, match="nosuch: cannot be started: No such file"):
        child.begin(short("spin"))


def test_an_answer_that_is_none_ends_the_measurement_with_it(tmp_path: Path) -> None:
    python = script(tmp_path, "echo Segmentation fault; exec cat >&2")
    clock = SystemClock()
    child = Child(python=str(python), uuid="GPU-0", folder=tmp_path, clock=clock)
    try:
        with pytest.raises(StageError, match="said b'Segmentation fault', which is no answer"):
            play(child, short("spin"), clock)
    finally:
        child.close()


def test_half_a_line_is_not_an_answer_yet(tmp_path: Path) -> None:
    go, told, clock = tmp_path / "go", tmp_path / "child.jsonl", SystemClock()
    waiting = f"while [ ! -e {go} ]; do sleep 0.01; done"
    python = script(tmp_path, f"""printf '{{"event": "e'; {waiting}; echo 'nd", "reason": "whole"}}'; exec cat >&2""")
    child = Child(python=str(python), uuid="GPU-0", folder=tmp_path, clock=clock)
    child.begin(short("spin"))
    while not told.read_bytes():
        clock.wait(clock.now() + 10 * MS, threading.Event())
    assert not child.over()
    go.touch()
    while not child.over():
        clock.wait(clock.now() + 10 * MS, threading.Event())
    child.close()
    assert child.report().end.reason == "whole"


def script(folder: Path, line: str) -> Path:
    file = folder / "python"
    file.write_text(f"#!/bin/sh\n{line}\n")
    file.chmod(0o755)
    return file


@pytest.mark.benchmark
def test_the_whole_command_runs_its_child_beside_both_stand_ins(libcuda: Path, tmp_path: Path) -> None:
    """In real time, as on a node; what the counters show has nothing to do with the loads here."""
    folder = tmp_path / "libraries"
    folder.mkdir()
    for library in (build() / LIBRARY, libcuda / "libcuda.so.1"):
        (folder / library.name).symlink_to(library)
    world = tmp_path / "script"
    world.write_text("count 1\ngpu 0 idle\ngpu 0 gr 0\ngpu 0 sm 0\ngpu 0 tensor 0\ngpu 0 dram 0\ngpu 0 util 0\n")
    command = [sys.executable, "-m", "benchmarks.accuracy", "--out", str(tmp_path / "out")]
    done = subprocess.run(
        [*command, "--only", "no_context", "idle_context", "mma"],
        cwd=ROOT,
        env={**os.environ, "LD_LIBRARY_PATH": str(folder), "NVML_STUB_SCRIPT": str(world)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "out" / "accuracy.json").read_bytes())
    rows = {row["load"]["name"]: row for row in result["rows"]}
    assert set(rows) == {"no_context", "idle_context", "mma"}
    assert rows["idle_context"]["errors"]["wait"] == pytest.approx(0, abs=0.001)
    assert rows["mma"]["truth"]["flops"] > 1e14  # 2 ms a launch in the stand-in: 692 TFLOP/s
    assert rows["mma"]["reported"]["ofu"] == 0
    assert rows["mma"]["expected"]["ofu"] > 0.1
    assert "the reduced set, through libcuda alone" in done.stdout
    for name in rows:
        with read_trace(tmp_path / "out" / f"{name}.jsonl.gz") as trace:
            first = next(iter(trace))
        assert (first.readings, first.faults) == ((), ())  # each recording begins with a baseline of its own
