"""Simulated jobs through the real core and all rules: a true trouble gives its alert, in time and once; nothing else.

What only looks like trouble gives nothing, whatever befalls the scrapes meanwhile. The bounds of single rules are in
`alerts/tests`; here is what the daemons really say.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import pytest
from msgspec.structs import replace

from exporter.simulate.simulation import PROFILED
from tests.alerts.played import Firing, Told, fired
from tests.alerts.stories import Span, Story, began
from tests.alerts.test_rules import SEVERITIES

# A minute of promtool, and many times that beside other work on few processors.
pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]


class Due(NamedTuple):
    """An alert that must fire once."""

    alert: str
    subject: str
    """Its job, or its node."""
    phase: str
    """Part of the story with which the trouble begins; empty: with the story itself."""
    within: Span
    """Seconds after that."""
    severity: str = ""
    """Where it is not the alert's usual one."""

    def told(self) -> Told:
        """Give what is to be told of it."""
        return Told(self.alert, self.severity or SEVERITIES[self.alert], self.subject)


class Case(NamedTuple):
    """A story and all that it may be told of."""

    story: Story
    due: tuple[Due, ...] = ()


# -- what befalls the first node's scrapes, or all of them --


def mishaps(begin: int) -> dict[str, dict[str, Span]]:
    """Three minutes of failed scrapes, a daemon that is away for one, and four minutes without Prometheus."""
    return {
        "scrape gap": {"unanswered": (begin, begin + 180)},
        "exporter restart": {"away": (begin, begin + 60)},
        "Prometheus restart": {"down": (begin, begin + 240)},
    }


def amid(name: str, story: Story, begin: int, *due: Due) -> dict[str, Case]:
    """One case for each mishap in the middle of a story."""
    return {f"{name}, {what}": Case(replace(story, **how), due) for what, how in mishaps(begin).items()}


# -- alerts that are due --

# A node whose GPUs all spin suspects a hang after two minutes, and the alert waits for ten more. One of whose GPUs one
# rests, for its process may evaluate or save, suspects one after twenty-five: then no GPU of the job works.
_PAGE = (1500, 1590)
_SUSPECTED = (720, 810)
# A rank that rests may be evaluating: that it is waited for is a ticket, not a hang.
_EVALUATES = Due("GPUEfficiencyStragglerRank", "41001", "rank 0 evaluates", (600, 1320))
_EVALUATES_ELSEWHERE = Due("GPUEfficiencyJobHungSuspected", "40500", "rank 0 evaluates", _SUSPECTED)
# Of a job with fewer GPUs than a node has it is a ticket.
_DEADLOCK = (
    Due("GPUEfficiencyJobHungSuspected", "40500", "one rank never comes", _SUSPECTED),
    Due("GPUEfficiencyJobDeadlocked", "40500", "one rank never comes", _PAGE, "ticket"),
)
_PAGED_DEADLOCK = (_DEADLOCK[0], _DEADLOCK[1]._replace(severity="page"))
# A daemon or a Prometheus that was restarted needs its time anew.
_INTERRUPTED_DEADLOCK = (
    Due("GPUEfficiencyJobHungSuspected", "40500", "one rank never comes", (720, 1300)),
    Due("GPUEfficiencyJobDeadlocked", "40500", "one rank never comes", (1500, 2200), "ticket"),
)
_GONE = Due("GPUEfficiencyGPUAllocatedWithoutProcess", "41000", "held without a process", (2700, 2820))
_RESTS = Due("GPUEfficiencyGPUZombie", "41000", "a context and no kernel", (1800, 1920))
_LEFT = Due("GPUEfficiencyGPUUnownedProcess", "n0", "free", (600, 720))
# A job that has never worked may be preparing: six times as long.
_NEVER_BEGAN = (
    Due("GPUEfficiencyJobHungSuspected", "41001", "the first collective never ends", _SUSPECTED),
    Due("GPUEfficiencyJobDeadlocked", "41001", "the first collective never ends", (1800, 1890), "ticket"),
)
# Left to the profiler as zeros or old values, the counters are gone; ten minutes of it are a ticket.
_BLIND = Due("GPUEfficiencyExporterBlind", "n0", "", (900, 1020))

