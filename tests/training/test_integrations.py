"""The framework callbacks in the real libraries: their reports agree with what the library did."""

import json
from pathlib import Path
from typing import Any

import pytest

from exporter.training.message import Message
from tests.training.frameworks.running import missing, run, within
from tests.training.recorder import Recorder, summed

pytestmark = pytest.mark.e2e


def _run(script: str, folder: Path, *arguments: object) -> tuple[dict[str, Any], list[Message]]:
    """Return the script's own counts and its messages."""
    with Recorder(folder / f"{len(list(folder.iterdir()))}.sock") as recorder:
        run(script, folder, *arguments, socket=recorder.path)
        said = recorder.all()
        assert not recorder.refused
    return json.loads((folder / "truth.json").read_text()), said


def _between_two_stopwatches(told: dict[str, Any], truth: dict[str, Any]) -> None:
    """One within each phase, one around it, so that it does not matter where a busy machine suspends the process."""
    for name in ("evaluation", "checkpoint"):
        assert within(told["phases"][name], truth[name], truth[f"{name} at most"]), name


@pytest.fixture
def _transformers() -> None:
    if reason := missing("torch", "transformers", "accelerate"):
        pytest.skip(reason)


@pytest.mark.usefixtures("_transformers")
def test_a_trainer_of_hugging_face(tmp_path: Path) -> None:
    truth, said = _run("hugging_face.py", tmp_path, 12)
    told = summed(said)
    assert (told["step"], told["steps"], truth["step"]) == (12, 12, 12)
    assert told["tokens"] == truth["tokens"] == 12 * 2 * 4 * 32
    assert told["flops"] == pytest.approx(truth["flops"] * 10 / 12, rel=1e-6), (
        "the first two ended before the first log"
    )
    assert (told["checkpoints"], told["restarts"]) == (truth["checkpoints"], 0)
    _between_two_stopwatches(told, truth)
    assert told["phases"]["data"] >= 12 * 4 * 0.005, "older Trainers say nothing before the second batch of a step"
    assert truth["trained"] <= told["seconds"] - told["phases"]["startup"]
    assert within(told["seconds"] - told["phases"]["startup"], truth["trained"], truth["wall"])
    assert {each.gpus for each in said} == {each.world_size for each in said} == {1}
    assert {each.phase for each in said} == {"startup", "evaluation", "checkpoint", ""}
    assert [each.loss for each in said if each.loss is not None][-1] == pytest.approx(truth["losses"][-1])
    assert max(each.epoch or 0 for each in said) == pytest.approx(truth["epoch"])


@pytest.mark.usefixtures("_transformers")
def test_a_trainer_of_hugging_face_that_goes_on_from_a_checkpoint(tmp_path: Path) -> None:
    _run("hugging_face.py", tmp_path, 7)
    truth, said = _run("hugging_face.py", tmp_path, 15, "resume")
    before = next(each for each in said if each.restart)
    told = summed(said)
    assert told["restarts"] == 1
    assert (told["step"], told["steps"]) == (15, 15 - (before.step or 0))
    assert before.step in (5, 7), "newer Trainers save the last step too"
    assert told["tokens"] == truth["tokens"] - (before.step or 0) * 2 * 4 * 32


@pytest.mark.parametrize("name", ["lightning", "pytorch_lightning"])
def test_a_trainer_of_lightning(name: str, tmp_path: Path) -> None:
    if reason := missing("torch", name):
        pytest.skip(reason)
    truth, said = _run("lightning_loop.py", tmp_path, 15, name)
    told = summed(said)
    assert (told["step"], told["steps"], truth["step"]) == (15, 15, 15)
    assert told["tokens"] == 15 * 2 * 4 * 16
    assert (told["checkpoints"], truth["checkpoints"], told["restarts"]) == (3, 3, 0)
    _between_two_stopwatches(told, truth)
    assert told["phases"]["data"] >= 30 * 4 * 0.005
    assert told["phases"]["compute"] >= 30 * 0.01
    assert {each.phase for each in said} == {"startup", "evaluation", "checkpoint", ""}
    assert [each.loss for each in said if each.loss is not None]
    assert not truth["patched"], "the Trainer is given back as it was"
    checkpoint = next((tmp_path / "out").glob("*step=10.ckpt"))
    _, again = _run("lightning_loop.py", tmp_path, 20, name, checkpoint)
    assert [(each.restart, each.step) for each in again if each.restart] == [(True, 10)]
    assert (summed(again)["step"], summed(again)["steps"]) == (20, 10)
