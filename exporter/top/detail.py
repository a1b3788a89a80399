"""Renders the header of each node, and the details of one row as a summary or as a page.

Lines may be wider than the terminal: `screen` truncates them.
"""

from collections.abc import Sequence
from textwrap import wrap

from exporter.core.hangs import HUNG, describe_hang, hang_advice, hang_cost
from exporter.core.job_record import JobRecord
from exporter.core.prices import JOULES_PER_KWH
from exporter.formatting import (
    HOUR,
    co2,
    gibibytes,
    readable_name,
    share,
    short_duration,
    time_of_day,
)
from exporter.top.columns import ListRow, gpus_of_job, serving_facts, shown_id, training_facts
from exporter.top.view import (
    FIX_BY_LEAK,
    WINDOWS,
    Glyphs,
    PolledNode,
    StyledLine,
    StyledText,
    TopView,
    amounts,
    cell_width,
    contact,
    hourly_loss,
    index_ranges,
    justify_line,
    known_losses,
    lost_share,
    merge_segments,
    pad,
    percent,
    styled_line,
    truncate,
)
from exporter.web.api import GpuOut, GpusOut, HealthOut, JobOut, OwnerOut, WindowOut
from exporter.web.spans import SpanOut
from exporter.web.summary import LAYER_BY_LEAK, health_problems

_NODE_BAR_WIDTH = 24
_SHOWN_HANGS = 2
_LAYERS = (("gau", "allocated"), ("ectr", "computing"), ("emfu", "useful"))
_WAITING = "waiting for the first response ..."


def page_title(node: PolledNode, name: str, more: str, view: TopView, *, width: int) -> StyledLine:
    """Build the first line of a page."""
    return justify_line([(f" {name}", "strong")], [(more, "soft"), *_status_segments(node, view)], width, view.glyphs)


def header_lines(view: TopView, window: str, width: int, *, height: int) -> list[StyledLine]:
    """Build the lines at the top of the screen, at most `height` of them."""
    if view.has_many_nodes:
        return _all_nodes_lines(view, window, width, height)
    return _single_node_lines(view.nodes[0], view, window, width)[: max(1, height)]


def hang_lines(view: TopView, width: int) -> list[StyledLine]:
    """Build the lines about jobs that hang now, the oldest first: what hangs since when, and what to do."""
    found = sorted(
        ((name, node, job) for name, node in zip(view.names, view.nodes, strict=True) for job in _hung_jobs(node)),
        key=lambda each: (each[2].hang.since if each[2].hang else 0.0, each[0]),
    )
    lines: list[StyledLine] = []
    for name, node, job in found[:_SHOWN_HANGS]:
        whose = f"{_describe_owner(job.owner)}{f' on {name}' if view.has_many_nodes else ''}"
        lines += _wrapped_hang(job, node, view, width, whose=f": {whose}")
    if more := len(found) - _SHOWN_HANGS:
        lines += [styled_line((f" and {more} more", HUNG))] if more > 0 else []
    return lines


def _hung_jobs(node: PolledNode) -> list[JobOut]:
    return [job for job in node.jobs.jobs if job.hang] if node.jobs and node.live else []


def _wrapped_hang(job: JobOut, node: PolledNode, view: TopView, width: int, *, whose: str = "") -> list[StyledLine]:
    """Wrap what hangs, since when, what it has cost, and what to do."""
    hang = job.hang
    if hang is None or node.jobs is None:
        return []
    lasts = node.jobs.node.sampled_at + node.seconds_since_sample(view.now) - hang.since
    text = view.glyphs.printable(
        f"Hung since {time_of_day(hang.since)} ({short_duration(lasts)}){whose}: {describe_hang(hang)}."
        f" {hang_advice(hang)} {hang_cost(hang.seconds / HOUR, hang.unconfirmed_seconds / HOUR)}."
    )
    return [
        styled_line((f" {line}", HUNG))
        for line in wrap(text, max(_MIN_FIX_WIDTH, width - _INDENT), break_on_hyphens=False)
    ]


