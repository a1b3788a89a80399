"""The whole core on one screen: an observation goes in, the ledger has moved on.

Owns the order of things: take in the inventory and the owners, refuse what is malformed, attribute, find the
timed states of every GPU, then classify and pour each piece and post it. Two passes, for whether a resting
GPU is a hung job's culprit depends on its siblings. Time nobody saw is a reading too: a distrusted one.
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from operator import attrgetter

from exporter.core.attribution import Part, attribute, divided, use_of
from exporter.core.classification import classify
from exporter.core.evidence import Evidence, weigh
from exporter.core.hearing import attend, hear
from exporter.core.leaks import MEMORY_BOUND, SPEAKS, Span, Taken, pour
from exporter.core.ledger import Gpu, Job, Ledger, amounts, conserved
from exporter.core.model import MS, NEVER, PPM, UNKNOWN_JOB, Allocation, Device, Observation, Owner, Reading, State
from exporter.core.told import AGAIN, MODEL, Voice
from exporter.core.track import Piece, blind, look, pieces

Stretch = tuple[Gpu, Evidence, list[Piece]]
"""A GPU, what its reading proves, and the reading in pieces throughout which nothing changes."""
Hangs = dict[str, list[tuple[int, int]]]
"""Job id -> when any of its GPUs hung."""
_NO_REASON = frozenset({
    "controller_silent", "engine_failed", "listening_failed", "processes_unseen", "reports_failed", "scheduler_failed",
    "scheduler_refused", "unknown_model",
})  # fmt: skip
"""Faults that keep nobody from seeing a GPU."""
UNKNOWN = Owner(UNKNOWN_JOB, name="the scheduler's word is too old to tell")


def advance(ledger: Ledger, observation: Observation) -> None:
    """Move the ledger to `observation`. Never raises on bad figures: it refuses them by name, and counts."""
    if ledger.at is not None and observation.at < ledger.at:
        ledger.refused["clock_step"] += 1
        return
    stretches = _take_in(ledger, observation)
    heard = [(gpu, _heard(ledger, gpu, reading)) for gpu, reading in _timeline(ledger, observation)]
    stretches += [(gpu, ev, _cut(ledger, gpu, ev)) for gpu, ev in heard]
    hangs = _hangs(stretches)
    for gpu, ev, cut in stretches:
        _post(ledger, gpu, ev, _with_culprits(gpu, cut, ev, hangs) if hangs else cut)
    for gpu in ledger.gpus.values():
        if not conserved(gpu.book):
            ledger.conservation_errors += 1
    ledger.evict(observation.at)


def _take_in(ledger: Ledger, observation: Observation) -> list[Stretch]:
    """All but the readings; time that a recut closes for good, as stretches."""
    ledger.at, ledger.wall = observation.at, observation.wall
    ledger.source = observation.source or ledger.source
    for fault in observation.faults:
        ledger.faults[fault.kind] += 1
    ledger.allocations_at = observation.at if observation.allocations_at is None else observation.allocations_at
    if observation.allocations is not None:
        ledger.allocate(observation.allocations)
    closed = [] if observation.devices is None else _take_stock(ledger, observation, observation.devices)
    for report in observation.reports:
        hear(ledger, report, observation.at)
    for serving in observation.serving:
        attend(ledger, serving, observation.at)
    for health in observation.health:
        board = ledger.gpus.get(health.uuid)
        if board is not None:
            board.vitals.hear(health, observation.at, ledger.policy.fatal_xids)
    return closed


def _take_stock(ledger: Ledger, observation: Observation, devices: Iterable[Device]) -> list[Stretch]:
    """The inventory as it stands: what is no longer in it is no longer paid for; its book rests."""
    known: dict[str, list[Gpu]] = {}
    for gpu in ledger.gpus.values():
        known.setdefault(gpu.device.parent or gpu.device.uuid, []).append(gpu)
    listed: dict[str, dict[str, Device]] = {}
    for device in devices:
        listed.setdefault(device.parent or device.uuid, {})[device.uuid] = device
    closed: list[Stretch] = []
    for board in known | listed:
        gpus, parts = known.get(board, []), listed.get(board, {})
        if {gpu.device.uuid: gpu.book.weight for gpu in gpus if gpu.listed} != {u: d.weight for u, d in parts.items()}:
            closed += _recut(ledger, observation, gpus, parts)
        for uuid, device in parts.items():
            ledger.gpus[uuid].device = device
            ledger.gpus[uuid].standard = ledger.standard(device)
    return closed


def _recut(ledger: Ledger, observation: Observation, known: Sequence[Gpu], parts: dict[str, Device]) -> list[Stretch]:
    """A board and its instances are one paid GPU: at one instant what they were ends, and what they are begins.

    It is where the furthest of their books stands, for entries are never reversed; the others are closed up to it.
    """
    until = [gpu.book.until for gpu in known if gpu.listed]
    first = min((_first_moment(ledger, uuid, observation) for uuid in parts), default=NEVER)
    edge = max(until) if until else max([first, *(gpu.book.until for gpu in known)])
    gaps = [(gpu, _gap(gpu, edge, observation)) for gpu in known if gpu.listed and gpu.book.until < edge]
    heard = [(gpu, _heard(ledger, gpu, gap)) for gpu, gap in gaps]
    closed = [(gpu, ev, _cut(ledger, gpu, ev)) for gpu, ev in heard]
    for gpu in known:
        gpu.listed = False
    for uuid, device in parts.items():
        gpu = ledger.gpus.get(uuid) or ledger.gpus.setdefault(uuid, Gpu(device, edge, ledger.standard(device)))
        gpu.book.rest(edge)
        gpu.book.reweigh(device.weight)
        gpu.listed = True
    return closed


def _first_moment(ledger: Ledger, uuid: str, observation: Observation) -> int:
    """A GPU is paid for from the first moment anything is said of it, or from where other books end."""
    if uuid in ledger.edges:
        return ledger.edges[uuid]
    starts = [r.start for r in observation.readings if r.uuid == uuid and not _malformed(r, observation.at)]
    return min([_settled(observation), *starts])


def _settled(observation: Observation) -> int:
    """Up to when nothing more will come, on whole milliseconds."""
    settled = observation.at if observation.settled is None else min(observation.settled, observation.at)
    return settled - settled % MS


def _timeline(ledger: Ledger, observation: Observation) -> Iterator[tuple[Gpu, Reading]]:
    """Acceptable readings in time order, every gap filled with a distrusted reading, up to what is settled."""
    for reading in sorted(observation.readings, key=attrgetter("start")):
        gpu = ledger.gpus.get(reading.uuid)
        wrong = "unknown_gpu" if gpu is None or not gpu.listed else _malformed(reading, observation.at)
        if gpu is None or wrong or reading.start < gpu.book.until:
            (gpu.rejected if gpu is not None and gpu.listed else ledger.refused)[wrong or "overlap"] += 1
            continue
        if reading.start > gpu.book.until:
            yield gpu, _gap(gpu, reading.start, observation)
        gpu.reading, gpu.book.until = reading, reading.end
        yield gpu, reading
    settled = _settled(observation)
    for gpu in ledger.gpus.values():
        if gpu.book.until < settled and gpu.listed:
            yield gpu, _gap(gpu, settled, observation)


def _malformed(reading: Reading, at: int) -> str:
    if reading.start % MS or reading.end % MS or reading.end <= reading.start:
        return "bad_interval"
    return "future" if reading.end > at else ""


def _gap(gpu: Gpu, end: int, observation: Observation) -> Reading:
    """Time no reading covers, with the best reason there is."""
    uuid, start = gpu.device.uuid, gpu.book.until
    whose = (uuid, gpu.device.parent, "")
    kinds = [f.kind for f in observation.faults if f.uuid in whose and f.kind not in _NO_REASON]
    gpu.book.until = end
    return Reading(uuid, start, end, distrust=kinds[0] if kinds else "gap")


def _heard(ledger: Ledger, gpu: Gpu, reading: Reading) -> Evidence:
    """What a reading proves, and what it tells of the board's health."""
    board = ledger.gpus.get(gpu.device.parent, gpu).vitals
    ev = weigh(reading, gpu.device, gpu.standard.policy, power_smoothed=board.power_smoothed)
    for reason in ev.rejected:
        gpu.rejected[reason] += 1
    gpu.vitals.see(ev)
    if board.fatal_since is not None:
        board.outlive(ev, board.fatal_since)
    return ev


