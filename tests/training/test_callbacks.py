"""The hooks of the framework callbacks, called as the frameworks call them; test_integrations.py has the real ones."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from exporter.training import client
from exporter.training.message import Message
from tests.training.recorder import Recorder
from tests.waiting import wait_for

STEPS = 3
FLOPS = 6e12
"""Of each step, as the Trainer counts them."""
PLAIN: Mapping[str, Any] = {
    "world_size": 1, "n_gpu": 1, "process_index": 0, "gradient_checkpointing": False, "fsdp": [], "fsdp_config": {},
    "deepspeed": None,
}  # fmt: skip


@pytest.fixture(autouse=True)
def recorder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Recorder]:
    """A daemon's listener, where every reporter sends."""
    for name in ("RANK", "WORLD_SIZE", "GPU_EFFICIENCY_RUN", "ACCELERATE_USE_FSDP", "ACCELERATE_USE_DEEPSPEED"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(client, "_trainings", {})
    with Recorder(tmp_path / "report.sock") as one:
        monkeypatch.setenv("GPU_EFFICIENCY_SOCKET", one.path)
        yield one
        assert not one.refused


class Model:
    """What the callback reads of a model: its parameters, its configuration, and the name of its input."""

    def __init__(self, *, frozen: int = 0, settings: Mapping[str, Any] | None = None, reads: str = "input_ids") -> None:
        self.main_input_name, self.config = reads, SimpleNamespace(to_dict=lambda: settings or {"hidden_size": 64})
        self._sizes = {True: 1000, False: frozen}

    def parameters(self) -> list[Any]:
        return [
            SimpleNamespace(requires_grad=trained, numel=lambda size=size: size)
            for trained, size in self._sizes.items()
        ]


def train_hugging_face(callback: Any, *, model: Any = None, step: int = 0, **arguments: Any) -> None:
    """The calls of a Trainer that logs after every step; `step`: that of the checkpoint from which it resumes."""
    args, control = SimpleNamespace(**{**PLAIN, **arguments}), SimpleNamespace(should_save=False, should_evaluate=False)
    state = SimpleNamespace(num_input_tokens_seen=0, total_flos=0, global_step=step, epoch=0.0)
    given = {"model": model or Model(), "tokenizer": None}
    callback.on_init_end(args, state, control, **given)
    callback.on_train_begin(args, state, control, **given)
    for _ in range(STEPS):
        callback.on_step_begin(args, state, control, **given)
        state.global_step += 1
        callback.on_step_end(args, state, control, **given)
        state.total_flos += FLOPS
        callback.on_log(args, state, control, logs={"loss": 1.0}, **given)
    callback.on_train_end(args, state, control, **given)
    assert not callback._reporter.error


def hugging_face(recorder: Recorder, *, options: Mapping[str, Any] | None = None, **how: Any) -> list[Message]:
    train_hugging_face(client._HuggingFace({"every": 0.2, **(options or {})}), **how)
    return recorder.all()


def train_lightning(callback: Any, *, step: int = 0, rank: int = 0, world_size: int = 1) -> None:
    """The calls of a Trainer; `step`: that of an earlier fit() that it continues."""
    trainer = SimpleNamespace(
        global_rank=rank, world_size=world_size, global_step=step, current_epoch=0, save_checkpoint=lambda: None
    )
    callback.setup(trainer, None, "fit")
    callback.on_train_start(trainer, None)
    for number in range(STEPS):
        callback.on_train_batch_start(trainer, None, {}, number)
        trainer.global_step += 1
        callback.on_train_batch_end(trainer, None, {"loss": 1.0}, {}, number)
    callback.teardown(trainer, None, "fit")
    assert not callback._reporter.error


def lightning(**options: Any) -> Any:
    return client._Lightning(object, None, options)


def flops(said: list[Message]) -> float | None:
    found = [each.model_flops for each in said if each.model_flops is not None]
    return sum(found) if found else None


# -- Hugging Face --


def test_the_trainer_s_flops_are_those_after_its_first_log(recorder: Recorder) -> None:
    assert flops(hugging_face(recorder)) == pytest.approx((STEPS - 1) * FLOPS)


@pytest.mark.parametrize(
    "how",
    [
        {"fsdp": ["full_shard"]},
        {"deepspeed": "zero3.json"},
        {"model": Model(frozen=900)},
        {"model": Model(settings={"num_experts_per_tok": 2, "num_local_experts": 8})},
        {"model": Model(settings={"text_config": {"n_routed_experts": 64}})},
        {"model": Model(reads="pixel_values")},
    ],
)
def test_flops_that_are_not_the_model_s_are_not_reported(how: dict[str, Any], recorder: Recorder) -> None:
    """Sharded parameters are counted in part, frozen ones and idle experts as if they were trained."""
    assert flops(hugging_face(recorder, **how)) is None


@pytest.mark.parametrize("name", ["ACCELERATE_USE_FSDP", "ACCELERATE_USE_DEEPSPEED"])
def test_a_launcher_may_shard_the_model(name: str, recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "true")
    assert flops(hugging_face(recorder)) is None


@pytest.mark.parametrize(
    ("how", "name"),
    [({"model": Model(frozen=9)}, ""), ({"model": SimpleNamespace(parameters=list)}, ""), ({}, "ACCELERATE_USE_FSDP")],
)
def test_what_shards_and_freezes_nothing_is_counted(
    how: dict[str, Any], name: str, recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Position embeddings are often frozen; a model may have no configuration; a launcher may say no."""
    if name:
        monkeypatch.setenv(name, "false")
    assert flops(hugging_face(recorder, **how)) == pytest.approx((STEPS - 1) * FLOPS)


@pytest.mark.parametrize(
    ("how", "recompute"),
    [
        ({}, ""),
        ({"gradient_checkpointing": True}, "full"),
        ({"fsdp": ["full_shard"], "fsdp_config": {"activation_checkpointing": True}}, "full"),
        ({"fsdp_config": None}, ""),
        ({"gradient_checkpointing": True, "options": {"recompute": "selective"}}, "selective"),
    ],
)
def test_recomputation_is_what_the_trainer_s_arguments_say(
    how: dict[str, Any], recompute: str, recorder: Recorder
) -> None:
    assert {each.recompute for each in hugging_face(recorder, **how)} == {recompute}


# -- trainings one after the other --


def steps_of_runs(recorder: Recorder, trainings: int) -> dict[str, list[int]]:
    """The steps that were reported of each run; two reporters' messages may be read in any order."""
    found: dict[str, list[int]] = {}
    wait_for(lambda: sum(each.steps for each in recorder.messages) == trainings * STEPS, "all steps")
    for each in recorder.messages:
        found.setdefault(each.run, []).extend(range((each.step or 0) - each.steps + 1, (each.step or 0) + 1))
    return {run: sorted(steps) for run, steps in found.items() if steps}


@pytest.mark.parametrize(("run", "names"), [("bert", ["bert", "bert#2", "bert#3"]), ("", ["", "#2", "#3"])])
@pytest.mark.parametrize(
    ("make", "train"), [(client._HuggingFace, train_hugging_face), (lambda o: lightning(**o), train_lightning)]
)
def test_each_training_of_a_process_is_a_run(
    run: str, names: list[str], make: Any, train: Any, recorder: Recorder
) -> None:
    """Cross-validation: the first two with one callback, the third with another."""
    one = make({"run": run})
    for callback in (one, one, make({"run": run})):
        train(callback)
    assert steps_of_runs(recorder, 3) == {name: [1, 2, 3] for name in names}


@pytest.mark.parametrize(
    ("make", "train"), [(client._HuggingFace, train_hugging_face), (lambda o: lightning(**o), train_lightning)]
)
def test_a_training_that_resumes_is_the_latest(
    make: Any, train: Any, recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GPU_EFFICIENCY_RUN", "bert")
    for step in (5, 0, 3):
        train(make({}), step=step)
    assert steps_of_runs(recorder, 3) == {"bert": [6, 7, 8], "bert#2": [1, 2, 3, 4, 5, 6]}


def test_trainings_that_have_names_of_their_own_keep_them(recorder: Recorder) -> None:
    for name in ("sft", "dpo"):
        train_hugging_face(client._HuggingFace({"run": name}))
    assert steps_of_runs(recorder, 2) == {"sft": [1, 2, 3], "dpo": [1, 2, 3]}


# -- Lightning --


def test_the_rank_is_lightning_s(recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its launcher sets no RANK; what a batch script was given is not the process's."""
    monkeypatch.setenv("SLURM_PROCID", "0")
    train_lightning(lightning(), rank=3, world_size=8)
    assert {(each.rank, each.world_size) for each in recorder.all()} == {(3, 8)}


def test_a_rank_that_is_given_stands(recorder: Recorder) -> None:
    train_lightning(lightning(rank=1), rank=3, world_size=8)
    assert {(each.rank, each.world_size) for each in recorder.all()} == {(1, 8)}
