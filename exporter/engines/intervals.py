"""From the pages of one replica, one after the other, to what it says of the time between them.

Owns differences, restarts, and the estimates that an engine's own figures allow. Refuses names (the engines') and
leaks (the core's). What an engine does not say is None, never 0.
"""

from collections.abc import Mapping
from typing import Any

from msgspec import Struct

from exporter.config import ServedModel
from exporter.core.model import SECOND, Latency, Serving
from exporter.engines.calm import Calm
from exporter.engines.figures import LATENCIES, Figures
from exporter.engines.histograms import Histogram

LONGEST = 120 * SECOND
"""Two pages further apart do not vouch for the time between them; or than three intervals, where those are longer."""
FLOPS_A_TOKEN = 2
"""By parameter: one multiplication and one addition (accounting, section 9)."""


class Holder(Struct, frozen=True):
    """Whose a replica is, and where it runs."""

    job_id: str
    uuids: tuple[str, ...] = ()
    """GPUs of this node; empty: all that the job has here."""
    gpus: int = 0
    """GPUs of the replica on all nodes, where its command line says more than are here."""
    shared: int = 0
    """GPUs that its tokens are shared by; 0: not known."""


class Replica:
    """One replica's pages."""

    def __init__(self, models: Mapping[str, ServedModel], *, interval: int = 0) -> None:
        """`interval`: nanoseconds between two looks."""
        self._models, self._longest = models, max(LONGEST, 3 * interval)
        self._last: Figures | None = None
        self._at = 0
        self._calm = Calm()
        self.restarts = 0

    def hear(self, figures: Figures, at: int, *, holder: Holder) -> Serving:
        """What the page got at `at` says since the one before; on the first, and after a restart, gauges alone.

        Those have an empty interval: its start is its end. A counter that went back is a restart.
        """
        before, start = self._last, self._at
        self._last, self._at = figures, at
        if before is None or not 0 < at - start <= self._longest or before.engine != figures.engine:
            return _serving(figures, (at, at), holder, {})
        if _went_back(before, figures):
            self.restarts += 1
            self._calm = Calm()
            return _serving(figures, (at, at), holder, {})
        # A series that was not there before began in between, at 0: most are made when they first move.
        grown = {name: value - before.counters.get(name, 0.0) for name, value in figures.counters.items()}
        said = _tokens(grown, figures) | _rest(grown) | self._latencies(before, figures)
        if said.get("flops") is None:
            said["flops"] = self._flops(figures.model, said, holder)
        self._listen_for_calm(said, figures.running, at)
        return _serving(figures, (start, at), holder, said)

    def _latencies(self, before: Figures, now: Figures) -> dict[str, Any]:
        found = {kind: _grown(before, now, kind) for kind in LATENCIES}
        latencies = [one.latency(kind) for kind, one in found.items() if one is not None]
        gaps = found["itl"]
        return {
            "latencies": tuple(one for one in latencies if isinstance(one, Latency)),
            "inter_token_seconds": None if gaps is None else gaps.mean,
        }

    def _flops(self, model: str, said: Mapping[str, Any], holder: Holder) -> float | None:
        """2N a token computed, a GPU; None where the model's size is not configured."""
        served, prompt, made = self._models.get(model), said.get("prompt_tokens"), said.get("generated_tokens")
        if served is None or prompt is None or made is None or not holder.shared:
            return None
        drafted, accepted = said.get("drafted_tokens") or 0.0, said.get("accepted_tokens") or 0.0
        computed = prompt + drafted + max(0.0, made - accepted)
        return float(FLOPS_A_TOKEN * served.active_parameters * computed / holder.shared)

    def _listen_for_calm(self, said: dict[str, Any], running: float | None, at: int) -> None:
        prompt, made = said.get("prompt_tokens"), said.get("generated_tokens") or 0.0
        self._calm.hear(at, running=running, gap=said["inter_token_seconds"], prompt=prompt, made=made)
        said["calm_inter_token_seconds"] = self._calm.gap(running)


def _went_back(before: Figures, now: Figures) -> bool:
    fell = any(now.counters[name] < value for name, value in before.counters.items() if name in now.counters)
    both = ((one, before.histograms.get(kind)) for kind, one in now.histograms.items())
    return fell or any(then is not None and one.count < then.count for one, then in both)


def _grown(before: Figures, now: Figures, kind: str) -> Histogram | None:
    one, then = now.histograms.get(kind), before.histograms.get(kind)
    return one if one is None or then is None else one.since(then)


def _rest(grown: Mapping[str, float]) -> dict[str, Any]:
    """What needs no estimate."""
    return {name: grown.get(name) for name in ("preemptions", "passes", "flops", "bytes")}


def _tokens(grown: Mapping[str, float], now: Figures) -> dict[str, Any]:
    """Tokens by what was done with them."""
    again, prompt = _recomputed(grown, now), grown.get("prefilled")
    if prompt is None and "prompt" in grown:
        # Engines count a prompt once: what is computed again after an eviction comes on top.
        prompt = max(0.0, grown["prompt"] - grown.get("cached", 0.0)) + (again or 0.0)
    drafted, accepted = _drafts(grown, now)
    return {
        "prompt_tokens": prompt,
        "cached_tokens": grown.get("cached"),
        "generated_tokens": grown.get("generated"),
        "recomputed_tokens": None if again is None or prompt is None else min(again, prompt),
        "drafted_tokens": drafted,
        "accepted_tokens": accepted,
    }


def _recomputed(grown: Mapping[str, float], now: Figures) -> float | None:
    """Tokens evicted under a request: as told, else those that a request has on average, at each preemption.

    At the mean preemption half of the answer is there. All of it is computed again unless the prefix cache still has
    it: an upper bound.
    """
    if "evicted" in grown:
        return grown["evicted"]
    preemptions = grown.get("preemptions")
    if not preemptions:
        return preemptions
    lengths, ended = (grown if grown.get("ended") else now.counters).get("lengths"), grown.get("ended")
    ended = ended or now.counters.get("ended")
    return preemptions * lengths / ended if lengths is not None and ended else None


def _drafts(grown: Mapping[str, float], now: Figures) -> tuple[float | None, float | None]:
    """(drafted, accepted) tokens: as told, else by the engine's own means of how long a draft is and how much holds."""
    if "drafted" in grown:
        return grown["drafted"], grown.get("accepted")
    if "accepted" in grown:
        drafted = None if now.draft_length is None else now.draft_length * grown.get("verified", 0.0)
        return drafted, grown["accepted"]
    if now.accept_length is None or not ("verified" in grown or "generated" in grown):
        return None, None
    passes = grown["verified"] if "verified" in grown else grown["generated"] / max(1.0, now.accept_length)
    accepted = passes * max(0.0, now.accept_length - 1)
    if now.draft_length is not None:
        return max(accepted, passes * now.draft_length), accepted
    return (accepted / now.accept_rate if now.accept_rate else None), accepted


def _serving(figures: Figures, interval: tuple[int, int], holder: Holder, said: Mapping[str, Any]) -> Serving:
    return Serving(
        job_id=holder.job_id,
        start=interval[0],
        end=interval[1],
        engine=figures.engine,
        gpus=holder.gpus,
        uuids=holder.uuids,
        running=figures.running,
        waiting=figures.waiting,
        slots=figures.slots,
        kv_use=figures.kv_use,
        **said,
    )