LOOKALIKES: Mapping[str, Case] = {
    "checkpoint": Case(Story(name="rank0_checkpoint", gpus=3)),
    "checkpoint of four minutes": Case(Story(name="rank0_long_checkpoint", gpus=3)),
    "checkpoint of eight minutes": Case(Story(name="rank0_slow_checkpoint", gpus=3)),
    "checkpoint, Prometheus restart": Case(Story(name="rank0_slow_checkpoint", gpus=3, down=(450, 750))),
    "checkpoint, scrape gap": Case(Story(name="rank0_slow_checkpoint", unanswered=(600, 780))),
    "checkpoint, exporter restart": Case(Story(name="rank0_slow_checkpoint", away=(600, 660))),
    "evaluation": Case(Story(name="rank0_evaluation", gpus=3), (_EVALUATES,)),
    "evaluation on another node": Case(Story(name="evaluation_elsewhere", nodes=2), (_EVALUATES_ELSEWHERE,)),
    **amid("evaluation on another node", Story(name="evaluation_elsewhere", nodes=2), 780, _EVALUATES_ELSEWHERE),
    "compile": Case(Story(name="autotune")),
    "first step of 22 minutes": Case(Story(name="long_first_step")),
    "NCCL phase": Case(Story(name="collectives")),
    "decode at low batch": Case(Story(name="memory_bound_decode", seconds=1500)),
    "serving lull of 4 hours": Case(Story(name="serving_lull", gpus=1, period=60, every=60)),
    "poller without requests": Case(Story(name="idle_poller", gpus=1, seconds=2700)),
    "profiler": Case(Story(name="profiler_attached")),
    "profiler that leaves zeros": Case(
        Story(name="profiled_first", gpus=1, nodes=2, others=10, leaves="zeros"), (_BLIND,)
    ),
    "slow image": Case(Story(name="slow_image", gpus=1)),
    "pause between two programs": Case(Story(name="two_parts", gpus=1)),
    "slow epilog": Case(Story(name="slow_epilog", gpus=1)),
    **amid("training on two nodes", Story(name="healthy_across", nodes=2), 720),
}
TROUBLES: Mapping[str, Case] = {
    "deadlock": Case(Story(name="missing_across", nodes=2, seconds=2400), _DEADLOCK),
    "deadlock of eight GPUs": Case(Story(name="missing_across", gpus=4, nodes=2, seconds=2400), _PAGED_DEADLOCK),
    # Half an hour after the page the daemon of the first node restarts: the page stays one.
    "deadlock, exporter restart after the page": Case(
        Story(name="missing_across", nodes=2, seconds=4200, away=(2700, 2760)), _DEADLOCK
    ),
    **amid("deadlock", Story(name="missing_across", nodes=2, seconds=3000), 720, *_INTERRUPTED_DEADLOCK),
    "deadlock at the start": Case(Story(name="startup_hang", seconds=2400), _NEVER_BEGAN),
    "hang without profiling fields": Case(
        Story(name="all_ranks_wait", missing=PROFILED, seconds=2400),
        (Due("GPUEfficiencyJobHungSuspected", "41001", "all ranks wait", _SUSPECTED),),
    ),
    "lost GPU": Case(
        Story(name="lost_gpu", gpus=3),
        # Its peers spin for ten minutes, until the watchdog of the collective library ends the job.
        (Due("GPUEfficiencyGPULost", "n0", "off the bus", (120, 180)),),
    ),
    "straggler, every step": Case(
        Story(name="straggler", gpus=8, seconds=2400),
        (Due("GPUEfficiencyStragglerRank", "41001", "training with one slow rank", (900, 1320)),),
    ),
    "straggler, half a minute at a time": Case(
        Story(name="uneven", gpus=3), (Due("GPUEfficiencyStragglerRank", "41001", "rank 0 computes on", (900, 1200)),)
    ),
    "throttled": Case(
        Story(name="throttled", gpus=1),
        (Due("GPUEfficiencyGPUThrottledCostly", "n0", "training in hot air", (600, 1200)),),
    ),
    "leaked process": Case(Story(name="leaked_process"), (_LEFT,)),
    **amid("leaked process", Story(name="leaked_process", seconds=2400), 1350, _LEFT),
    "keeper": Case(
        Story(name="keeper", gpus=1, every=60, seconds=4500),
        (Due("GPUEfficiencyGPUZombie", "41000", "resting", (1800, 2400)),),
    ),
    "zombie notebook": Case(
        Story(name="zombie_notebook", gpus=1, period=30, every=60, seconds=8400),
        (Due("GPUEfficiencyGPUZombie", "41500", "nobody is at the keyboard", (7200, 7320)),),
    ),
    "idle context": Case(Story(name="idle_context", gpus=1, period=30, every=60), (_RESTS,)),
    **amid("idle context", Story(name="idle_context", gpus=1, period=30, every=60, seconds=6600), 2400, _RESTS),
    "no process": Case(Story(name="dead_program", gpus=1, period=30, every=60), (_GONE,)),
    **amid("no process", Story(name="dead_program", gpus=1, period=30, every=60, seconds=8400), 3900, _GONE),
}
CASES = {**LOOKALIKES, **TROUBLES}


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[Told, Firing]]:
    """All stories, played beside one another."""
    folder: Path = tmp_path_factory.mktemp("stories")
    return fired({name: case.story for name, case in CASES.items()}, folder)


@pytest.mark.parametrize("name", CASES)
def test_a_story_is_told_of_once_in_time_and_of_nothing_else(name: str, told: dict[str, dict[Told, Firing]]) -> None:
    story, due = CASES[name]
    assert told[name].keys() == {each.told() for each in due}
    assert {what.alert: firing.times for what, firing in told[name].items()} == {each.alert: 1 for each in due}
    for each in due:
        first = told[name][each.told()].first - (began(story, each.phase) if each.phase else 0)
        assert each.within[0] <= first <= each.within[1], each.alert