def _single_node_lines(node: PolledNode, view: TopView, window: str, width: int) -> list[StyledLine]:
    glyphs, problem = view.glyphs, view.glyphs.printable(node.problem_text(view.now))
    left: list[StyledText | str] = [(f" {view.names[0]}", "strong")]
    if node.gpus is None:
        waiting = styled_line((f" {problem or _WAITING}", "bad" if problem else "soft"))
        return [justify_line(left, [_clock(view)], width, glyphs), waiting]
    usage: WindowOut = getattr(node.gpus.node, window)
    last_error = node.gpus.node.last_error
    lines = [
        justify_line([*left, f"  {_describe_gpus(node.gpus, glyphs)}"], _status_segments(node, view), width, glyphs),
        *([styled_line((f" {problem}", "bad"))] if problem else []),
        styled_line(" ", *_equation(usage, glyphs), *_utilization_segments(usage)),
        styled_line(" ", *usage_bar(usage, width - 2, glyphs)),
        styled_line(" ", *_loss_segments(node, window, glyphs)),
    ]
    if last_error and not problem:
        lines.append(styled_line((f" last error: {glyphs.printable(last_error)}", "bad")))
    return lines


def _status_segments(node: PolledNode, view: TopView) -> list[StyledText | str]:
    """Return warnings (simulated, old values) and the time."""
    simulated: list[StyledText | str] = [("SIMULATED  ", "bad")] if node.node and node.node.simulated else []
    old: list[StyledText | str] = [] if node.live else [("OLD  ", "bad")]
    return [*simulated, *old, _clock(view)]


def _clock(view: TopView) -> StyledText:
    return time_of_day(view.wall) + " ", "soft"


def _describe_gpus(gpus: GpusOut, glyphs: Glyphs) -> str:
    models = {gpu.model.removeprefix("NVIDIA ") for gpu in gpus.gpus}
    count = len(gpus.gpus)
    kind = f" {models.pop()}" if len(models) == 1 else ""
    return glyphs.printable(f"{count} GPU{'s' if count != 1 else ''}{f' {glyphs.dot}{kind}' if kind else ''}")


def _equation(usage: WindowOut, glyphs: Glyphs, *, labels: bool = True, width: int = 0) -> list[StyledText]:
    """Write the layers as a product, each in at least `width` columns: 75 % allocated x 67 % computing x ..."""
    factors = (f"{percent(usage, layer):>{width}}{f' {label}' if labels else ''}" for layer, label in _LAYERS)
    product = f"{percent(usage, 'product'):>{width}}"
    return [(f" {glyphs.times} ".join(factors) + " = ", ""), (product, "strong")]


def _utilization_segments(usage: WindowOut) -> list[StyledText]:
    coverage = usage.coverage
    unseen = coverage is not None and coverage < 1
    return [
        (f"   nvidia-smi {percent(usage, 'driver_utilization')}", "soft"),
        (f"   {share(1 - (coverage or 0))} % unobserved" if unseen else "", "bad"),
    ]


def _loss_segments(node: PolledNode, window: str, glyphs: Glyphs) -> list[StyledText]:
    usage: WindowOut = getattr(node.node, window)
    losses = known_losses(usage)
    if not losses:
        return [(_no_losses(usage), "soft")]
    named: list[StyledText] = [
        (f"{share(lost_share(usage))} % of the money leaks{_loss_of_money(node, window)}: ", "strong")
    ]
    for index, (name, part) in enumerate(losses):
        comma = ", " if index else ""
        named += [
            (comma, ""),
            (f"{share(part)} % {glyphs.printable(readable_name(name))}", LAYER_BY_LEAK.get(name, "")),
        ]
    return named


def _loss_of_money(node: PolledNode, window: str) -> str:
    """Return the money lost per hour and its price; empty if prices are not known."""
    lost = hourly_loss(node.accounts, window) if node.accounts else None
    return "" if lost is None else f", {lost[0]:,.2f} of {lost[1]:,.2f} {lost[2]} per hour"


def _no_losses(usage: WindowOut) -> str:
    """Describe a window without losses; what was not observed, as before a restart, may have had some."""
    if not usage.seconds:
        return "no time yet"
    if not usage.coverage:
        return "nothing was observed"
    return "nothing leaks" if usage.coverage >= 1 else f"nothing leaks of the {share(usage.coverage)} % observed"