def _cut(ledger: Ledger, gpu: Gpu, ev: Evidence) -> list[Piece]:
    """First pass: one reading in pieces throughout which owner, timed states and running minute stay the same."""
    board = ledger.gpus.get(gpu.device.parent, gpu).vitals
    if board.fatal_since is not None:
        ev.condition = ev.condition or board.condition(ev.reading.start)
    cut: list[Piece] = []
    for start, end, holders in _owned(ledger, ev):
        if ev.distrust or holders is None:
            blind(gpu.track, end - start)
            cut.append(Piece(start, end, holders or (), owner_known=holders is not None))
            continue
        if holders is not gpu.track.holders:
            _begin_if_new(gpu, holders, at=start, since=ledger.watched_since)
        look(gpu.track, ev, start, end, gpu.standard.rules)
        cut += pieces(gpu.track, ev, start, end, holders=holders, rules=gpu.standard.rules, policy=gpu.standard.policy)
    if not ev.distrust:
        gpu.seen = ev
    return cut


def _owned(ledger: Ledger, ev: Evidence) -> Sequence[tuple[int, int, tuple[Allocation, ...] | None]]:
    """Attribution as far as the scheduler's word reaches; beyond it the owner is unknown (None), not nobody.

    A GPU with a process, or one that computes, then belongs to somebody; one that rests may be anybody's, but for what
    is left of a board in MIG mode: nobody can use that.
    """
    uuid, start, end = ev.reading.uuid, ev.reading.start, ev.reading.end
    allocations = ledger.allocations.get(uuid, ())
    reach = ledger.allocations_at + ledger.rules.stale
    if end <= reach or ev.device.rest:
        return _sure(ev, attribute(start, end, allocations))
    known_until = max(start, reach - reach % MS)
    parts = attribute(start, known_until, allocations) if start < known_until else []
    nobody_knows = (known_until, end, (Allocation(uuid, UNKNOWN, start=reach),))
    return _sure(ev, [*parts, nobody_knows])


