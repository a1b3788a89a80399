"""Tests the health that the dcgm-exporter source reports: new errors, and the meaning of each field."""

import pytest

from exporter.core.model import SECOND, Health
from exporter.sources.dcgm_exporter.source import DcgmExporterSource
from tests.sources.exporter_pages import BUSY, gpu, source

XID = "DCGM_FI_DEV_XID_ERRORS"


def health(figures: dict[str, str]) -> Health | None:
    """Return the health from a first page with these lines."""
    return next(iter(source(gpu(0, {**BUSY, **figures})).read(0).health), None)


@pytest.mark.parametrize(
    ("line", "value", "field", "expected"),
    [
        ("DCGM_FI_DEV_GET_GPU_RECOVERY_ACTION", "4", "recovery_action", 4),
        ("DCGM_FI_DEV_GPU_RECOVERY_ACTION", "0", "recovery_action", 0),
        ("DCGM_FI_DEV_ECC_SBE_VOL_TOTAL", "12", "ecc_corrected", 12),
        ("DCGM_FI_DEV_ECC_DBE_VOL_TOTAL", "0", "ecc_uncorrected", 0),
        ("dcgm_ecc_dbe_volatile_total", "2", "ecc_uncorrected", 2),
        ("DCGM_FI_DEV_ROW_REMAP_PENDING", "1", "row_remap_pending", True),
        ("DCGM_FI_DEV_ROW_REMAP_FAILURE", "0", "row_remap_failed", False),
        ("DCGM_FI_DEV_ROW_REMAP_FAILED", "1", "row_remap_failed", True),
        ("DCGM_FI_DEV_MEMORY_TEMP", "88", "memory_temperature_celsius", 88.0),
        ("DCGM_FI_DEV_MEMORY_TEMP_CELSIUS", "88", "memory_temperature_celsius", 88.0),
        ("DCGM_FI_DEV_GPU_TEMP_LIMIT", "31", "temperature_margin_celsius", 31.0),
        ("DCGM_FI_DEV_GPU_TEMP_TLIMIT", "-2", "temperature_margin_celsius", -2.0),
        ("DCGM_FI_DEV_GPU_TEMP_MARGIN_CELSIUS", "0", "temperature_margin_celsius", 0.0),
        ("DCGM_FI_DEV_PWR_SMOOTHING_ENABLED", "1", "power_smoothing", True),
        ("DCGM_FI_DEV_PWR_SMOOTHING_ENABLED", "0", "power_smoothing", False),
        ("DCGM_FI_DEV_NVLINK_REPLAY_ERROR_COUNT_TOTAL", "7", "nvlink_errors", 7),
        ("DCGM_FI_DEV_NVLINK_CRC_FLIT_ERROR_TOTAL", "8", "nvlink_errors", 8),
        ("DCGM_FI_DEV_NVLINK_ERROR_DL_RECOVERY", "9", "nvlink_errors", 9),
        ("DCGM_FI_DEV_NVLINK_CRC_ERROR_TOTAL", "3", "nvlink_errors", 3),
        ("dcgm_nvlink_data_crc_error_count_total", "1", "nvlink_errors", 1),
    ],
)
def test_each_name_of_each_generation_gives_its_field(line: str, value: str, field: str, expected: object) -> None:
    told = health({line: value})
    assert told is not None
    assert getattr(told, field) == expected
    assert type(getattr(told, field)) is type(expected)
    assert told == Health("GPU-0", **{field: expected})  # type: ignore[arg-type]  # each field has a type of its own


@pytest.mark.parametrize(
    "figures",
    [
        {},
        {"DCGM_FI_DEV_MEMORY_TEMP": "0"},  # what a board without that sensor says
        {"DCGM_FI_DEV_ECC_DBE_VOL_TOTAL": "9223372036854775792"},
        {"DCGM_FI_DEV_GPU_TEMP_LIMIT": "2147483632"},
        {"DCGM_FI_DEV_GET_GPU_RECOVERY_ACTION": "N/A"},
        {"DCGM_FI_DEV_SLOWDOWN_TEMP": "89"},
        {XID: "0"},
        {XID: "79"},
    ],
)
def test_nothing_is_told_of_a_board_whose_health_is_not_seen(figures: dict[str, str]) -> None:
    assert health(figures) is None