def usage_bar(usage: WindowOut, width: int, glyphs: Glyphs) -> list[StyledText]:
    """Draw a stacked bar of the window's time, useful work first, exactly `width` columns wide."""
    sums = dict.fromkeys(glyphs.fills, 0.0)
    for name, seconds in usage.leaks.items():
        sums[LAYER_BY_LEAK.get(name, "unresolved")] += seconds
    whole = sum(sums.values())
    if not usage.seconds or not whole or width <= 0:
        return [(glyphs.rule * max(0, width), "soft")]
    segments, upto, filled = list[StyledText](), 0.0, 0
    for layer, part in sums.items():
        upto += part
        end = round(width * upto / whole)
        segments.append((glyphs.fills[layer] * (end - filled), layer))
        filled = end
    return segments


def _all_nodes_lines(view: TopView, window: str, width: int, height: int) -> list[StyledLine]:
    glyphs, count = view.glyphs, sum(len(node.gpus.gpus) for node in view.nodes if node.gpus)
    failing = sum(1 for node in view.nodes if node.problem)
    left: list[StyledText | str] = [(f" {len(view.nodes)} nodes", "strong"), f"  {count} GPUs"]
    if failing:
        left.append((f"   {failing} NOT RESPONDING", "bad"))
    lines = [justify_line(left, [_clock(view)], width, glyphs)]
    room = max(1, height - 1)
    shown = len(view.nodes) if len(view.nodes) <= room else room - 1
    failing_first = sorted(range(len(view.nodes)), key=lambda index: not view.nodes[index].problem)
    widest = min(24, max(cell_width(name) for name in view.names))
    for index in sorted(failing_first[:shown]):
        name = pad(truncate(view.names[index], widest, glyphs), widest)
        lines.append(styled_line(f" {name}  ", *_node_segments(view.nodes[index], view, window, width - widest)))
    if shown < len(view.nodes):
        lines.append(styled_line((f" and {len(view.nodes) - shown} more nodes", "soft")))
    return lines


def _node_segments(node: PolledNode, view: TopView, window: str, width: int) -> list[StyledText | str]:
    """Summarize one node in one line."""
    glyphs = view.glyphs
    if node.problem or node.gpus is None:
        problem = glyphs.printable(node.problem_text(view.now)) or _WAITING
        return [(problem, "bad" if node.problem else "soft")]
    usage: WindowOut = getattr(node.gpus.node, window)
    equation = _equation(usage, glyphs, labels=False, width=5)
    simulated = ("SIMULATED  ", "bad") if node.gpus.node.simulated else ("", "")
    room = width - len(equation[0][0]) - len(simulated[0]) - 12
    bar = usage_bar(usage, min(_NODE_BAR_WIDTH, room), glyphs) if room > 8 else []  # noqa: PLR2004  too short to be legible
    return [*equation, ("  ", "strong"), simulated, *bar, "  ", *_loss_segments(node, window, glyphs)]


_INDENT = 2
_MIN_FIX_WIDTH = 24
"""Width below which the remedy of a leak is not wrapped."""
_WIDE_SCREEN = 100
"""Width from which on a leak has its duration beside its share."""
_NANOSECONDS = 1e9
_STRIP = (" 1 h ago ", " now ")
"""Beside the strip of the last hour."""


def row_summary(row: ListRow, view: TopView, window: str, width: int) -> list[StyledLine]:
    """Summarize the row: title, bar, and a line per leak."""
    bar = _labelled_bar(row.window, WINDOWS[window], width, view.glyphs)
    return [_row_title(row, view), bar, *leak_lines(row.losses, row.window, view.glyphs, width, full=False)]


