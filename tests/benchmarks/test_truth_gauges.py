"""What a gauge misses is worked out by hand here; and the whole comparison once, small, on a real Prometheus."""

import pytest

from benchmarks.truth.gauges import EVERY, GAUGES, HOUR, counted, ran, rows, table, unseen
from benchmarks.truth.waves import WAVES, Wave

BEAT = Wave(name="beat", about="3 of every 10 s", period=10_000, busy=3_000)
SAVING = Wave(name="saving", about="", period=10_000, busy=5_000, pause_every=60_000, pause=20_000)


@pytest.mark.parametrize(
    ("start", "end", "share"),
    [(0, 10_000, 0.3), (0, 3_000, 1.0), (3_000, 10_000, 0.0), (2_000, 4_000, 0.5), (9_000, 12_000, 2 / 3)],
)
def test_a_wave_is_busy_at_the_beginning_of_its_period(start: int, end: int, share: float) -> None:
    assert BEAT.share(start, end) == pytest.approx(share)


def test_a_pause_stops_the_work_whatever_its_beat() -> None:
    """Forty seconds of work in each minute, half of them busy."""
    assert SAVING.share(0, 60_000) == pytest.approx(20 / 60)
    assert SAVING.share(40_000, 60_000) == 0.0
    assert SAVING.share(60_000, 65_000) == 1.0


@pytest.mark.parametrize("wave", WAVES, ids=lambda wave: wave.name)
def test_an_integral_is_the_sum_of_its_milliseconds(wave: Wave) -> None:
    def busy(at: int) -> bool:
        if wave.pause_every and at % wave.pause_every >= wave.pause_every - wave.pause:
            return False
        return (at % (wave.pause_every or wave.period)) % wave.period < wave.busy

    for start in (0, 557, 599_000):
        assert wave.before(start + 3_001) - wave.before(start) == sum(busy(start + n) for n in range(3_001))


def test_the_core_counts_what_was_done() -> None:
    """Two GPUs, twenty seconds, out of step: looked at each fifteenth second."""
    said = counted(BEAT, (0, 5_000), 30)
    assert [len(line) for line in said] == [2, 2, 2]
    assert said[1] == pytest.approx([6.0, 3.0])
    assert said[2] == pytest.approx([9.0, 9.0])


@pytest.mark.slow
def test_the_second_before_a_scrape_is_all_that_a_gauge_sees() -> None:
    run = ran(BEAT, 1)
    phase = run.phases[0]
    assert run.gauge(phase, 7) == BEAT.share(phase + 6_000, phase + 7_000)
    assert run.truth(phase) == pytest.approx(0.3, abs=3 / HOUR)


def test_jobs_between_two_scrapes_are_seen_by_none() -> None:
    jobs = Wave(name="jobs", about="", period=97_000, busy=12_000)
    assert [round(unseen(jobs, every), 2) for every in EVERY] == [0.13, 0.57, 0.78]
    assert unseen(jobs, 10) == 0.0


def test_errors_are_told_by_method_and_work() -> None:
    found = {("beat", every, method): [0.0, size, -size] for every in EVERY for method, size in
             (("counter", 0.1), ("gauge", 30.0))}  # fmt: skip
    found["beat", 15, "counter"] = [0.0, 0.5, -0.1]
    told = {line.what: line for line in rows(found, 3)}
    first = told["Error over an hour, increase() of our counter, scraped every 15 s"]
    assert (first.budget, first.met) == ("<= 0.42 points, worst", False), "15 of 3600 seconds"
    assert told["Error over an hour, increase() of our counter, scraped every 60 s"].met is True
    gauge = told["Error over an hour, avg_over_time() of a gauge, scraped every 30 s"]
    assert (gauge.median, gauge.spread, gauge.met) == ("30.00 points", "p90 30.00, worst 30.00", None)
    line = table(found, [BEAT]).rows[0]
    assert line[2:4] == ("30.0 %", "+0.13, worst +0.50")


@pytest.mark.benchmark
def test_on_a_real_prometheus_the_counter_is_right_and_the_gauge_is_not() -> None:
    assert GAUGES.quick is not None
    found = GAUGES.quick()
    assert all(line.met for line in found.rows[:3])
    errors = found.curves["errors"]
    assert max(abs(error) for each in errors["counter"] for error in each) < 1.0
    assert max(abs(error) for error in errors["gauge"][0]) > 30.0, "in step with the scrape"
