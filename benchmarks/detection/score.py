"""What was said against what was true: one run judged, many runs counted.

Owns the confusion of each detector and the time it took. A run counts once for each detector: it is a true positive
when every subject that is in trouble was named and no other; a name that should not have been said, or was said too
early, makes it a false positive.
"""

from collections.abc import Iterable, Mapping, Sequence
from math import sqrt
from statistics import median

from msgspec import Struct
from msgspec.structs import replace

from benchmarks.detection.cases import ACQUITTING, DRIVER_ONLY, FP, Case, Detector, Draw, Label
from exporter.core.model import MS, SECOND
from exporter.simulate.simulation import Simulation

Subjects = dict[str, int]
"""Who is in trouble, and nanoseconds from the story's beginning since when: jobs for a hang, GPUs for the rest."""
_Z = 1.959964  # of 95 %


def truth(case: Case, nodes: Sequence[Simulation]) -> dict[Detector, Subjects]:
    """Who is in trouble, as the simulation itself has written it down, and since when it counts."""
    return _truth(case.labels, case, nodes)


def onsets(case: Case, nodes: Sequence[Simulation]) -> dict[Detector, Subjects]:
    """The same, from the first moment of it: a zombie from when it came to rest, not from when its class may not."""
    return _truth([replace(label, window=0.0, early=0.0) for label in case.labels], case, nodes)


def _truth(labels: Iterable[Label], case: Case, nodes: Sequence[Simulation]) -> dict[Detector, Subjects]:
    found: dict[Detector, Subjects] = {}
    for label in labels:
        subjects = found.setdefault(label.detector, {})
        for node in nodes:
            _add(subjects, label, node, instances=case.twist == "mig")
    return found


def _add(subjects: Subjects, label: Label, node: Simulation, *, instances: bool) -> None:
    for entry in node.truth:
        since = entry.at - node.start
        if label.when(entry) and since < node.duration_ms * MS:
            gpu = entry.uuid.replace("GPU-", "MIG-") if instances else entry.uuid
            name = entry.job_id if label.detector == "hang" else gpu
            subjects.setdefault(name, since + round(label.window - label.early) * SECOND)


def provable(case: Case, drawn: Draw) -> str:
    """How far a hang can be proven with the fields there are: confirmed, suspected, or not at all."""
    smooths = case.story == "smoothed_hang"
    if drawn.missing in DRIVER_ONLY:
        return "nothing" if smooths else "suspected"
    unseen = any(set(group) <= set(drawn.missing) for group in ACQUITTING)
    links = ("nvlink_tx_bytes_per_second" in drawn.missing) and drawn.board in ("L4", "L40S")
    return "suspected" if (unseen and not links) or (smooths and drawn.missing == FP) else "confirmed"


class Score(Struct):
    """One detector over many runs. Times are seconds from the moment that counts to the first word."""

    true: int = 0
    false: int = 0
    missed: int = 0
    quiet: int = 0
    times: list[float] = []
    wrong: list[str] = []
    """The runs that went wrong, for people."""

    @property
    def precision(self) -> float:
        """Of what was said, the share that was true; 1 where nothing was said."""
        return self.true / (self.true + self.false) if self.true + self.false else 1.0

    @property
    def recall(self) -> float:
        """Of what was true, the share that was said; 1 where nothing was true."""
        return self.true / (self.true + self.missed) if self.true + self.missed else 1.0

    def judge(self, run: str, told: Mapping[str, int], subjects: Subjects, *, early: int = 0) -> None:
        """Add one run. `early`: nanoseconds that a word may come before its time (the grain of a reading)."""
        false = [name for name, at in told.items() if name not in subjects or at < subjects[name] - early]
        missing = [name for name in subjects if name not in told]
        self.false += bool(false)
        self.missed += bool(missing)
        self.true += bool(subjects and not missing and not false)
        self.quiet += not subjects and not told
        self.times += [(told[name] - since) / SECOND for name, since in subjects.items() if name in told]
        if false or missing:
            self.wrong.append(f"{run}{' false' if false else ''}{' missed' if missing else ''}")

    def took(self) -> str:
        """Median and longest time, in words."""
        return f"median {median(self.times):.0f} s, longest {max(self.times):.0f} s" if self.times else "-"


def wilson(right: int, of: int) -> tuple[float, float]:
    """Least and most that a share may be, 19 times of 20, where `right` of `of` were seen (Wilson's interval).

    Unlike the interval that everybody knows it does not shrink to a point where nothing went wrong.
    """
    if not of:
        return 0.0, 1.0
    share, grain = right / of, _Z * _Z / of
    middle, half = share + grain / 2, _Z * sqrt(share * (1 - share) / of + grain / (4 * of))
    return max(0.0, (middle - half) / (1 + grain)), min(1.0, (middle + half) / (1 + grain))


def merged(scores: Iterable[Score]) -> Score:
    """Several scores as one."""
    total = Score()
    for score in scores:
        total.true += score.true
        total.false += score.false
        total.missed += score.missed
        total.quiet += score.quiet
        total.times += score.times
        total.wrong += score.wrong
    return total