def _sure(ev: Evidence, parts: list[Part]) -> Sequence[tuple[int, int, tuple[Allocation, ...] | None]]:
    """The parts, with None for holders where they may be nobody: the unknown job alone, on a GPU that rests."""
    if ev.reading.processes or ev.runs:
        return parts
    return [
        (start, end, None if len(held) == 1 and held[0].owner.job_id == UNKNOWN_JOB else held)
        for start, end, held in parts
    ]


def _begin_if_new(gpu: Gpu, holders: tuple[Allocation, ...], *, at: int, since: int) -> None:
    track = gpu.track
    if [held.owner.job_id for held in holders] == [held.owner.job_id for held in track.holders]:
        track.learn(holders, gpu.standard.rules)
        return
    if gpu.voices:
        gpu.voices = {name: voice for name, voice in gpu.voices.items() if any(h.owner.job_id == name for h in holders)}
    began_seen = all(gpu.saw_begin(held, since) for held in holders)
    track.begin(holders, at=at, rules=gpu.standard.rules, worked=not began_seen)


def _hangs(stretches: Iterable[Stretch]) -> Hangs:
    hangs: Hangs = {}
    for _, _, cut in stretches:
        for piece in cut:
            if piece.hung:
                for held in piece.holders:
                    hangs.setdefault(held.owner.job_id, []).append((piece.start, piece.end))
    return hangs


def _with_culprits(gpu: Gpu, cut: Iterable[Piece], ev: Evidence, hangs: Hangs) -> Iterator[Piece]:
    """A resting GPU is its job's culprit while a sibling hangs: cut its pieces where that begins and ends.

    One that copies its state to the host rests for a good reason: the others wait for a checkpoint.
    """
    saves = (ev.pcie_tx or 0.0) >= gpu.standard.policy.checkpoint_pcie_bytes_per_second
    for piece in cut:
        spans = [span for held in piece.holders for span in hangs.get(held.owner.job_id, ())]
        if ev.distrust or ev.runs or saves or not spans:
            yield piece
            continue
        inside = sorted({t for span in spans for t in span if piece.start < t < piece.end})
        edges = [piece.start, *inside, piece.end]
        for a, b in pairwise(edges):
            culprit = any(start <= a and b <= end for start, end in spans)
            yield piece.between(a, b, culprit=culprit)


def _post(ledger: Ledger, gpu: Gpu, ev: Evidence, cut: Iterable[Piece]) -> None:
    """Second pass: classify and pour every piece of one reading, and post it to both books."""
    for piece in cut:
        state, reason = classify(ev, piece)
        if state is not gpu.state:
            gpu.state, gpu.since = state, piece.start
            ledger.entries[state] += 1
        gpu.reason, gpu.holders = reason, piece.holders
        ms = (piece.end - piece.start) // MS
        if state is State.UNOBSERVED:
            gpu.unobserved[reason] += ms * ev.device.weight
        said = amounts(ev, ms)
        gpu.book.observe(said)
        for held, share, whole, taken in _poured(ledger, gpu, ev, piece, state):
            gpu.book.post(taken, whole, ms, ev)
            if held is None:
                gpu.book.post_unheld(taken, ms)
                continue
            job = ledger.jobs.get(held.owner.job_id) or _open(ledger, gpu, held, piece.start)
            job.book.post(taken, whole, ms, ev)
            job.saw(ev, piece.end, ms, said if share == PPM else amounts(ev, ms, share))
            _tell(job, gpu, ev, piece, taken)
    if gpu.book.until >= gpu.book.next_mark:
        gpu.book.mark()