def test_errors_of_all_links_are_added_once() -> None:
    older = {f"DCGM_FI_DEV_NVLINK_{kind}_ERROR_COUNT_TOTAL": "10" for kind in ("CRC_FLIT", "CRC_DATA", "RECOVERY")}
    newer = {"DCGM_FI_DEV_NVLINK_ERROR_DL_CRC": "20", "DCGM_FI_DEV_NVLINK_ERROR_DL_REPLAY": "5"}
    for figures, expected in ((older, 30), (newer, 25), (older | newer, 30)):
        told = health(figures)
        assert told is not None
        assert told.nvlink_errors == expected


def test_the_margin_is_what_the_slowdown_leaves_unless_dcgm_gives_it() -> None:
    figures = {"DCGM_FI_DEV_SLOWDOWN_TEMP": "89", "DCGM_FI_DEV_GPU_TEMP": "92"}
    for more, expected in (({}, -3.0), ({"DCGM_FI_DEV_GPU_TEMP_LIMIT": "5"}, 5.0)):
        told = health({**figures, **more})
        assert told is not None
        assert told.temperature_margin_celsius == expected


def test_a_board_that_wants_recovery_cannot_work_until_it_no_longer_does() -> None:
    action = "DCGM_FI_DEV_GPU_RECOVERY_ACTION"
    src = source(*(gpu(0, {**BUSY, action: value}) for value in ("0", "1", "5", "0")))
    batches = [src.read(n * SECOND) for n in range(4)]
    assert [d.condition for batch in batches for d in batch.devices] == ["", "recovery", "", ""], "5: the IMEX domain"
    assert [len(batch.readings) for batch in batches] == [0, 1, 1, 1]
    assert [health.recovery_action for batch in batches for health in batch.health] == [0, 1, 5, 0]


def test_health_is_told_of_what_was_collected_anew_and_of_each_board() -> None:
    def page(errors: str) -> str:
        return gpu(0, {**BUSY, "DCGM_FI_DEV_ECC_SBE_VOL_TOTAL": errors}) + gpu(1)

    src = source(page("1"), page("1"), page("2"), page("2"))
    told = [src.read(n * SECOND).health for n in range(4)]
    first, second = (Health("GPU-0", ecc_corrected=n) for n in (1, 2))
    assert told == [(first,), (), (second,), ()]


# Critical errors.


def line(code: int | None) -> str:
    """Return a page with this last error; None: without the line."""
    return gpu(0, BUSY if code is None else {**BUSY, XID: str(code)}, err_code=str(code or 0), err_msg="words")


def news(*pages: str) -> list[tuple[int, ...]]:
    """Return the new errors of each page after the first; each page is from another collection."""
    src = source(*(page + gpu(0, {"DCGM_FI_DEV_MOVES": str(n)}) for n, page in enumerate(pages)))
    assert all(one.xids == () for one in src.read(0).health)
    return [_xids(src, n) for n in range(1, len(pages))]


def _xids(src: DcgmExporterSource, n: int) -> tuple[int, ...]:
    return tuple(xid for one in src.read(n * SECOND).health for xid in one.xids)


@pytest.mark.parametrize(
    ("codes", "expected"),
    [
        ([0, 0, 0], [(), ()]),
        ([79, 79], [()]),
        ([0, 79, 79], [(79,), ()]),
        ([79, 31], [(31,)]),
        ([31, 79, 31], [(79,), (31,)]),
        ([79, 0], [()]),
        ([79, 0, 79], [(), (79,)]),
        ([None, 79, 79], [(79,), ()]),
        ([None, 0], [()]),
        ([79, None, 79], [(), (79,)]),
    ],
)
def test_an_error_is_a_change_of_the_last_one(codes: list[int | None], expected: list[tuple[int, ...]]) -> None:
    assert news(*map(line, codes)) == expected


@pytest.mark.parametrize("name", [XID, "DCGM_FI_DEV_XID_ERROR", "dcgm_xid_errors"])
def test_an_error_has_a_name_in_each_generation(name: str) -> None:
    assert news(gpu(0), gpu(0, {**BUSY, name: "48"})) == [(48,)]


def test_a_blank_error_is_none() -> None:
    assert news(gpu(0), gpu(0, {**BUSY, XID: "9223372036854775792"}), gpu(0, {**BUSY, XID: "N/A"})) == [(), ()]


