"""What is known of one row: in a few lines below the list, and on a page of its own.

Owns these lines, the most telling first: what it does and whose it is, where its time went, and what to do about each
leak; then what the workload says of itself, its GPUs, its health, its whole time.
"""

from textwrap import wrap

from exporter.top.answers import Gpu, Health, Owner, Part, Window
from exporter.top.drawn import Line, Piece, fitted, line
from exporter.top.head import bar
from exporter.top.rows import Row, held_by
from exporter.top.seen import View
from exporter.top.signs import Signs, cells, padded
from exporter.top.words import FIX, LAYER, WINDOWS, brief, gibibytes, percent, plain, ranges, share
from exporter.top.workload import full_word

_ACTIONS = {1: "reset this GPU", 2: "reboot the node", 3: "drain peers", 4: "drain, then reset this GPU"}
"""NVML's recovery actions."""
_INDENT = 2
_LEAST_FIX = 24
"""Columns below which what to do has a line of its own."""
_WIDE = 100
"""Columns from which on a leak has its seconds beside its share."""
_WALL, _HOUR = 1e9, 3600
_LAYERS = (("gau", "allocated"), ("ectr", "computing"), ("emfu", "useful"))


def gist(row: Row, view: View, window: str, width: int) -> list[Line]:
    """The row in a few lines, as long as there are leaks to name."""
    lines = [_title(row, view), _bar(row.window, WINDOWS[window], width, view.signs)]
    lines += leaks(row.window, view.signs, width, full=False)
    return [fitted(one, width, view.signs) for one in lines]


def page(row: Row, view: View, window: str, width: int) -> list[Line]:
    """All that is known of the row."""
    lines = [_title(row, view), line()]
    for name, said in WINDOWS.items():
        lines.append(_equation(getattr(row.gpu or row.job, name), said, view.signs))
    lines += [line(), _bar(row.window, WINDOWS[window], width, view.signs), line()]
    lines += leaks(row.window, view.signs, width, full=True)
    lines += _of_gpu(row, view, width) if row.gpu else _of_job(row, view, width)
    return [fitted(one, width, view.signs) for one in lines]


def _title(row: Row, view: View) -> Line:
    name = view.signs.name
    if row.gpu:
        what = f"GPU {row.gpu.index or row.gpu.uuid}"
        whose = "; ".join(map(_held, row.owners[:3])) or "nobody has it"
    else:
        what = f"job {row.owner.job_id}"
        whose = _of(row.owner)
    where = f" on {row.node}" if view.many or row.job else ""
    doing = name(_doing(row)), "" if row.live else "bad"
    return line(f" {name(what)}", where, ": ", doing, (f"  {name(whose)}", "soft"))


def _doing(row: Row) -> str:
    """What it does, and since when."""
    if not row.live:
        return f"was {row.state} when it was last seen"
    if row.gpu is None:
        held = f"{len(row.states)} GPU{'s' if len(row.states) != 1 else ''} here, " if row.states else ""
        return f"{held}{'a hang is suspected' if row.suspect else row.state}, began {brief(row.since)} ago"
    suspected = ""
    if row.suspect:
        sure = row.gpu.hang_confidence
        suspected = f", a hang is suspected{f' ({share(sure)} % of its signs)' if sure is not None else ''}"
    return f"{row.state} for {brief(row.since)}, {plain(row.gpu.reason)}{suspected}"


def _held(owner: Owner) -> str:
    return f"job {owner.job_id}{f' {owner.name}' if owner.name else ''}{f' of {owner.who}' if owner.who else ''}"


def _of(owner: Owner) -> str:
    said = (owner.name, f"of {owner.who}" if owner.who else "", owner.account, owner.partition, owner.workload_class)
    return ", ".join(dict.fromkeys(word for word in said if word))


def _equation(said: Window, about: str, signs: Signs) -> Line:
    figures = f" {signs.times} ".join(f"{percent(said, layer):>5} {word}" for layer, word in _LAYERS)
    pieces: list[Piece] = [(f" {about:5}  {figures} = ", ""), (f"{percent(said, 'product'):>5}", "strong")]
    return line(*pieces, (f"  SMI {percent(said, 'driver_utilization')}", "soft"))


def _bar(said: Window, about: str, width: int, signs: Signs) -> Line:
    label = f" {about:5}  "
    return line((label, "soft"), *bar(said, max(0, width - len(label) - 1), signs))


def leaks(said: Window, signs: Signs, width: int, *, full: bool) -> list[Line]:
    """Each part that is not useful, the largest first, with what to do about it."""
    parts = said.parts()
    widest = max((cells(signs.name(plain(name))) for name, _ in parts), default=0)
    lines = []
    for name, part in parts:
        seconds = f"{brief(part * said.seconds):>6}  " if width >= _WIDE else ""
        begin = f" {share(part):>4} %  {seconds}"
        about = padded(signs.name(plain(name)), widest)
        room = width - len(begin) - widest - 3
        fix = FIX.get(name, "")
        first, *rest = wrap(fix, room) if full and fix and room >= _LEAST_FIX else [fix]
        lines.append(line(begin, (about, LAYER.get(name, "")), f"  {first}"))
        lines += [line(" " * (len(begin) + widest + 2), more) for more in rest]
    return lines


