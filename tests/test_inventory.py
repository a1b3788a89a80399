"""Tests which devices are accounted for: listed, missing, remembered and expected ones; and the inventory file."""

import json
import logging
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
from msgspec.structs import replace

from exporter.agent.inventory import Inventory, InventoryFile, missing_faults
from exporter.core.model import PPM, SECOND, Device, Spec, State
from tests.rigs import TWO, Rig
from tests.worlds import device

A, B, C, D, E = (device(f"GPU-{name}", str(n)) for n, name in enumerate("ABCDE"))
UNKNOWN = Device("unknown-3", "3", condition="lost")


def conditions(devices: Iterable[Device]) -> dict[str, str]:
    return {d.uuid.removeprefix("GPU-"): d.condition for d in devices}


def missing(devices: Iterable[Device]) -> set[str]:
    return {d.uuid.removeprefix("GPU-") for d in devices if d.condition == "missing"}


def cut(board: Device, *ids: int) -> tuple[Device, ...]:
    """Return a board in MIG mode with these instances."""
    rest = PPM - len(ids) * 142_857
    return (
        replace(board, weight=rest),
        *(Device(f"{board.uuid}/{i}", f"{board.index}:{i}", weight=142_857, parent=board.uuid) for i in ids),
    )


# -- within one run --


def test_what_is_listed_is_accounted_for_as_it_is() -> None:
    lost = replace(B, condition="lost")
    assert Inventory().update((A, lost)) == (A, lost)


def test_a_board_that_is_no_longer_listed_is_missing_until_it_returns() -> None:
    inventory = Inventory()
    inventory.update((A, replace(B, condition="lost")))
    for _ in range(3):
        assert conditions(inventory.update((A,))) == {"A": "", "B": "missing"}
    assert inventory.update((A, B)) == (A, B)


def test_when_none_is_listed_all_are_missing() -> None:
    inventory = Inventory()
    inventory.update((A, B))
    assert conditions(inventory.update(())) == {"A": "missing", "B": "missing"}


def test_a_board_in_another_s_place_replaces_it() -> None:
    inventory = Inventory()
    inventory.update((A, B))
    assert missing(inventory.update((A,))) == {"B"}
    assert inventory.update((A, C)) == (A, C)
    assert missing(inventory.update((A,))) == {"C"}


def test_a_gpu_that_does_not_tell_its_name_stands_for_one_that_is_gone() -> None:
    inventory = Inventory()
    inventory.update((A, B, C, D))
    assert conditions(inventory.update((A, B, C, UNKNOWN))) == {"A": "", "B": "", "C": "", "unknown-3": "lost"}
    assert conditions(inventory.update((A, B, C))) == {"A": "", "B": "", "C": "", "D": "missing"}
    assert inventory.update((A, B, C, D)) == (A, B, C, D)


def test_gpus_without_a_name_end_nobodys_absence() -> None:
    """A host engine that went blind lists all GPUs and names none: the file of the known ones must not be emptied."""
    inventory = Inventory((A, B))
    inventory.update((UNKNOWN, replace(UNKNOWN, uuid="unknown-4", condition="")))
    inventory.update((replace(UNKNOWN, condition=""), replace(UNKNOWN, uuid="unknown-4", condition="")))
    assert {board.uuid for board in inventory.boards()} == {A.uuid, B.uuid}


def test_a_nameless_gpu_ends_when_its_name_is_told() -> None:
    inventory = Inventory()
    inventory.update((A, UNKNOWN))
    assert inventory.update((A, D)) == (A, D)


def test_instances_come_and_go_with_the_cut_of_their_board() -> None:
    inventory = Inventory()
    inventory.update((*cut(A, 1, 2), B))
    again = (*cut(A, 3), B)
    assert inventory.update(again) == again
    assert inventory.update((A, B)) == (A, B)


def test_instances_are_missing_with_their_board_and_gone_when_it_returns_uncut() -> None:
    inventory = Inventory()
    inventory.update((*cut(A, 1, 2), B))
    gone = inventory.update((B,))
    assert conditions(gone) == {"A": "missing", "A/1": "missing", "A/2": "missing", "B": ""}
    assert sum(d.weight for d in gone) == 2 * PPM
    assert inventory.update((A, B)) == (A, B)
    assert inventory.update((*cut(A, 1), B)) == (*cut(A, 1), B)