def test_an_error_is_told_for_its_own_board_once_for_all_pods() -> None:
    pods = "".join(gpu(1, {**BUSY, XID: "79"}, pod=pod) for pod in ("a", "b"))
    src = source(line(0) + gpu(1), line(0) + pods)
    src.read(0)
    assert [(one.uuid, one.xids) for one in src.read(SECOND).health] == [("GPU-1", (79,))]


def test_an_error_during_a_pause_is_told_after_it_and_not_again() -> None:
    src = source(line(0), line(79), line(79))
    src.read(0)
    src.pause()
    assert _xids(src, 60) == (79,)
    src.resync()
    assert _xids(src, 61) == ()


def instances(code: int, *, first: int = 1) -> str:
    """Return a board in MIG mode, all of whose instances repeat the board's last error."""
    return "".join(
        gpu(0, {**BUSY, XID: str(code)}, GPU_I_ID=str(n), GPU_I_PROFILE="1g.10gb") for n in (first, first + 1)
    )


def test_an_error_that_all_instances_repeat_is_one_of_their_board() -> None:
    src = source(instances(0), instances(79))
    src.read(0)
    assert [(one.uuid, one.xids) for one in src.read(SECOND).health] == [("GPU-0", (79,))]


def test_new_instances_repeat_an_old_error_and_may_tell_a_new_one() -> None:
    assert news(line(79), instances(79), instances(79, first=5), line(79)) == [(), (), ()]
    assert news(line(79), instances(48)) == [(48,)]


# Errors counted by code.


def counted(kind: str, gauge: int, counts: dict[int | str, int]) -> str:
    name = f"DCGM_EXP_XID_ERRORS_{kind}"
    return line(gauge) + "".join(gpu(0, {name: str(count)}, xid=str(code)) for code, count in counts.items())


TOTAL, WINDOW = "TOTAL", "COUNT"


@pytest.mark.parametrize(
    ("kind", "counts", "expected"),
    [
        (TOTAL, [{79: 1}, {79: 1}, {79: 3, 31: 1}], [(), (31, 79, 79)]),
        (TOTAL, [{79: 5}, {79: 1}], [(79,)]),  # the exporter was restarted
        (TOTAL, [{}, {79: 2}], [(79, 79)]),
        (TOTAL, [{}, {"": 0, "0": 4, "x": 3, "9" * 5000: 1}], [()]),
        (TOTAL, [{79: 1}, {79: 1_000_000}], [(79,) * 16]),
        (WINDOW, [{"": 0}, {79: 2}, {79: 2}], [(79, 79), ()]),
        (WINDOW, [{79: 2}, {79: 1}, {79: 2}], [(), (79,)]),  # one left the window, one came
        (WINDOW, [{79: 2}, {"": 0}, {79: 1}], [(), (79,)]),
    ],
)
def test_counts_tell_what_the_gauge_cannot(
    kind: str, counts: list[dict[int | str, int]], expected: list[tuple[int, ...]]
) -> None:
    assert news(*(counted(kind, 79, one) for one in counts)) == expected


def test_what_counts_and_gauge_both_tell_is_one_error() -> None:
    assert news(counted(TOTAL, 0, {}), counted(TOTAL, 79, {79: 1}), counted(TOTAL, 79, {79: 2})) == [(79,), (79,)]
    late = (counted(TOTAL, 0, {}), counted(TOTAL, 79, {}), counted(TOTAL, 79, {79: 1}), counted(TOTAL, 79, {79: 2}))
    assert news(*late) == [(79,), (), (79,)]
    assert news(counted(WINDOW, 0, {"": 0}), counted(WINDOW, 31, {"": 0}), counted(WINDOW, 31, {31: 1})) == [(), (31,)]


def test_the_total_is_believed_before_the_window() -> None:
    def both(total: int, window: int) -> str:
        return counted(TOTAL, 0, {79: total}) + counted(WINDOW, 0, {79: window})

    assert news(both(1, 1), both(2, 5)) == [(79,)]


def test_counts_repeated_for_each_instance_are_one_count() -> None:
    def page(count: int) -> str:
        lines = (
            gpu(0, {**BUSY, "DCGM_EXP_XID_ERRORS_COUNT": str(count)}, GPU_I_ID=n, GPU_I_PROFILE="1g.10gb", xid="79")
            for n in "123"
        )
        return "".join(lines)

    assert news(page(0), page(1)) == [(79,)]
