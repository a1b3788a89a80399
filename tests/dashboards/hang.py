"""The 64-GPU hang that somebody looks at when it is seven minutes old: eight nodes, one job, and a rank that rests."""

from collections.abc import Mapping
from random import Random

from msgspec.structs import replace

from exporter.simulate import kernels, programs
from exporter.simulate.plan import Plan, Scenario, Setting, SimulatedJob, batch_owner, impatient
from exporter.simulate.workload import FOREVER_MS, IDLE_CYCLE, Stage, Stages

NODES, GPUS = 8, 8
"""Nodes of the job, and GPUs of each."""
HUNG_FOR = 420
"""Seconds, at the end of the story."""
JOB = "40700"


def _hang(setting: Setting) -> Plan:
    waits = kernels.polling()
    parts = tuple(IDLE_CYCLE if (setting.node, slot) == (0, 0) else waits for slot in setting.slots)

    def stages(rng: Random) -> Stages:
        working = programs.training(setting.board, NODES * GPUS)
        yield from programs.until(working(rng), setting.duration_ms - 1000 * HUNG_FOR)
        yield Stage("one rank never comes", FOREVER_MS, parts, memory=0.85)

    owner = replace(batch_owner(setting, 0, "pretrain-large"), job_id=JOB)
    job = SimulatedJob(owner=owner, slots=setting.slots, stages=stages, gpus=NODES * setting.gpus)
    return Plan(jobs=(impatient(job),))


HANG_SCENARIOS: Mapping[str, Scenario] = {"hang_across": Scenario(_hang, 1800, "")}
