"""Simulated jobs through the real core and all rules: each true trouble gives its alert, once, in time; nothing else.

What only looks like trouble gives nothing, whatever befalls the scrapes meanwhile.
"""

from typing import NamedTuple

import pytest

from exporter.simulate.simulation import PROFILED
from tests.alerts.stories import Firing, Span, Story, Told, began, fired
from tests.alerts.test_rules import SEVERITIES

pytestmark = pytest.mark.e2e


class Due(NamedTuple):
    """An alert that must fire, on which job or node, and when: seconds after a phase of the story begins."""

    alert: str
    subject: str
    phase: str
    within: Span


GAP: Span = (720, 900)
"""Three minutes of failed scrapes."""
AWAY: Span = (780, 840)
DOWN: Span = (720, 960)
MISHAPS = {"a scrape gap": {"unanswered": GAP}, "an exporter restart": {"away": AWAY}, "a Prometheus restart": {"down": DOWN}}


def _later(seconds: int) -> dict[str, dict[str, Span]]:
    return {
        name: {what: (begin + seconds, end + seconds) for what, (begin, end) in each.items()}
        for name, each in MISHAPS.items()
    }


# Page within six minutes of the first spin; the daemon confirms after five.
_PAGE = (300, 360)
# Suspected after two minutes, told after ten more.
_TICKET = (720, 840)


def _deadlock(subject: str, phase: str) -> Due:
    return Due("JobDeadlocked", subject, phase, _PAGE)


QUIET = {
    "a checkpoint": Story(name="rank0_checkpoint", gpus=3),
    "a checkpoint of 4 minutes": Story(name="rank0_long_checkpoint", gpus=3),
    "a checkpoint of 8 minutes": Story(name="rank0_slow_checkpoint", gpus=3),
    "compile": Story(name="autotune"),
    "a first step of 22 minutes": Story(name="long_first_step"),
    "an NCCL phase": Story(name="collectives"),
    "pipeline bubbles": Story(name="pipeline_bubbles"),
    "decode at low batch": Story(name="memory_bound_decode", gpus=3),
    "few requests": Story(name="few_requests"),
    "a poller without requests": Story(name="idle_poller", gpus=1),
    "a poller of host memory": Story(name="host_poller", gpus=1),
    "a profiler": Story(name="profiled_first", gpus=1, nodes=12),
    "a source that is silent for 5 minutes": Story(name="telemetry_outage"),
    "a slow image": Story(name="slow_image"),
    "a pause between two programs": Story(name="two_parts"),
    "a slow loader": Story(name="slow_loader"),
    "a slow epilog": Story(name="slow_epilog"),
    "an agent on a free GPU": Story(name="agent_on_free_gpu"),
    "drained GPUs": Story(name="drained_gpus"),
    "a serving lull of 4 hours": Story(name="serving_lull", gpus=1, period=60, every=60),
    "a notebook in use": Story(name="used_notebook", gpus=1, period=30, every=60),
    **{f"training and {what}": Story(name="healthy_across", nodes=2, **how) for what, how in MISHAPS.items()},
    **{f"a checkpoint and {what}": Story(name="rank0_slow_checkpoint", gpus=3, **how) for what, how in MISHAPS.items()},
}
LOUD = {
    "rank 0 evaluates": (Story(name="rank0_evaluation", gpus=3), Due("JobHungSuspected", "41001", "rank 0 evaluates", _TICKET)),
    **{
        f"rank 0 evaluates elsewhere and {what}": (
            Story(name="evaluation_elsewhere", nodes=2, **how),
            Due("JobHungSuspected", "40500", "rank 0 evaluates", _TICKET),
        )
        for what, how in {"nothing": {}, **MISHAPS}.items()
    },
    "deadlock": (Story(name="missing_across", nodes=2), _deadlock("40500", "hang")),
    **{
        f"deadlock and {what}": (Story(name="missing_across", nodes=2, seconds=2400, **how), _deadlock("40500", "hang"))
        for what, how in MISHAPS.items()
    },
    "all wait": (Story(name="deadlock_across", nodes=2), _deadlock("40500", "all ranks wait")),
    "missing node": (Story(name="missing_node", nodes=2), _deadlock("40500", "the other node never comes")),
    "nic": (Story(name="nic_hang"), _deadlock("41001", "the network card never answers")),
    "one gpu": (Story(name="one_gpu_hang", gpus=1), _deadlock("41000", "a kernel waits for ever")),
    "startup": (Story(name="startup_hang", seconds=2700), _deadlock("41001", "the first collective never ends")),
    "beside": (Story(name="hang_beside_training", gpus=4), _deadlock("41001", "one rank never comes")),
    "nvml only": (Story(name="all_ranks_wait", missing=PROFILED, seconds=3600), Due("JobHungSuspected", "41001", "all ranks wait", _TICKET)),
    "profiler zeros": (Story(name="profiled_first", gpus=1, nodes=12, leaves="zeros"), Due("ExporterBlind", "n0", "training", (0, 2000))),
    "profiler stale": (Story(name="profiled_first", gpus=1, nodes=12, leaves="stale"), Due("ExporterBlind", "n0", "training", (0, 2000))),
    "uneven": (Story(name="uneven", gpus=3), Due("StragglerRank", "41001", "all compute", (0, 2000))),
    "throttled": (Story(name="throttled", gpus=1), Due("GPUThrottledCostly", "n0", "training in hot air", (0,2000))),
    "lost": (Story(name="lost_gpu", gpus=3), Due("GPULost", "n0", "off the bus", (120, 180)), _deadlock("41001", "a peer is gone")),
    **{f"leaked {what}":(Story(name="leaked_process", gpus=4, seconds=2400, **how), Due("GPUUnownedProcess", "n0", "free", (0,700)))
        for what, how in {"nothing": {}, **_later(600)}.items()},
    "keeper": (Story(name="keeper", gpus=1, every=60), Due("GPUZombie", "41000", "resting", (0, 9000))),
    **{f"notebook {what}": (Story(name="zombie_notebook", gpus=1, period=30, every=60, seconds=16200, **how), Due("GPUZombie", "41500", "nobody is at the keyboard", (0, 9000)))
      for what, how in {"nothing": {}, **_later(7500)}.items()},
    **{f"idle {what}": (Story(name="idle_context", gpus=1, period=30, every=60, seconds=9000, **how), Due("GPUZombie", "41000", "a context and no kernel", (0, 9000)))
      for what, how in {"nothing": {}, **_later(2000)}.items()},
    **{f"noproc {what}": (Story(name="dead_program", gpus=1, period=30, every=60, seconds=9000, **how), Due("GPUAllocatedWithoutProcess", "41000", "held without a process", (0, 9000)))
      for what, how in {"nothing": {}, **_later(3000)}.items()},
}
ALL = {**QUIET, **{name: each[0] for name, each in LOUD.items()}}
