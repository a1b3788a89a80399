"""The benchmark of the dashboards: its fleet, the past it makes up, the blocks it writes, and what it says of them."""

import random
import subprocess
from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest

from benchmarks.dashboards.blocks import Refs, Samples, block, joined, stored
from benchmarks.dashboards.chunks import checksum, signed, unsigned
from benchmarks.dashboards.fleet import BIGGEST, KINDS, QUICK, Node, Size, Template, copied, nodes
from benchmarks.dashboards.measured import dashboards, markdown, rows
from benchmarks.dashboards.panels import Timed
from benchmarks.dashboards.past import WINDOW, Recorded, curve, history, lives, points, recent, spans, write
from tests.dashboards.past import named

# -- bits and files --


def test_the_checksum_is_castagnoli_s() -> None:
    assert checksum(b"123456789").hex() == "e3069283"


def test_numbers_take_seven_bits_a_byte_and_signs_take_one() -> None:
    assert (unsigned(127), unsigned(300)) == (b"\x7f", b"\xac\x02")
    assert (signed(-1), signed(1), signed(-65)) == (b"\x01", b"\x02", b"\x81\x01")


SYMBOLS = sorted(["__name__", "a:b", "a:c", "cluster", "x", "y"])


UNTIL = 1000 * WINDOW * 240_000


def refs(name: str, cluster: str) -> Refs:
    return tuple(SYMBOLS.index(word) for word in ("__name__", name, "cluster", cluster))


def samples(values: list[float], begin: int) -> Samples:
    """Two chunks, the second not on time; of few values one."""
    points = [(begin + 60_000 * place + place % 3 * (place > 100), value) for place, value in enumerate(values)]
    halves = filter(None, (points[:90], points[90:]))
    return joined([(half[0][0], half[-1][0], len(half), stored(half)) for half in halves])


def dumped(folder: Path, cluster: str, since: int = 0) -> list[tuple[str, int, float]]:
    """What Prometheus reads of one cluster: series, milliseconds, value."""
    words = ["promtool", "tsdb", "dump", "--match", f'{{__name__=~".+",cluster="{cluster}"}}', f"--min-time={since}"]
    words.append(f"--max-time={UNTIL}")
    told = subprocess.run([*words, f"{folder}"], check=True, capture_output=True, text=True).stdout.splitlines()
    return [(line.rsplit(" ", 2)[0], int(line.split()[-1]), float(line.split()[-2])) for line in told]


@pytest.mark.benchmark
def test_prometheus_reads_from_a_block_what_was_written_into_it(tmp_path: Path) -> None:
    source, begin = random.Random(7), UNTIL - 4 * 1000 * WINDOW  # noqa: S311 - made-up figures
    wild = [source.choice((0.0, -1.5, 1e300, 5e-324, source.random(), source.random())) for _ in range(200)]
    thirds = [place / 3 for place in range(120)]
    written = {("a:b", "x"): [8.0] * 80, ("a:b", "y"): wild, ("a:c", "x"): thirds, ("a:c", "y"): thirds}
    series = [(refs(*key), samples(values, begin)) for key, values in written.items()]
    sizes = block(tmp_path, SYMBOLS, series, begin=begin, end=UNTIL)
    assert (sizes["numSeries"], sizes["numChunks"], sizes["numSamples"]) == (4, 7, 520)
    (tmp_path / "wal").mkdir()
    found = dumped(tmp_path, "y")
    assert [value for *_, value in found] == wild + thirds
    assert Counter(name for name, *_ in found) == {
        '{__name__="a:b", cluster="y"}': 200, '{__name__="a:c", cluster="y"}': 120,
    }  # fmt: skip
    assert [at - begin for _, at, _ in found][99:104] == [5_940_000, 6_000_000, 6_060_002, 6_120_000, 6_180_001]
    late = begin + 90 * 60_000
    assert dumped(tmp_path, "x", late) == [each for each in dumped(tmp_path, "x") if each[1] >= late]
    assert len(dumped(tmp_path, "x", late)) == 30


# -- the fleet --


def test_it_is_of_10_000_gpus_and_2500_jobs_one_of_them_on_512() -> None:
    fleet = list(nodes(Size()))
    on = Counter(node.job for node in fleet)
    assert len(fleet) == 1250
    assert on[int(BIGGEST)] == 64
    assert [node.place for node in fleet if node.job == int(BIGGEST)] == list(range(64))


def test_a_small_one_has_every_kind() -> None:
    fleet = list(nodes(QUICK))
    assert {node.kind for node in fleet} == set(range(len(KINDS)))
    assert len(fleet) < 60


STORY: Template = [
    ({"__name__": "state", "uuid": "GPU-1", "gpu": "0"}, [(0.0, 1.0)]),
    ({"__name__": "step", "job_id": "41", "rank": "0,1"}, [(0.0, 1.0)]),
    ({"__name__": "info", "job_id": "41", "user": "ada", "account": "research", "team": ""}, [(0.0, 1.0)]),
    ({"__name__": "info", "job_id": "42", "user": "ada", "account": "guests", "team": ""}, [(0.0, 1.0)]),
    ({"__name__": "node_info", "node": "node", "pool": ""}, [(0.0, 1.0)]),
]


def test_a_copy_is_another_node_and_its_ranks_go_on() -> None:
    found = {(one["__name__"], one.get("job_id", "")): one for one in map(dict, copied(STORY, Node(12, 0, 500_000, 2)))}
    assert found["state", ""]["uuid"] == "GPU-00012-1"
    assert found["step", "500000"]["rank"] == "16,17"
    assert found["node_info", ""]["node"] == "gpu-node-00012"
    assert {one["instance"] for one in found.values()} == {"gpu-node-00012:19400"}
    assert "pool" not in found["node_info", ""]