def _tell(job: Job, gpu: Gpu, ev: Evidence, piece: Piece, taken: Taken) -> None:
    """What a piece shows of its owner beside the books: its need, its first work, what drafts would have saved."""
    if job.need is not None and len(piece.holders) == 1 and ev.device.weight == PPM:
        job.need.see(ev, piece.start, piece.end, owner=job.owner, policy=gpu.standard.policy)
    if job.awaits_work and ev.runs and not ev.distrust:
        job.first_work, job.awaits_work = piece.start - job.start, False
    voice = gpu.voices.get(job.owner.job_id) if gpu.voices else None
    if voice is not None and voice.shares.undrafted and job.service is not None:
        slow = sum(ppm for index, ppm in taken if index == MEMORY_BOUND)
        job.service.undrafted += round(slow * gpu.standard.policy.draft_gain_share) * (piece.end - piece.start) // MS


def _open(ledger: Ledger, gpu: Gpu, held: Allocation, start: int) -> Job:
    """A new job; one that held the GPU before it was watched may have worked already."""
    return ledger.open(held, start, awaits_work=gpu.saw_begin(held, ledger.watched_since))


def _poured(
    ledger: Ledger, gpu: Gpu, ev: Evidence, piece: Piece, state: State
) -> list[tuple[Allocation | None, int, int, Taken]]:
    """Each owner, its ppm of what ran, its ppm of the GPU, and where those went. Owners split the pools first.

    The waiting is split equally, for all hold the GPU; the rest by the SM time of their processes where it is told.
    """
    policy, whole = gpu.standard.policy, ev.device.weight
    pools = [ev.wait, ev.slack, ev.clock_loss, ev.pure, ev.unresolved]
    if whole != PPM:
        pools = _scaled(pools, whole)
    count = len(piece.holders)
    if count == 0:
        return [(None, PPM, whole, pour(Span(ev, state, policy, pools, whole)))]
    if count == 1:
        held = piece.holders[0]
        span = Span(ev, state, policy, pools, whole, held.gpus, held.restarts, piece.signs)
        if gpu.voices:
            _listen(span, gpu.voices.get(held.owner.job_id), piece)
        job = ledger.jobs.get(held.owner.job_id) if held.gpus == 1 and whole == PPM else None
        if job is not None and job.need is not None and job.need.fitting is not None:
            span.surplus = PPM - job.need.fitting.compute
        return [(held, PPM, whole, pour(span))]
    equal = [1] * count
    use = use_of(ev.reading.processes, piece.holders)
    gpu.shared["equal" if use is None else "sm"] += piece.end - piece.start
    split = [divided(pools[0], equal), *(divided(pool, use or equal) for pool in pools[1:])]
    ran = divided(PPM, use or equal)
    shares: list[tuple[Allocation | None, int, int, Taken]] = []
    for rank, held in enumerate(piece.holders):
        own = [parts[rank] for parts in split]
        span = Span(ev, state, policy, own, sum(own), held.gpus, held.restarts, piece.signs)
        if gpu.voices:
            _listen(span, gpu.voices.get(held.owner.job_id), piece)
        shares.append((held, ran[rank], span.whole, pour(span)))
    return shares


def _listen(span: Span, voice: Voice | None, piece: Piece) -> None:
    """Let the owner speak for its span, if it has said anything that still holds."""
    weight = span.ev.device.weight
    seen = span.state is not State.UNOBSERVED
    if voice is None or not voice.listen(piece.start, piece.end, weight, seen=seen):
        return
    span.voice, span.ms, span.signs = voice, (piece.end - piece.start) // MS, span.signs | {SPEAKS}
    if voice.judges(piece.start, piece.end):
        span.model = voice.can(MODEL, span.ms) + voice.can(AGAIN, span.ms)


def _scaled(pools: list[int], weight: int) -> list[int]:
    """The pools of a part of a GPU: they add up to `weight` as the whole ones add up to PPM."""
    return divided(weight, pools)
