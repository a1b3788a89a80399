"""The clusters of the end-to-end tests, each with the daemons of its nodes.

Sites differ in Slurm's version, in how jobs are tracked, and in whether Slurm's order of the GPUs and their device
numbers are the driver's order.
"""

import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from msgspec.structs import replace

from tests.slurm.chroot import built, missing
from tests.slurm.observer import Observer, observed
from tests.slurm.plan import Plan
from tests.slurm.rig import SlurmRig

HOST = "22.05"
"""The version of the machine's own packages."""
ONE_OR_MORE = tuple(os.environ.get("SLURM_VERSIONS", HOST).split())
"""Versions for tests that `make test` runs on one; `make slurm-versions` runs them on the others."""
ORDER = (4, 5, 6, 7, 0, 1, 2, 3)
"""Number of the device file by Slurm's index: gres.conf has the upper four first."""
MINORS = (7, 6, 5, 4, 3, 2, 1, 0)
"""Number of the device file by the driver's ordinal: the driver has the reverse order."""
LINES = tuple(f"Name=gpu Type=h100 File=DIR/dev/nvidia[{first}-{first + 3}]" for first in (4, 0))
GROUPS = Plan(gres_lines=LINES, cgroups=True, prolog_flags="Contain")
# With cgroups Slurm takes seconds to end a job: only where they matter. 24.11 sometimes leaves the socket of an extern
# step (PrologFlags=Contain) behind, so that a job's end is noticed seconds later: that has a test of its own.
PLANS = {
    "22.05": Plan(gres_lines=LINES),
    "24.11": Plan(gres_lines=LINES),
    "26.05": Plan(gres_lines=LINES),
    "26.05 with SLUIDs": replace(GROUPS, unified=True),
    "26.05 with job ids": replace(GROUPS, unified=True, job_id_paths=True),
    "26.05 in a slice": replace(GROUPS, unified=True, slice="research.slice"),
    "22.05 with groups v2": replace(GROUPS, unified=True),
    "24.11 with groups v2": replace(GROUPS, unified=True, prolog_flags="Alloc"),
    "22.05 with device cgroups": GROUPS,
    "24.11 with device cgroups": replace(GROUPS, prolog_flags="Alloc"),
}


def unified_groups() -> str:
    """Return where this machine has control groups v2; skips the test if nowhere."""
    mounts = [line.split() for line in Path("/proc/self/mounts").read_text(encoding="utf-8").splitlines()]
    found = next((where for _, where, kind, *_ in mounts if kind == "cgroup2"), "")
    if not found:
        pytest.skip("needs control groups of its own: no cgroup2 is mounted here")
    return found


def root_of(version: str) -> Path:
    """Return the root of this version's programs; skips the test if it is unavailable."""
    root = Path("/") if version == HOST else built(version)
    if root is None:
        pytest.skip(missing(version))
    return root


class Site:
    """A cluster and the observers of its nodes, in the same order."""

    def __init__(self, rig: SlurmRig, observers: list[Observer]) -> None:
        self.rig, self.observers = rig, observers

    def given(self, job: str, node: int = 0) -> set[str]:
        """Return the driver's ordinals of the GPUs that slurmd gave to the job on a node."""
        return {f"{MINORS.index(ORDER[int(index)])}" for index in self.rig.given(job, self.rig.nodes[node])}

    def holds(self, job: str, node: int = 0) -> set[str]:
        """Wait until a node's daemon reports the job's GPUs as slurmd allocated them, and return these."""
        given = self.given(job, node)
        assert given
        observer = self.observers[node]
        observer.until(lambda held: held.get(job) == given, f"job {job} holds {sorted(given)}")
        return given


@contextmanager
def site(name: str, folder: Path, settings: Mapping[str, str] | None = None) -> Iterator[Site]:
    """The site called `name`; skips if its version of Slurm is unavailable."""
    version = name.partition(" ")[0]
    with ExitStack() as stack:
        rig = stack.enter_context(SlurmRig(replace(PLANS[name], root=root_of(version))))
        known = {"HOST_CGROUP": unified_groups()} if PLANS[name].unified else {}
        settings = known | dict(settings or {})
        nodes = [observed(rig, node, folder / node, minors=MINORS, settings=settings) for node in rig.nodes]
        yield Site(rig, [stack.enter_context(node) for node in nodes])