def test_owners_stay_apart() -> None:
    found = [dict(labels) for labels in copied(STORY, Node(12, 0, 500_000, 0)) if ("__name__", "info") in labels]
    assert len({one["team"] for one in found}) == len({one["job_id"] for one in found}) == 2
    assert all(one["team"].removeprefix("team-") == one["account"].removeprefix("account-") for one in found)


# -- the past --


def test_whole_numbers_stay_and_the_rest_varies_below_its_value() -> None:
    assert curve("job:gpus", 8.0) == (8.0, False)
    assert curve("job:gpu_efficiency_price:per_hour", 2.49) == (2.49, False)
    level, varies = curve("job:gau:ratio", 0.7)
    assert varies
    assert 0.7 / 1.05 < level <= 0.7
    found = [value for _, value in points((level, varies), 60, 0, 86_400)]
    assert 0.9 * level < min(found) < max(found) <= level
    assert len(set(found)) > 500


def test_samples_come_at_the_pace_of_the_group() -> None:
    assert [at for at, _ in points((1.0, False), 240, 100, 1000)] == [240, 480, 720, 960]
    assert [at for at, _ in points((1.0, False), 240, 240, 480)] == [240]


def test_jobs_follow_one_another_without_a_gap() -> None:
    found = lives("500016", 96)
    assert found[0][0] == "500016"
    assert found[0][2] == 96
    assert found[-1][1] == 0
    assert all(later[1] == earlier[2] for later, earlier in pairwise(found))
    assert len({name for name, *_ in found}) == len(found)
    assert lives("", 96) == [("", 0, 96)]


def test_a_week_has_about_ten_thousand_jobs() -> None:
    assert 9_000 < sum(len(lives(f"{number}", 84)) for number in range(2200)) + 300 < 15_000


def test_blocks_are_as_prometheus_makes_them() -> None:
    assert list(spans(18, 31 * WINDOW + 60)) == [(18, 27), (27, 30), (30, 31), (31, 32)]
    assert list(spans(0, 8 * WINDOW + 60)) == [(0, 3), (3, 6), (6, 7), (7, 8), (8, 9)]


def test_history_is_in_order_and_a_server_lives_on() -> None:
    job = Recorded(named("job:gpus", cluster="c", job_id="9"), 8.0, 60)
    server = Recorded(named("job_state:gpu_efficiency_requests", cluster="c", job_id="7"), 8.0, 60)
    symbols, rows_ = history([job, server], 500)
    assert symbols == sorted(symbols)
    assert [row.refs for row in rows_] == sorted(row.refs for row in rows_)
    assert Counter(symbols[row.refs[1]] for row in rows_)["job_state:gpu_efficiency_requests"] == 1
    assert len(rows_) > 10


def test_what_was_before_ends_where_the_head_begins(tmp_path: Path) -> None:
    found = [Recorded(named("cluster:gpus", cluster="c"), 8.0, 60)]
    sizes = write(tmp_path, found, begin=9 * WINDOW, end=int(10.5 * WINDOW))
    assert (sizes["numSamples"], sizes["numChunks"], sizes["blocks"]) == (180, 2, 2)
    assert sizes["bytes"] > 0
    (after,) = recent(found, int(10.5 * WINDOW), 11 * WINDOW).values()
    assert after[0][0] == int(10.5 * WINDOW) + 60
    assert after[-1][0] == 11 * WINDOW


# -- rows --


def timed(title: str, *again: float, board: str = "fleet", errors: tuple[str, ...] = ()) -> Timed:
    return Timed(board=board, hours=24, title=title, first=2000, again=again, cpu=4, samples=5, series=2, errors=errors)


def test_a_board_has_its_slowest_panel_and_its_sum_and_others_that_are_slow() -> None:
    found = rows([timed("a", 1, 2, 3), timed("b", 1500, 1400, 1600), timed("c", 1100, 1100, 1100)])
    assert [(line.what, line.median, line.met) for line in found] == [
        ("Board fleet, 24 hours: slowest of 3 panels (b)", "1,500 ms", False), ("- c", "1,100 ms", False),
        ("- all panels, one after the other", "2,601 ms", None),
        ("- the slowest the first time, from the disk", "2,000 ms", None),
    ]  # fmt: skip


def test_figures_of_panels_without_an_answer_are_refused() -> None:
    with pytest.raises(RuntimeError, match="1 panels were not answered: fleet, b: parse error"):
        rows([timed("a", 1), timed("b", 1, errors=("parse error",))])


def test_the_tables_count_and_mark_what_is_slow() -> None:
    _, _, board, *_, slow, fast = markdown([timed("a", 5), timed("b", 1500)]).splitlines()
    assert board == "| fleet | 24 hours | 2 | b | 1,500 | 2,000 | 1,505 | 1 |"
    assert slow == "| fleet | 24 hours | b | **1,500** | 4 | 2,000 | 5 | 2 |"
    assert fast == "| fleet | 24 hours | a | 5 | 4 | 2,000 | 5 | 2 |"


@pytest.mark.benchmark
def test_the_short_form_opens_every_board() -> None:
    found = {line.what: line.median for line in dashboards(quick=True)}
    assert any(what.startswith("Board fleet, 7 days: slowest of") for what in found)
    assert int(found["Series recorded, at the end"].split()[0].replace(",", "")) > 5000