def row_page(row: ListRow, view: TopView, window: str, width: int) -> list[StyledLine]:
    """Render all details of the row."""
    return [
        _row_title(row, view),
        *_row_hang(row, view, width),
        styled_line(),
        *(_product_line(getattr(row.gpu or row.job, name), label, view.glyphs) for name, label in WINDOWS.items()),
        styled_line(),
        _labelled_bar(row.window, WINDOWS[window], width, view.glyphs),
        *([_hour_strip(row.gpu.hour, row.polled, width, view.glyphs)] if row.gpu and row.gpu.hour else []),
        styled_line(),
        *leak_lines(row.losses, row.window, view.glyphs, width, full=True),
        *(_gpu_lines(row.gpu, row, view, width=width) if row.gpu else _job_lines(row, view, width)),
    ]


def _row_hang(row: ListRow, view: TopView, width: int) -> list[StyledLine]:
    """Build the lines about the hang of the row's job; none if it does not hang."""
    ids = {owner.job_id for owner in row.owners} if row.hangs else set[str]()
    hung = (job for job in _hung_jobs(row.polled) if job.owner.job_id in ids)
    return [line for job in hung for line in _wrapped_hang(job, row.polled, view, width)]


def _row_title(row: ListRow, view: TopView) -> StyledLine:
    name = view.glyphs.printable
    if row.gpu:
        what = f"GPU {row.gpu.index or row.gpu.uuid}"
        owner = "; ".join(map(_describe_owner, row.owners[:3])) or "no owner"
    else:
        what = f"job {shown_id(row.owner)}"
        owner = _owner_details(row.owner)
    where = f" on {row.node}" if view.has_many_nodes or row.job else ""
    activity = name(_activity(row)), "" if row.live else "bad"
    return styled_line(f" {name(what)}", where, ": ", activity, (f"  {name(owner)}", "soft"))


def _activity(row: ListRow) -> str:
    """Describe the state and its duration."""
    if not row.live:
        return f"was {row.state} when last observed"
    if row.gpu is None:
        held = f"{len(row.states)} GPU{'s' if len(row.states) != 1 else ''} here, " if row.states else ""
        return f"{held}{'hang suspected' if row.suspect else row.state}, started {short_duration(row.since)} ago"
    suspected = ""
    if row.suspect:
        confidence = row.gpu.hang_confidence
        suspected = f", hang suspected{f' ({share(confidence)} % of indicators)' if confidence is not None else ''}"
    return f"{row.state} for {short_duration(row.since)}, {readable_name(row.gpu.reason)}{suspected}"


def _describe_owner(owner: OwnerOut) -> str:
    of = f" of {contact(owner)}" if contact(owner) else ""
    return f"job {shown_id(owner)}{f' {owner.name}' if owner.name else ''}{of}"


def _owner_details(owner: OwnerOut) -> str:
    fields = (
        owner.name,
        f"of {contact(owner)}" if contact(owner) else "",
        owner.account,
        owner.partition,
        owner.workload_class,
    )
    return ", ".join(dict.fromkeys(field for field in fields if field))


def _product_line(usage: WindowOut, about: str, glyphs: Glyphs) -> StyledLine:
    equation = _equation(usage, glyphs, width=5)
    return styled_line(f" {about:5}  ", *equation, (f"  SMI {percent(usage, 'driver_utilization')}", "soft"))


def _labelled_bar(usage: WindowOut, about: str, width: int, glyphs: Glyphs) -> StyledLine:
    label = f" {about:5}  "
    return styled_line((label, "soft"), *usage_bar(usage, max(0, width - len(label) - 1), glyphs))


def _hour_strip(spans: Sequence[SpanOut], node: PolledNode, width: int, glyphs: Glyphs) -> StyledLine:
    """Draw what each part of the last hour went to, from an hour ago to the node's newest sample."""
    end = node.node.sampled_at if node.node else spans[-1].end
    room = max(1, width - len(_STRIP[0]) - len(_STRIP[1]))
    segments: list[StyledText] = []
    for column in range(room):
        at = end - HOUR * (room - column - 0.5) / room
        outcome = next((span.outcome for span in spans if span.start <= at < span.end), "")
        layer = LAYER_BY_LEAK.get(outcome, "")
        segments.append((glyphs.fills.get(layer, " "), layer))
    return styled_line((_STRIP[0], "soft"), *merge_segments(segments), (_STRIP[1], "soft"))