def test_instances_that_were_cut_anew_are_not_missing_later() -> None:
    inventory = Inventory()
    inventory.update((*cut(A, 1, 2), B, C))
    inventory.update((*cut(A, 3), B))
    assert conditions(inventory.update((B,))) == {"A": "missing", "A/3": "missing", "B": "", "C": "missing"}
    inventory.update((A, B))
    assert conditions(inventory.update((B,))) == {"A": "missing", "B": "", "C": "missing"}


# -- expected --


def test_gpus_that_are_expected_and_were_never_seen_have_stand_ins() -> None:
    inventory = Inventory(expected=4)
    assert conditions(inventory.update((A, B))) == {"A": "", "B": "", "missing-1": "missing", "missing-2": "missing"}
    assert conditions(inventory.update((A, B, C))) == {"A": "", "B": "", "C": "", "missing-1": "missing"}
    assert inventory.update((A, B, C, D)) == (A, B, C, D)
    assert conditions(inventory.update((A, B, D))) == {"A": "", "B": "", "C": "missing", "D": ""}


def test_a_stand_in_has_no_index_and_is_a_whole_gpu() -> None:
    (_, stand_in) = Inventory(expected=2).update((A,))
    assert stand_in == Device("missing-1", "", condition="missing", weight=PPM)


def test_more_than_expected_is_nothing_special() -> None:
    inventory = Inventory(expected=1)
    assert inventory.update((A, B)) == (A, B)
    assert missing(inventory.update((A,))) == {"B"}


def test_instances_are_no_boards() -> None:
    assert len(Inventory(expected=2).update(cut(A, 1, 2, 3))) == 4 + 1


# -- remembered --


def remembered(*devices: Device) -> tuple[Device, ...]:
    return tuple(replace(d, condition="missing") for d in devices)


def test_a_board_of_an_earlier_run_is_missing() -> None:
    inventory = Inventory(remembered(A, B, C))
    assert conditions(inventory.update((A, B))) == {"A": "", "B": "", "C": "missing"}
    assert inventory.update((A, B, C)) == (A, B, C)


def test_where_as_many_boards_work_as_are_remembered_the_absent_one_was_replaced() -> None:
    inventory = Inventory(remembered(A, B, C))
    assert inventory.update((A, B, D)) == (A, B, D)
    assert {d.uuid for d in inventory.boards()} == {A.uuid, B.uuid, D.uuid}
    assert missing(inventory.update((A, B))) == {"D"}


def test_one_of_two_absent_boards_was_replaced_and_no_more_are_missing_than_are_gone() -> None:
    inventory = Inventory(remembered(A, B, C, D))
    assert len(inventory.update((A, B, E))) == 4
    assert missing(inventory.update((A, B, E))) <= {"C", "D"}


def test_a_lost_board_does_not_forget_the_absent_ones() -> None:
    inventory = Inventory(remembered(A, B, C))
    lost = replace(E, condition="lost")
    assert conditions(inventory.update((A, B, lost))) == {"A": "", "B": "", "E": "lost"}
    assert C.uuid in {d.uuid for d in inventory.boards()}
    assert conditions(inventory.update((A, B))) == {"A": "", "B": "", "E": "missing"}


def test_remembered_and_expected_together_are_never_more_than_expected() -> None:
    inventory = Inventory(remembered(A, B, C), expected=5)
    assert conditions(inventory.update((A,))) == {
        "A": "", "B": "missing", "C": "missing", "missing-1": "missing", "missing-2": "missing",
    }  # fmt: skip


# -- told --


def test_each_board_that_is_not_listed_is_a_fault_with_what_to_do() -> None:
    inventory = Inventory(expected=4)
    inventory.update((*cut(A, 1), B))
    faults = missing_faults(inventory.update((B,)), (B,))
    assert [(f.kind, f.uuid) for f in faults] == [
        ("gpu_missing", "GPU-A"), ("gpu_missing", "missing-1"), ("gpu_missing", "missing-2"),
    ]  # fmt: skip
    assert faults[0].message.startswith(
        "GPU 0 (GPU-A, NVIDIA H100 80GB HBM3) was listed before and is missing: look at"
    )
    assert "inventory.expected_gpus" in faults[1].message
    assert missing_faults((A, B), (A, B)) == ()