def _of_gpu(row: Row, view: View, width: int) -> list[Line]:
    gpu = row.gpu
    if gpu is None:
        return []
    facts = [
        ("model", f"MIG {gpu.profile} of {gpu.model}" if gpu.parent else gpu.model),
        ("UUID", gpu.uuid),
        *([("now", _now(gpu))] if row.live and _now(gpu) else []),
        *(("held by", _held(owner)) for owner in row.owners),
        *([("hang", _signs(gpu))] if gpu.hang_signs else []),
        *([("health", told)] if (told := _complaints(gpu.health)) else []),
    ]
    return _facts(facts, view.signs, width)


def _now(gpu: Gpu) -> str:
    watts, limit, celsius = gpu.power_watts, gpu.power_limit_watts, gpu.temperature_celsius
    said = [
        f"{watts:.0f}{f' of {limit:.0f}' if limit else ''} W" if watts is not None else "",
        f"{celsius:.0f} degrees Celsius" if celsius is not None else "",
        f"{gibibytes(gpu.memory_used_bytes, gpu.memory_total_bytes)} GiB" if gpu.memory_used_bytes is not None else "",
    ]
    return ", ".join(filter(None, said))


def _signs(gpu: Gpu) -> str:
    return ", ".join(
        f"{plain(sign)} speaks {'for' if speaks else 'against'} it" for sign, speaks in gpu.hang_signs.items()
    )


def _complaints(health: Health) -> str:
    action = health.recovery_action
    held_down = {why: seconds for why, seconds in health.clock_limited_seconds.items() if seconds > 0}
    found = [
        f"Xid {health.last_xid}" if health.last_xid else "",
        f"the driver asks: {_ACTIONS.get(action, 'see NVML')}" if action else "",
        f"{health.ecc_uncorrected} uncorrected ECC errors" if health.ecc_uncorrected else "",
        "a row remap failed: replace the board" if health.row_remap_failed else "",
        "a row remap waits for a reset" if health.row_remap_pending else "",
        *(f"clock held down {brief(seconds)} by {plain(why)}" for why, seconds in held_down.items()),
    ]
    return "; ".join(filter(None, found))


def _of_job(row: Row, view: View, width: int) -> list[Line]:
    job = row.job
    if job is None:
        return []
    waited, paid, useful = job.first_work_seconds, job.paid_seconds / _HOUR, job.useful_seconds / _HOUR
    facts = [
        *full_word(job),
        ("GPUs", _gpus(row)),
        ("in all", f"{paid:.1f} GPU-hours here, of them {useful:.1f} useful; {job.energy_joules / 3.6e6:.1f} kWh"),
        *([("first work", f"{brief(waited)} after it was given its GPUs")] if waited is not None else []),
        *_elsewhere(row, view),
        *_whole(row),
    ]
    return _facts(facts, view.signs, width)


def _gpus(row: Row) -> str:
    by_state: dict[str, list[str]] = {}
    for gpu in held_by(row.owner.job_id, row.seen):
        by_state.setdefault(gpu.state, []).append(gpu.index or gpu.uuid)
    was = "" if row.live else "was "
    return ", ".join(f"{ranges(indices)} {was}{state}" for state, indices in by_state.items()) or "none any more"


def _elsewhere(row: Row, view: View) -> list[tuple[str, str]]:
    """The job's parts on the other nodes that are watched."""
    found = []
    for name, seen in zip(view.names, view.nodes, strict=True):
        jobs = [] if seen is row.seen or seen.jobs is None else seen.jobs.jobs
        for job in (job for job in jobs if job.owner.job_id == row.owner.job_id):
            old = "" if seen.live else " (old)"
            told = f"{ranges(job.gpus) or 'ended'}, got {percent(job.last_5_minutes, 'product')} in the last 5 min{old}"
            found.append((f"on {name}", told))
    return found


def _whole(row: Row) -> list[tuple[str, str]]:
    """What the node's receipts of the job say, one a life of its books."""
    parts = row.seen.receipts.receipts if row.seen.receipts else []
    return [("receipt", _receipt(part)) for part in parts]


def _receipt(part: Part) -> str:
    lost = sorted(((name, value) for name, value in part.parts.items() if name != "useful"), key=lambda pair: -pair[1])
    paid = part.paid or 1
    said = [
        f"{part.paid / _WALL / _HOUR:.1f} GPU-hours",
        *(f"{value:,.2f} {currency}" for currency, value in part.money.items()),
        f"useful {share(part.parts.get('useful', 0) / paid)} %",
        *(f"{plain(name)} {share(value / paid)} %" for name, value in lost[:3]),
        *(f"{plain(kind)} {times} times" for kind, times in part.happened.items() if times),
    ]
    return ", ".join(said)


def _facts(facts: list[tuple[str, str]], signs: Signs, width: int) -> list[Line]:
    """Two columns: what, and the words for it, on as many lines as they need."""
    widest = max((cells(signs.name(what)) for what, _ in facts), default=0)
    room = max(_LEAST_FIX, width - widest - 2 * _INDENT)
    lines = [line()]
    for what, told in facts:
        first, *rest = wrap(signs.name(told), room) or [""]
        lines.append(line((f" {padded(signs.name(what), widest)}  ", "soft"), first))
        lines += [line(" " * (widest + 3), more) for more in rest]
    return lines