def _last_changes(spans: Sequence[SpanOut]) -> str:
    """Name what the GPU's time went to lately, the latest first."""
    latest = [f"{readable_name(span.outcome)} since {time_of_day(span.start)}" for span in spans[:-4:-1]]
    return ", before ".join(latest)


def leak_lines(
    parts: Sequence[tuple[str, float]], usage: WindowOut, glyphs: Glyphs, width: int, *, full: bool
) -> list[StyledLine]:
    """List outcomes with their shares of `usage` and their remedies; `full` wraps long remedies."""
    widest = max((cell_width(glyphs.printable(readable_name(name))) for name, _ in parts), default=0)
    lines = []
    for name, part in parts:
        seconds = f"{short_duration(part * usage.seconds):>6}  " if width >= _WIDE_SCREEN else ""
        begin = f" {share(part):>4} %  {seconds}"
        about = pad(glyphs.printable(readable_name(name)), widest)
        room = width - len(begin) - widest - 3
        fix = FIX_BY_LEAK.get(name, "")
        first, *rest = wrap(fix, room) if full and fix and room >= _MIN_FIX_WIDTH else [fix]
        lines.append(styled_line(begin, (about, LAYER_BY_LEAK.get(name, "")), f"  {first}"))
        lines += [styled_line(" " * (len(begin) + widest + 2), more) for more in rest]
    return lines


def _gpu_lines(gpu: GpuOut, row: ListRow, view: TopView, *, width: int) -> list[StyledLine]:
    facts = [
        ("model", f"MIG {gpu.profile} of {gpu.model}" if gpu.parent else gpu.model),
        ("UUID", gpu.uuid),
        *([("now", _gpu_readings(gpu))] if row.live and _gpu_readings(gpu) else []),
        *(("held by", _describe_owner(owner)) for owner in row.owners),
        *([("last hour", _last_changes(gpu.hour))] if gpu.hour else []),
        *([("pids", ", ".join(map(str, gpu.pids)))] if gpu.pids else []),
        *([("hang", _hang_indicators(gpu))] if gpu.hang_signs else []),
        *([("health", problems)] if (problems := _health(gpu.health)) else []),
    ]
    return _fact_lines(facts, view.glyphs, width)


def _gpu_readings(gpu: GpuOut) -> str:
    watts, limit, celsius = gpu.power_watts, gpu.power_limit_watts, gpu.temperature_celsius
    readings = [
        f"{watts:.0f}{f' of {limit:.0f}' if limit else ''} W" if watts is not None else "",
        f"{celsius:.0f} degrees Celsius" if celsius is not None else "",
        f"{gibibytes(gpu.memory_used_bytes, gpu.memory_total_bytes)} GiB" if gpu.memory_used_bytes is not None else "",
    ]
    return ", ".join(filter(None, readings))


def _hang_indicators(gpu: GpuOut) -> str:
    return ", ".join(
        f"{readable_name(indicator)} {'supports' if supports else 'contradicts'} it"
        for indicator, supports in gpu.hang_signs.items()
    )


def _health(health: HealthOut) -> str:
    throttled = [
        f"clock throttled {short_duration(seconds)} by {readable_name(reason)}"
        for reason, seconds in health.clock_limited_seconds.items()
        if seconds > 0
    ]
    return "; ".join(filter(None, (health_problems(health), *throttled)))


def _job_lines(row: ListRow, view: TopView, width: int) -> list[StyledLine]:
    job = row.job
    if job is None:
        return []
    waited, paid, useful = job.first_work_seconds, job.paid_seconds / HOUR, job.useful_seconds / HOUR
    facts = [
        *([("waits for", job.hang_culprit.text)] if job.hang_culprit else []),
        *_workload_facts(job),
        ("GPUs", _gpus_by_state(row)),
        *([("pids", pids)] if (pids := _job_pids(row)) else []),
        ("total", f"{paid:.1f} GPU-hours here, {useful:.1f} useful; {_energy_facts(job)}"),
        *([("first work", f"{short_duration(waited)} after allocation")] if waited is not None else []),
        *_other_nodes(row, view),
        *_records(row),
    ]
    return _fact_lines(facts, view.glyphs, width)


