"""Every alert has a drill that makes it fire, through the real core and all rules, and when the table says so.

Here a drill is played; that the command starts it, and that a real Prometheus then has the alert, is in
`tests/e2e/test_drills.py`.
"""

import argparse
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from math import ceil
from threading import Event
from typing import NamedTuple

import pytest
from msgspec.structs import replace

from alerts import build_drills
from exporter.cli.drill import SimulatedScheduler
from exporter.cli.wiring import read_config
from exporter.cluster import metrics as cluster
from exporter.cluster.watcher import ClusterWatcher
from exporter.core.exposition import render
from exporter.core.ledger import Ledger
from exporter.core.metrics import Metric
from exporter.core.model import NEVER, SECOND
from exporter.core.pipeline import advance
from exporter.core.snapshot import DaemonMetadata, HistoryStatus, take_snapshot
from exporter.simulate.drills import DRILL_SCENARIOS, DRILLS
from exporter.simulate.simulation import simulate
from tests.alerts.packs import groups
from tests.alerts.played import Firing, Told, fired
from tests.alerts.promql import Selector, parse, walk
from tests.alerts.stories import Story
from tests.alerts.test_rules import SEVERITIES
from tests.clocks import JumpClock
from tests.e2e.pace import milliseconds

EVERY, PERIOD = 30, 15
"""Seconds between two scrapes and evaluations, and between two readings; scrapes of 15 s come sooner."""
MOST_AGE = 20
"""Seconds after which the daemon refuses a page."""


PLAYED = tuple(name for name in DRILLS if not DRILLS[name].past)
"""promtool has no day for a past; what fires with one is in `tests/e2e/test_drills.py`."""


def test_every_alert_has_a_drill() -> None:
    assert DRILLS.keys() == SEVERITIES.keys()


def test_the_documents_have_the_table() -> None:
    assert build_drills.FILE.read_text() == build_drills.document()


def _story(name: str) -> Story:
    drill = DRILLS[name]
    return Story(
        name=name, gpus=drill.gpus, nodes=drill.nodes * drill.scrape_jobs, every=EVERY,
        seconds=60 * (drill.minutes + 1),
    )  # fmt: skip


def _play(story: Story, node: int, metrics: Sequence[Metric]) -> Iterator[bytes | None]:
    drill = DRILLS[story.name]
    if drill.cluster:
        yield from _cluster_pages(story)
        return
    config = read_config(argparse.Namespace(config=None, **drill.settings))
    number = 0 if drill.scrape_jobs > 1 else node
    before = drill.preroll_seconds
    played = simulate(
        drill.scenario, period_seconds=PERIOD, preroll_seconds=before, duration_seconds=story.length, gpus=drill.gpus,
        node=number, stories=DRILL_SCENARIOS, start=-before * SECOND, wall=-before * SECOND,
    )  # fmt: skip
    terms = config.terms(played.host)
    # The story's clock begins at 0 now.
    ended = tuple((name, reason, expiry - time.time()) for name, reason, expiry in terms.exemptions)
    meta = DaemonMetadata(
        version="1", source="simulation", simulated=True, terms=replace(terms, exemptions=ended),
        history=HistoryStatus(works=drill.history),
    )  # fmt: skip
    ledger, seen_at = Ledger(config.policy, config.policies()), NEVER
    ledger.conservation_errors += not drill.books
    ahead = {seen.at // SECOND: seen for seen in played.observations}
    for now in range(-before, story.length, PERIOD):
        if (seen := ahead.get(now)) is not None:
            advance(ledger, seen)
            seen_at = now
        if now >= 0 and now % EVERY == 0:
            yield render(take_snapshot(ledger, meta), metrics=metrics) if now - seen_at <= MOST_AGE else None


def _cluster_pages(story: Story) -> Iterator[bytes]:
    clock, stop = JumpClock(), Event()
    watcher = ClusterWatcher(SimulatedScheduler(), clock, refresh_seconds=EVERY, max_jobs=10)
    for _ in range(0, story.length, EVERY):
        watcher.turn()
        yield cluster.page(watcher.view, now=clock.now())
        clock.wait(clock.now() + EVERY * SECOND, stop)


@pytest.fixture(name="told", scope="module")
def _told(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[Told, Firing]]:
    return fired({name: _story(name) for name in PLAYED}, tmp_path_factory.mktemp("drills"), _play)


@pytest.mark.slow
@pytest.mark.parametrize("name", PLAYED)
def test_a_drill_fires_its_alert_in_time_and_no_other(name: str, told: dict[str, dict[Told, Firing]]) -> None:
    drill = DRILLS[name]
    first = {what.alert: firing.first for what, firing in told[name].items()}
    assert name in first, first
    assert [firing.times for what, firing in told[name].items() if what.alert == name] == [1]
    assert {what.severity for what in told[name] if what.alert == name} == {SEVERITIES[name]}
    assert first.keys() <= {name, *drill.companions}
    assert drill.minutes == ceil((first[name] + _later(name)) / 60), (first, _later(name))


@pytest.mark.parametrize("name", sorted(DRILLS.keys() - PLAYED))
def test_a_drill_with_a_past_fires_once_its_rules_have_two_scrapes(name: str) -> None:
    assert DRILLS[name].minutes == ceil((EVERY + _turns()[name].pending + _later(name)) / 60)


# -- promtool evaluates all groups at one pace; Prometheus each at its own --


class Turn(NamedTuple):
    """When a rule is evaluated."""

    group: str
    interval: int
    """Seconds between two evaluations of its group."""
    pending: int
    """Seconds of its `for`."""
    reads: frozenset[str]


@cache
def _turns() -> Mapping[str, Turn]:
    found: dict[str, Turn] = {}
    for each in groups().values():
        for group in each:
            interval = milliseconds(group.get("interval", "1m")) // 1000
            for rule in group["rules"]:
                reads = frozenset(node.name for node in walk(parse(rule["expr"])) if isinstance(node, Selector))
                pending = milliseconds(rule.get("for", "0s")) // 1000
                found[rule.get("record") or rule["alert"]] = Turn(group["name"], interval, pending, reads)
    return found


def _later(alert: str) -> int:
    """Return by how many seconds more an alert may come than with promtool: each group on its way waits for its turn.

    Its `for` ends with an evaluation.
    """
    turn = _turns()[alert]
    return turn.interval + _waits(alert, ()) + -turn.pending % turn.interval


def _waits(name: str, above: tuple[str, ...]) -> int:
    """Return for how long what a rule reads may be behind; rules of one group read one another's results at once."""
    turn = _turns()[name]
    read = (each for each in turn.reads if each in _turns() and each not in {*above, name})
    return max((_behind(turn, each) + _waits(each, (*above, name)) for each in read), default=0)


def _behind(turn: Turn, read: str) -> int:
    other = _turns()[read]
    return 0 if other.group == turn.group else other.interval
