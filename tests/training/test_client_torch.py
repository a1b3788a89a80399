"""A real training loop in PyTorch, with a crash and a rollback: its reports agree with its own counts."""

import json
from pathlib import Path
from typing import Any

import pytest

from exporter.training.message import Message
from tests.training.frameworks.running import bounds, missing, run, within
from tests.training.recorder import Recorder, summed

pytestmark = pytest.mark.e2e
CRASHED = 17
FIGURES = ("steps", "tokens", "padding", "flops", "checkpoints")


def _seconds(told: dict[str, Any], truth: dict[str, Any]) -> None:
    """All of the job's seconds, and in each phase as many as between the two stopwatches."""
    spent = bounds(truth)
    assert within(told["seconds"], *spent.pop("all"))
    assert set(told["phases"]) == set(spent)
    for name, took in told["phases"].items():
        assert within(took, *spent[name]), name


def test_a_loop_that_crashes_and_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    if reason := missing("torch"):
        pytest.skip(reason)
    with Recorder(tmp_path / "first.sock") as recorder:
        run("transformer.py", tmp_path, "--every", 0.5, "--tell-highest", socket=recorder.path, check=CRASHED)
        first = recorder.all()
    with Recorder(tmp_path / "second.sock") as recorder:
        run("transformer.py", tmp_path, "--every", 0.5, "--tell-highest", socket=recorder.path)
        second = recorder.all()
        assert not recorder.refused
    _before_the_crash(first, json.loads((tmp_path / "truth-0.json").read_text()))
    _after_it(second, json.loads((tmp_path / "truth-1.json").read_text()), first)


def _before_the_crash(said: list[Message], truth: dict[str, Any]) -> None:
    """Reported counts are exact; what followed the last message was lost with the process."""
    told = summed(said)
    then = next(each for each in truth["history"] if each["step"] == told["step"])
    assert {name: told[name] for name in FIGURES} == {name: then[name] for name in FIGURES} | {
        "flops": pytest.approx(then["flops"]), "checkpoints": 3,
    }  # fmt: skip
    lost = [each for each in truth["history"] if each["step"] > told["step"]]
    assert not lost or lost[-1]["at"] - lost[0]["at"] < 2.0
    assert within(told["phases"]["checkpoint"], *bounds(truth)["checkpoint"])
    assert within((said[0].at or 0) / 1e9, truth["began"], truth["created"]), "the clock is the host's"


def _after_it(said: list[Message], truth: dict[str, Any], before: list[Message]) -> None:
    told = summed(said)
    assert {name: told[name] for name in FIGURES} == {name: truth[name] for name in FIGURES} | {
        "flops": pytest.approx(truth["flops"])
    }
    assert (told["restarts"], told["samples"], truth["dropped"], truth["error"]) == (1, truth["steps"] * 4, 0, "")
    again = next(each for each in said if each.restart)
    assert (again.step, again.highest_step) == (truth["resumed"], 37)
    assert truth["repeated"] == (again.highest_step or 0) - truth["resumed"] == 7
    assert summed(before)["steps"] >= truth["resumed"]
    _seconds(told, truth)
    assert {each.phase for each in said} >= {"startup", "restore", "checkpoint", "evaluation", ""}
    assert [each.quality.name for each in said if each.quality] == ["evaluation loss"] * 2
    losses = [each.loss for each in said if isinstance(each.loss, float)]
    assert losses
    assert 0 < losses[-1] < 10
    assert {each.recompute for each in said} == {"full"}