def _energy_facts(job: JobOut) -> str:
    price = f" for {amounts(job.energy_money)}" if job.energy_money else ""
    carbon = "" if job.co2_grams is None else f", {co2(job.co2_grams)}"
    return f"{job.energy_joules / JOULES_PER_KWH:.1f} kWh{price}{carbon}"


def _workload_facts(job: JobOut) -> list[tuple[str, str]]:
    """List all values that the workload reports, by reporter."""
    phases = job.training.phase_seconds if job.training else {}
    engine = (job.serving.engine if job.serving else "") or "serving"
    rows = [
        ("training", ", ".join(training_facts(job.training))),
        ("phases", _phases(phases)),
        (engine, ", ".join(serving_facts(job.serving))),
    ]
    return [row for row in rows if row[1]]


def _phases(seconds: dict[str, float]) -> str:
    whole = sum(seconds.values()) or 1.0
    ordered = sorted(seconds.items(), key=lambda pair: -pair[1])
    return ", ".join(f"{readable_name(phase)} {share(spent / whole)} %" for phase, spent in ordered if spent > 0)


def _gpus_by_state(row: ListRow) -> str:
    by_state: dict[str, list[str]] = {}
    for gpu in gpus_of_job(row.owner.job_id, row.polled):
        by_state.setdefault(gpu.state, []).append(gpu.index or gpu.uuid)
    was = "" if row.live else "was "
    return ", ".join(f"{index_ranges(indices)} {was}{state}" for state, indices in by_state.items()) or "none any more"


def _job_pids(row: ListRow) -> str:
    """List the processes on each of the job's GPUs: what py-spy dump --pid asks for."""
    gpus = gpus_of_job(row.owner.job_id, row.polled)
    return "; ".join(f"GPU {gpu.index or gpu.uuid}: {', '.join(map(str, gpu.pids))}" for gpu in gpus if gpu.pids)


def _other_nodes(row: ListRow, view: TopView) -> list[tuple[str, str]]:
    """Describe the job's usage of the other watched nodes."""
    found = []
    for name, node in zip(view.names, view.nodes, strict=True):
        jobs = [] if node is row.polled or node.jobs is None else node.jobs.jobs
        for job in (job for job in jobs if job.owner.job_id == row.owner.job_id):
            suffix = "" if node.live else " (old)"
            text = (
                f"{index_ranges(job.gpus) or 'ended'}, useful {percent(job.last_5_minutes, 'product')}"
                f" in the last 5 min{suffix}"
            )
            found.append((f"on {name}", text))
    return found


def _records(row: ListRow) -> list[tuple[str, str]]:
    """Describe the node's records of the job."""
    records = row.polled.receipts.receipts if row.polled.receipts else []
    return [("record", _describe_record(record)) for record in records]


def _describe_record(record: JobRecord) -> str:
    lost = sorted(
        ((name, value) for name, value in record.parts.items() if name != "useful"), key=lambda pair: -pair[1]
    )
    paid = record.paid or 1
    facts = [
        f"{record.paid / _NANOSECONDS / HOUR:.1f} GPU-hours",
        *([amounts(record.money)] if record.money else []),
        f"useful {share(record.parts.get('useful', 0) / paid)} %",
        *(f"{readable_name(name)} {share(value / paid)} %" for name, value in lost[:3]),
        *(f"{readable_name(kind)} {times} times" for kind, times in record.happened.items() if times),
    ]
    return ", ".join(facts)


def _fact_lines(facts: list[tuple[str, str]], glyphs: Glyphs, width: int) -> list[StyledLine]:
    """Lay out (label, text) in two columns, wrapping the texts."""
    widest = max((cell_width(glyphs.printable(name)) for name, _ in facts), default=0)
    room = max(_MIN_FIX_WIDTH, width - widest - 2 * _INDENT)
    lines = [styled_line()]
    for name, value in facts:
        first, *rest = wrap(glyphs.printable(value), room) or [""]
        lines.append(styled_line((f" {pad(glyphs.printable(name), widest)}  ", "soft"), first))
        lines += [styled_line(" " * (widest + 3), more) for more in rest]
    return lines
