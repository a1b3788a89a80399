"""The world is what it says: pages on their minutes, books that rates agree with, a week that agrees with the rules."""

from collections.abc import Iterator

import pytest

from exporter.core.leaks import LEAK_NAMES
from exporter.simulate.leak_scenarios import LEAK_SCENARIOS
from exporter.simulate.scenarios import SCENARIOS
from exporter.simulate.waterfalls import WATERFALL_SCENARIOS
from tests.dashboards import scheduler, weeks
from tests.dashboards.hang import HANG_SCENARIOS
from tests.dashboards.past import prometheus, rules
from tests.dashboards.stories import AWAY, Story
from tests.dashboards.world import END, World, stories, world

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]
TOLD = (
    Story(cluster="batching", scenario="batching", gpus=1),
    Story(cluster="dark", scenario="healthy_training", gpus=2, seconds=900, blind=True),
    Story(cluster="mute", scenario="lost_gpu", gpus=2, seconds=900, silent=400),
    Story(cluster="anew", scenario="healthy_training", gpus=2, seconds=1500, period=10.0, restarts=600),
)


@pytest.fixture(name="small", scope="module")
def _small(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    with world(tmp_path_factory.mktemp("small"), told=TOLD) as made:
        yield made


def test_a_rate_at_the_end_is_what_the_books_gained_in_those_minutes(small: World) -> None:
    found = small.past.ask('cluster_leak:gpu_efficiency_seconds:rate5m{cluster="batching"}', END)
    spent = small.clusters["batching"].leaks(5)
    assert set(spent) == set(LEAK_NAMES)
    assert {labels["leak"]: value * 300 for labels, value in found} == pytest.approx(
        {leak: part for leak, part in spent.items() if part}
    )
    assert spent["batching"] > 30


def test_the_books_of_an_earlier_time_and_of_a_job(small: World) -> None:
    played = small.clusters["batching"]
    (job,) = played.nodes[0].moments[-1].jobs
    assert sum(played.leaks(4, before=2).values()) == pytest.approx(240)
    assert sum(played.leaks().values()) == pytest.approx(1200)
    earlier, later = played.leaks(13, before=6), played.leaks(6)
    assert {leak: earlier[leak] + later[leak] for leak in later} == pytest.approx(played.leaks(19))
    assert earlier["startup"] == 0 < played.leaks(20)["startup"]
    assert earlier != later
    assert played.leaks(5, job=job) == played.leaks(5)
    assert sum(played.leaks(5, job="nobody's").values()) == 0
    layers = played.layers(5)
    assert sum(layers.values()) == pytest.approx(300)
    assert layers["useful"] == played.leaks(5)["useful"]
    ((_, joules),) = small.past.ask('sum(gpu_efficiency_node_energy_joules_total{cluster="batching"})', END)
    assert sum(played.joules().values()) == pytest.approx(joules)


def test_one_that_sees_nothing_and_one_that_is_not_heard(small: World) -> None:
    assert small.clusters["dark"].layers()["unobserved"] == pytest.approx(1800)
    assert small.clusters["dark"].states() == {"unobserved": 2}
    ((labels, value),) = small.past.ask('up{job="gpu-efficiency"} == 0', END)
    assert (labels["cluster"], value) == ("mute", 0)
    assert small.clusters["mute"].nodes[0].moments[-1].at == END - 420
    assert small.past.ask('gpu_efficiency_build_info{cluster="mute"}', END) == []


def test_one_that_restarts_counts_from_zero_and_its_books_go_on(small: World) -> None:
    (node,) = small.clusters["anew"].nodes
    total = 'sum(gpu_efficiency_node_seconds_total{cluster="anew"})'
    back, gone = END - 600, END - 600 - AWAY
    told = [(at, small.past.ask(total, at)) for at in (gone - 60, gone, back - 60, back, END)]
    assert [(at, [value for _, value in found]) for at, found in told] == [
        (gone - 60, [2 * 600]), (gone, []), (back - 60, []), (back, [0]), (END, [2 * 600]),
    ]  # fmt: skip
    assert {at for at in (moment.at for moment in node.moments) if gone <= at < back} == set()
    # The fifty seconds before it went are in no page, but in its books.
    assert sum(small.clusters["anew"].leaks().values()) == pytest.approx(2 * (600 + 50 + 600))
    ((_, born),) = small.past.ask('process_start_time_seconds{cluster="anew"}', END)
    assert born == back


def test_pages_are_a_minute_apart_and_so_are_rules_that_have_no_interval(small: World) -> None:
    ((_, points),) = small.past.ask_range(
        'timestamp(gpu_efficiency_build_info{cluster="batching"})', END - 300, end=END, step=20
    )
    assert sorted({at for _, at in points}) == [END - 60 * n for n in range(5, -1, -1)]


def test_the_last_hour_has_as_many_samples_as_fit_into_it(small: World) -> None:
    span = small.last(10)
    query = f'count_over_time(cluster:gpu_efficiency_paid_seconds:rate5m{{cluster="batching"}}[{span.length:.0f}s])'
    assert [value for _, value in small.past.ask(query, span.end)] == [3]


def test_money_and_who_pays(small: World) -> None:
    ((labels, value),) = small.past.ask('cluster:gpu_efficiency_cost_paid:per_hour{cluster="batching"}', END)
    assert labels["currency"] == "USD"
    assert value == pytest.approx(2.5)
    teams = {labels["team"] for labels, _ in small.past.ask('gpu_efficiency_job_info{cluster="mute"}', END - 420)}
    assert teams == {"foundation"}


def test_every_scenario_has_a_cluster_of_its_own() -> None:
    told = stories()
    mixed = {"blind", "unpriced", "moves", "hang_moves"}
    alone = {*SCENARIOS, *LEAK_SCENARIOS, *WATERFALL_SCENARIOS, *HANG_SCENARIOS}
    assert {story.cluster for story in told} == alone | mixed
    assert all(story.cluster in {story.scenario, "fleet", *mixed} for story in told)
    assert len({(story.cluster, story.node) for story in told}) == len(told)


def test_a_made_up_week_agrees_with_the_rules(tmp_path_factory: pytest.TempPathFactory) -> None:
    at = END - 3600
    series = weeks.week("x", start=at - 480, end=at + 240)
    there = {dict(labels)["__name__"] for labels in series}
    derived = [rule for rule in rules() if rule.name in there and rule.reads <= there]
    assert len(derived) >= 14
    with prometheus(tmp_path_factory.mktemp("week")) as past:
        past.write(series)
        for rule in derived:
            said, follows = (
                {frozenset(k.items()): v for k, v in past.ask(text, at)} for text in (rule.name, rule.expr)
            )
            named = {labels - {("__name__", rule.name)}: value for labels, value in said.items()}
            assert {labels: pytest.approx(value) for labels, value in follows.items()} == named, rule.name


def test_days_have_a_shape() -> None:
    monday = END - (END % 86_400) - 3 * 86_400
    afternoon, night, sunday = (weeks.wanted(monday + hour * 3600) for hour in (15, 3, 15 - 24))
    assert afternoon > weeks.GPUS > 1.5 * night
    assert sunday < 0.8 * afternoon
    assert sum(weeks.fleet(monday).values()) == pytest.approx(weeks.GPUS)


def test_the_queue_grows_and_a_part_of_it_would_fit(tmp_path_factory: pytest.TempPathFactory) -> None:
    with prometheus(tmp_path_factory.mktemp("queue")) as past:
        past.write(scheduler.pages("x", start=END - 3600, end=END))
        sums = [past.ask(f"sum(gpu_efficiency_cluster_queue_{name}gpus)", END)[0][1] for name in ("", "fitting_")]
        assert sums == [16 + 6 + 24, 8]
        assert past.ask("sum(gpu_efficiency_cluster_queue_gpus)", END - 3600)[0][1] == 16 + 6 + 4 * 4
        assert past.ask("sum(gpu_efficiency_cluster_partition_free_gpus)", END)[0][1] == scheduler.GPUS
        assert past.ask("sum(gpu_efficiency_cluster_interruptions_total)", END)[0][1] == 3