def test_what_is_missing_is_paid_for_and_unavailable_and_told_once(
    rigs: Callable[..., Rig], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    third = device("GPU-2", "2")
    rig = rigs(interval=1.0, inventory=Inventory(remembered(*TWO, third), expected=4))
    rig.tick(11)
    for uuid in ("GPU-2", "missing-1"):
        gpu = rig.ledger.gpus[uuid]
        assert (gpu.state, gpu.reason) == (State.UNAVAILABLE, "missing")
        assert rig.seconds("unavailable", uuid) == rig.paid(uuid) == rig.paid("GPU-0") == 10.0
    rig.source.devices = (*TWO, third)
    rig.tick(5)
    assert rig.ledger.gpus["GPU-2"].state is State.UNALLOCATED
    lines = [r.message for r in caplog.records if "missing" in r.message]
    assert [line.split(":")[0] for line in lines] == [
        "gpu_missing", "gpu_missing", "gpu_missing of GPU-2 is over after 11 s",
    ]  # fmt: skip


def test_the_boards_that_were_seen_are_remembered_by_the_next_run(rigs: Callable[..., Rig], tmp_path: Path) -> None:
    path = tmp_path / "inventory.json"
    rigs(remembered=InventoryFile(path)).tick(2)
    file = InventoryFile(path)
    after = rigs(inventory=Inventory(file.load()), remembered=file)
    after.source.devices = TWO[:1]
    after.tick(3)
    assert after.ledger.gpus["GPU-1"].reason == "missing"
    assert after.paid("GPU-1") == 10 * SECOND / SECOND


# -- the file --


def test_the_file_holds_name_index_model_and_spec_of_each_board(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "inventory.json"
    inventory, file = Inventory(), InventoryFile(path)
    assert file.load() == ()
    inventory.update((*cut(A, 1), UNKNOWN, Device("GPU-new", "4")))
    file.save(inventory.boards())
    assert json.loads(path.read_bytes()) == [
        {"uuid": "GPU-A", "index": "0", "model": "NVIDIA H100 80GB HBM3", "spec": "H100"},
        {"uuid": "GPU-new", "index": "4", "model": "", "spec": ""},
    ]
    assert oct(path.stat().st_mode & 0o777) == "0o644"
    assert list(path.parent.iterdir()) == [path]
    assert InventoryFile(path).load() == (
        Device("GPU-A", "0", "NVIDIA H100 80GB HBM3", Spec("H100"), condition="missing"),
        Device("GPU-new", "4", condition="missing"),
    )


def test_the_file_is_written_only_when_other_boards_are_there(tmp_path: Path) -> None:
    path = tmp_path / "inventory.json"
    file = InventoryFile(path)
    file.save((A, B))
    path.unlink()
    file.save((replace(B, index="0"), A))
    assert not path.exists()
    file.save((A, B, C))
    assert {board["uuid"] for board in json.loads(path.read_bytes())} == {"GPU-A", "GPU-B", "GPU-C"}
    again = InventoryFile(path)
    again.load()
    path.unlink()
    again.save((A, B, C))
    assert not path.exists()


@pytest.mark.parametrize(
    "content", [b"", b"listen_address = 3", b'[{"index": "0"}]', b'{"uuid": "GPU-A"}', b"\xff\xfe"]
)
def test_a_file_that_is_none_of_ours_is_told_once_and_left_alone(
    content: bytes, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "daemon.toml"
    path.write_bytes(content)
    file = InventoryFile(path)
    assert file.load() == ()
    file.save((A,))
    file.save((A, B))
    assert path.read_bytes() == content
    assert len(caplog.records) == 1
    assert f"not remembered across restarts: {path} cannot be read: " in caplog.text
    assert "delete it or name another in inventory.file" in caplog.text


def test_a_place_that_cannot_be_written_is_told_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    path = tmp_path / "file" / "inventory.json"  # root may write anywhere, but not below a file
    file = InventoryFile(path)
    file.save((A,))
    file.save((A, B))
    assert len(caplog.records) == 1
    assert f"{path} cannot be written: " in caplog.text


def test_a_file_half_written_never_takes_the_place_of_a_whole_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "inventory.json"
    file = InventoryFile(path)
    file.save((A,))
    before = path.read_bytes()

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("exporter.files.os.fsync", full)
        file.save((A, B))
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]
