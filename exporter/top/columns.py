"""Builds, filters and sorts the rows of the GPU and job lists, and chooses the columns that fit the width.

Columns are left out by rank when the width shrinks; those of rank 0 always stay.
"""

from collections.abc import Callable, Sequence
from typing import Literal

from msgspec import Struct

from exporter.colours import STATES
from exporter.core.hangs import HUNG
from exporter.core.prices import JOULES_PER_KWH
from exporter.formatting import gibibytes, readable_name, share, short_duration
from exporter.top.view import (
    PolledNode,
    StyledLine,
    StyledText,
    TopView,
    amounts,
    cell_width,
    contact,
    index_ranges,
    known_losses,
    loss_shares,
    lost_share,
    merge_segments,
    pad,
    ratio,
    sparkline,
    styled_line,
    truncate,
    truncate_middle,
)
from exporter.web.api import GpuOut, JobOut, OwnerOut, ServingOut, TrainingOut, WindowOut
from exporter.web.summary import (
    LAYER_BY_LEAK,
    STATE_SYMBOLS,
    seconds_in_state,
    serving_summary,
    training_summary,
)

RowKey = tuple[str, str, str]
"""Identifies a row: "gpu" or "job", the node's address, UUID or job id."""
ListKind = Literal["gpus", "jobs"]
_URGENCY = {state: index for index, state in enumerate(STATE_SYMBOLS)}


class ListRow(Struct, frozen=True, kw_only=True):
    """A row of the GPU or job list; either `gpu` or `job` is set."""

    key: RowKey
    polled: PolledNode
    node: str
    state: str
    suspect: bool
    since: float
    """Seconds in this state, or since the job started."""
    owners: list[OwnerOut]
    window: WindowOut
    order: tuple[int, int, str]
    gpu: GpuOut | None = None
    job: JobOut | None = None
    states: tuple[str, ...] = ()
    """States of a job's GPUs."""

    @property
    def live(self) -> bool:
        """Whether the values are current."""
        return self.polled.live and (self.gpu is None or self.gpu.live)

    @property
    def hangs(self) -> bool:
        """Whether it is hung, or was when last observed."""
        return self.state == HUNG

    @property
    def losses(self) -> list[tuple[str, float]]:
        """List (name, share of paid time) of what is not useful: a hang that lasts first, then the largest."""
        return sorted(loss_shares(self.window), key=lambda pair: not (self.hangs and pair[0] == HUNG))

    @property
    def owner(self) -> OwnerOut:
        """The first owner."""
        return self.owners[0] if self.owners else OwnerOut()

    def search_text(self) -> str:
        """Return the text that a filter is matched against."""
        of_gpu = (self.gpu.index, self.gpu.model, self.gpu.reason, self.gpu.uuid) if self.gpu else ()
        owner_fields = [field for owner in self.owners for field in _owner_fields(owner)]
        leaks = [name for name, _ in known_losses(self.window)[:2]]
        fields = (self.node, self.state, *self.states, *of_gpu, *owner_fields, *leaks, "hang?" if self.suspect else "")
        return " ".join(fields).replace("_", " ").casefold()


def _owner_fields(owner: OwnerOut) -> tuple[str, ...]:
    return (
        owner.job_id, owner.display_id, owner.name, owner.user, owner.account, owner.partition, owner.namespace,
        owner.workload_class, owner.team,
    )  # fmt: skip


def shown_id(owner: OwnerOut) -> str:
    """Return the id under which users know the job; older daemons send only the raw one."""
    return owner.display_id or owner.job_id


def gpu_rows(view: TopView, window: str) -> list[ListRow]:
    """List all GPUs of all nodes."""
    return [
        _gpu_row(gpu, polled, view, node_index=node_index, window=window)
        for node_index, polled in enumerate(view.nodes)
        if polled.gpus is not None
        for gpu in polled.gpus.gpus
    ]


def _gpu_row(gpu: GpuOut, polled: PolledNode, view: TopView, *, node_index: int, window: str) -> ListRow:
    number = int(gpu.index) if gpu.index.isdecimal() else 1 << 30
    return ListRow(
        key=("gpu", polled.address, gpu.uuid),
        polled=polled,
        node=view.names[node_index],
        state=gpu.state,
        suspect=gpu.hang_suspected and gpu.state != "hung",
        since=seconds_in_state(gpu) + polled.seconds_since_sample(view.now),
        owners=gpu.owners,
        window=getattr(gpu, window),
        order=(node_index, number, gpu.uuid),
        gpu=gpu,
    )


def job_rows(view: TopView, window: str) -> list[ListRow]:
    """List all jobs of all nodes; a job on several nodes has a row for each."""
    return [
        _job_row(job, polled, view, node_index=node_index, number=number, window=window)
        for node_index, polled in enumerate(view.nodes)
        if polled.jobs is not None
        for number, job in enumerate(polled.jobs.jobs)
    ]


def _job_row(job: JobOut, polled: PolledNode, view: TopView, *, node_index: int, number: int, window: str) -> ListRow:
    held = gpus_of_job(job.owner.job_id, polled)
    states = tuple(gpu.state for gpu in held)
    sampled = polled.jobs.node.sampled_at if polled.jobs else 0.0
    return ListRow(
        key=("job", polled.address, job.owner.job_id),
        polled=polled,
        node=view.names[node_index],
        state=min(states, key=urgency) if states else "ended",
        suspect=any(gpu.hang_suspected and gpu.state != "hung" for gpu in held),
        since=max(0.0, sampled - job.started_at) + polled.seconds_since_sample(view.now),
        owners=[job.owner],
        window=getattr(job, window),
        order=(node_index, number, job.owner.job_id),
        job=job,
        states=states,
    )


def gpus_of_job(job_id: str, polled: PolledNode) -> list[GpuOut]:
    """List the GPUs that the job holds on this node."""
    gpus = polled.gpus.gpus if polled.gpus else []
    return [gpu for gpu in gpus if any(owner.job_id == job_id for owner in gpu.owners)]


def urgency(state: str) -> int:
    """Return the state's rank, the most urgent 0; an unknown state sorts with active."""
    return _URGENCY.get(state, _URGENCY["active"])


def _none_last(value: float | None) -> tuple[bool, float]:
    """Return a sort key that sorts None last."""
    return value is None, value or 0.0


def _lost_seconds(row: ListRow) -> float:
    return lost_share(row.window) * row.window.seconds


SortOrder = tuple[str, str, Callable[[ListRow], tuple[object, ...]]]
"""Name, the column marked by an arrow, and the sort key."""
_BY_LOSS: SortOrder = ("lost", "leak", lambda row: (-_lost_seconds(row),))
_COMMON_ORDERS: tuple[SortOrder, ...] = (
    ("product", "useful", lambda row: _none_last(row.window.product)),
    ("state", "state", lambda row: (not row.suspect, urgency(row.state)) if row.state != "ended" else (True, 99)),
    ("user", "user", lambda row: (not contact(row.owner), contact(row.owner))),
    ("job", "job", lambda row: (not row.owner.job_id, row.owner.job_id)),
    ("longest", "since", lambda row: (-row.since,)),
)
SORTS: dict[ListKind, tuple[SortOrder, ...]] = {
    "gpus": (
        ("gpu", "gpu", lambda _: ()),
        _BY_LOSS,
        *_COMMON_ORDERS,
        ("power", "power", lambda row: (-((row.gpu and row.gpu.power_watts) or 0.0),)),
        ("memory", "memory", lambda row: (-((row.gpu and row.gpu.memory_used_bytes) or 0.0),)),
    ),
    "jobs": (("lost", "leak", lambda row: (not row.hangs, -_lost_seconds(row))), *_COMMON_ORDERS),
}
"""Sort orders of each list; the first is the default."""


def filter_and_sort(
    rows: list[ListRow], kind: ListKind, *, sort: int = 0, reverse: bool = False, text: str = ""
) -> list[ListRow]:
    """Keep rows that contain all words of `text`, and sort them; ties are in the order of the nodes."""
    terms = text.replace("_", " ").casefold().split()
    found = [row for row in rows if all(term in row.search_text() for term in terms)]
    sort_key = SORTS[kind][sort % len(SORTS[kind])][2]
    return sorted(found, key=lambda row: (sort_key(row), row.order), reverse=reverse)


GAP, MARGIN = 1, 2
"""Terminal columns after each cell, and before the first for the cursor."""
OPTIONAL_RANK = 9
"""Columns from this rank on are shown only if they and all columns of lower rank need not be truncated."""
LOUD_STATES = ("unavailable", HUNG)
"""Drawn bold."""


class ListColumn(Struct, frozen=True, kw_only=True):
    """One column. Columns with a high `rank` are left out first; columns of the same rank together."""

    name: str
    heading: str
    rank: int
    min_width: int
    """Terminal columns below which it is left out."""
    max_width: int
    """Maximum width; it gets no more than its texts need."""
    cell: Callable[[ListRow, TopView], StyledText]
    align_right: bool = False
    cut_middle: bool = False
    """Truncate in the middle, because the texts differ at their ends."""
    trend: bool = False
    """A sparkline, drawn at the width that the column gets."""


def state_cell(row: ListRow, view: TopView) -> StyledText:
    """Return symbol and name of the state; "was" before the name if the values are old."""
    glyphs = view.glyphs
    if row.suspect and row.live:
        return f"{glyphs.suspect} hung?{_state_count(row)}", "hung"
    state = glyphs.printable(row.state)
    if not row.live:
        return f"{glyphs.states['unobserved']} was {state}", "soft"
    symbol = " " if row.state == "ended" else glyphs.states.get(row.state, glyphs.unknown_state)
    return f"{symbol} {state}{_state_count(row)}", row.state if row.state in STATES else "soft"


def _state_count(row: ListRow) -> str:
    """Return how many of a job's GPUs are in this state; empty if all are."""
    alike, count = row.states.count(row.state), len(row.states)
    return f" {alike}/{count}" if count > 1 and alike < count and not row.suspect else ""


def _ratio_cell(row: ListRow, name: str, style: str = "") -> StyledText:
    return ratio(row.window, name), style if row.live else "soft"


def _leak_cell(row: ListRow, view: TopView, index: int) -> StyledText:
    parts = row.losses
    if len(parts) <= index:
        return "", ""
    name, part = parts[index]
    layer = LAYER_BY_LEAK.get(name, "")
    style = layer if layer in ("gau", "ectr", "emfu") else "soft"
    return f"{share(part):>3} {view.glyphs.printable(readable_name(name))}", style if row.live else "soft"


def _text_cell(text: str, view: TopView, style: str = "") -> StyledText:
    return view.glyphs.printable(text), style


def _user_cell(row: ListRow, view: TopView) -> StyledText:
    others = len({owner.job_id for owner in row.owners}) - 1
    return _text_cell(contact(row.owner) + (f" +{others}" if others > 0 else ""), view)


def _live_cell(text: Callable[[GpuOut], str]) -> Callable[[ListRow, TopView], StyledText]:
    """Return a column's `cell` for a value that is only shown while the row is live."""
    return lambda row, _: (text(row.gpu) if row.gpu and row.live else "", "")


def _rounded(value: float | None) -> str:
    return "" if value is None else f"{value:.0f}"


def _model_cell(row: ListRow, view: TopView) -> StyledText:
    if row.gpu is None:
        return "", ""
    profile, model = row.gpu.profile, row.gpu.model.removeprefix("NVIDIA ")
    return _text_cell(f"MIG {profile}" if profile else model, view)


def _index_cell(row: ListRow, view: TopView) -> StyledText:
    gpu = row.gpu
    return _text_cell((gpu.index or gpu.uuid) if gpu else "", view)


def _energy_cell(row: ListRow, _: TopView) -> StyledText:
    return f"{row.job.energy_joules / JOULES_PER_KWH:.1f}" if row.job else "", ""


def _energy_money_cell(row: ListRow, view: TopView) -> StyledText:
    return _text_cell(amounts(row.job.energy_money) if row.job else "", view)


def _workload_cell(row: ListRow, view: TopView) -> StyledText:
    """Return the most important values that the job's workload reports."""
    job = row.job
    facts = [*training_facts(job.training)[:4], *serving_facts(job.serving)[:5]] if job else []
    return _text_cell(", ".join(facts), view)


def training_facts(training: TrainingOut | None) -> list[str]:
    """List all values that a training job reports, the most important first."""
    if training is None:
        return []
    facts = [
        *training_summary(training),
        _count_of(training.restarts, "restart"),
        f"{short_duration(training.recovery_seconds)} recovery" if training.recovery_seconds else "",
        _count_of(training.checkpoints, "checkpoint"),
        f"loss {training.loss:.4g}" if training.loss is not None else "",
    ]
    return list(filter(None, facts))


def _count_of(count: int, what: str) -> str:
    return f"{count} {what}{'s' if count != 1 else ''}" if count else ""


def serving_facts(serving: ServingOut | None) -> list[str]:
    """List all values that a job's serving engines report, the most important first."""
    if serving is None:
        return []
    facts = [
        *serving_summary(serving),
        f"batch {share(serving.batch_fill)} % full" if serving.batch_fill is not None else "",
        f"drafts {share(serving.draft_acceptance)} % accepted" if serving.draft_acceptance is not None else "",
        f"{serving.preemptions:.0f} preempted" if serving.preemptions else "",
    ]
    return list(filter(None, facts))


_NODE = ListColumn(
    name="node", heading="NODE", rank=2, min_width=8, max_width=24,
    cell=lambda r, _: (r.node, "" if r.live else "soft"), cut_middle=True,
)  # fmt: skip


def _ratio_column(name: str, field: str, heading: str, *, rank: int = 3, style: str = "") -> ListColumn:
    return ListColumn(
        name=name, heading=heading, rank=rank, min_width=len(heading), max_width=len(heading),
        cell=lambda row, _: _ratio_cell(row, field, style), align_right=True,
    )  # fmt: skip


_LAYERS = (
    _ratio_column("gau", "gau", "GAU"),
    _ratio_column("ectr", "ectr", "ECTR"),
    _ratio_column("emfu", "emfu", "eMFU"),
    _ratio_column("useful", "product", "USEFUL", rank=1, style="strong"),
)
_TREND = ListColumn(name="trend", heading="", rank=10, min_width=6, max_width=40, cell=lambda *_: ("", ""), trend=True)
_SMI = _ratio_column("smi", "driver_utilization", "SMI", rank=7, style="soft")
_SINCE = ListColumn(
    name="since", heading="SINCE", rank=6, min_width=5, max_width=5,
    cell=lambda r, _: (short_duration(r.since), ""), align_right=True,
)  # fmt: skip
_LEAK = ListColumn(
    name="leak", heading="  % LEAK", rank=5, min_width=12, max_width=31, cell=lambda r, v: _leak_cell(r, v, 0)
)
_SECOND_LEAK = ListColumn(
    name="leak2", heading="  % NEXT LEAK", rank=12, min_width=18, max_width=31, cell=lambda r, v: _leak_cell(r, v, 1)
)
COLUMNS: dict[ListKind, tuple[ListColumn, ...]] = {
    "gpus": (
        _NODE,
        ListColumn(
            name="gpu", heading="GPU", rank=0, min_width=3, max_width=8, cell=_index_cell, align_right=True,
            cut_middle=True,
        ),
        ListColumn(name="state", heading="STATE", rank=0, min_width=13, max_width=17, cell=state_cell),
        _SINCE,
        *_LAYERS,
        _TREND,
        _SMI,
        _LEAK,
        _SECOND_LEAK,
        ListColumn(name="user", heading="USER", rank=4, min_width=6, max_width=16, cell=_user_cell, cut_middle=True),
        ListColumn(
            name="job", heading="JOB", rank=11, min_width=6, max_width=24,
            cell=lambda r, v: _text_cell(shown_id(r.owner), v), cut_middle=True,
        ),
        ListColumn(
            name="name", heading="NAME", rank=13, min_width=6, max_width=24,
            cell=lambda r, v: _text_cell(r.owner.name, v),
        ),
        ListColumn(
            name="power", heading="W", rank=9, min_width=3, max_width=4,
            cell=_live_cell(lambda gpu: _rounded(gpu.power_watts)), align_right=True,
        ),
        ListColumn(
            name="memory", heading="GiB", rank=8, min_width=5, max_width=7,
            cell=_live_cell(lambda gpu: gibibytes(gpu.memory_used_bytes, gpu.memory_total_bytes)), align_right=True,
        ),
        ListColumn(
            name="celsius", heading="°C", rank=8, min_width=3, max_width=3,
            cell=_live_cell(lambda gpu: _rounded(gpu.temperature_celsius)), align_right=True,
        ),
        ListColumn(
            name="reason", heading="REASON", rank=15, min_width=8, max_width=24,
            cell=lambda r, v: _text_cell(readable_name(r.gpu.reason) if r.gpu else "", v, "soft"),
        ),
        ListColumn(name="model", heading="MODEL", rank=16, min_width=10, max_width=22, cell=_model_cell),
    ),
    "jobs": (
        _NODE,
        ListColumn(
            name="job", heading="JOB", rank=0, min_width=8, max_width=28,
            cell=lambda r, v: _text_cell(shown_id(r.owner), v), cut_middle=True,
        ),
        ListColumn(name="user", heading="USER", rank=4, min_width=5, max_width=16, cell=_user_cell, cut_middle=True),
        ListColumn(
            name="gpus", heading="GPUS", rank=3, min_width=4, max_width=12,
            cell=lambda r, v: _text_cell(index_ranges(r.job.gpus) if r.job else "", v), cut_middle=True,
        ),
        ListColumn(name="state", heading="STATE", rank=0, min_width=11, max_width=17, cell=state_cell),
        _SINCE,
        *_LAYERS,
        _TREND,
        _SMI,
        _LEAK,
        _SECOND_LEAK,
        ListColumn(
            name="name", heading="NAME", rank=8, min_width=6, max_width=24,
            cell=lambda r, v: _text_cell(r.owner.name, v),
        ),
        ListColumn(
            name="reported", heading="REPORTED", rank=11, min_width=14, max_width=60,
            cell=_workload_cell,
        ),
        ListColumn(
            name="account", heading="ACCOUNT", rank=13, min_width=7, max_width=16,
            cell=lambda r, v: _text_cell(r.owner.account, v), cut_middle=True,
        ),
        ListColumn(
            name="energy", heading="kWh", rank=14, min_width=4, max_width=7, cell=_energy_cell, align_right=True,
        ),
        ListColumn(
            name="energy_money", heading="FOR ENERGY", rank=15, min_width=10, max_width=16, cell=_energy_money_cell,
            align_right=True,
        ),
    ),
}  # fmt: skip
"""Columns of each list, from left to right."""


ColumnLayout = list[tuple[ListColumn, int]]
"""A list's columns with their widths, from left to right."""


def choose_columns(columns: Sequence[ListColumn], width: int, needs: dict[str, int]) -> ColumnLayout:
    """Choose the columns that fit, with their widths. `needs` is the width of each column's longest text; 0: empty."""
    room, kept = width - MARGIN, list[ListColumn]()
    for rank in sorted({column.rank for column in columns}):
        group = [column for column in columns if column.rank == rank and needs.get(column.name, 0)]
        size = _minimum_width if rank < OPTIONAL_RANK else _wanted_width
        if rank and sum(size(column, needs) + GAP for column in (*kept, *group)) > room:
            break
        kept += group
    widths = [(column, _minimum_width(column, needs)) for column in columns if column in kept]
    return _widen(widths, needs, max(0, room - sum(width + GAP for _, width in widths)))


def _wanted_width(column: ListColumn, needs: dict[str, int]) -> int:
    return column.min_width if column.trend else min(column.max_width, needs[column.name])


def _minimum_width(column: ListColumn, needs: dict[str, int]) -> int:
    return (
        column.min_width if column.trend else min(column.min_width, max(needs[column.name], cell_width(column.heading)))
    )


def _widen(found: ColumnLayout, needs: dict[str, int], room: int) -> ColumnLayout:
    """Distribute the remaining width evenly among truncated columns; the trend gets the rest."""
    widths = {column.name: width for column, width in found}
    narrow = [column for column, _ in found if not column.trend]
    while room and (narrow := [column for column in narrow if widths[column.name] < _wanted_width(column, needs)]):
        for column in narrow[:room]:
            widths[column.name] += 1
        room -= len(narrow[:room])
    for column in (column for column, _ in found if column.trend):
        widths[column.name] += min(room, column.max_width - widths[column.name])
    return [(column, widths[column.name]) for column, _ in found]


def layout_columns(rows: Sequence[ListRow], kind: ListKind, view: TopView, *, width: int) -> ColumnLayout:
    """Lay out the columns for these rows; columns that are empty in all of them are left out."""
    columns = [column for column in COLUMNS[kind] if view.has_many_nodes or column.name != "node"]
    needs = {column.name: _needed_width(column, rows, view) for column in columns}
    return choose_columns(columns, width, needs)


def _needed_width(column: ListColumn, rows: Sequence[ListRow], view: TopView) -> int:
    if column.trend:
        return column.max_width
    widest = max((cell_width(column.cell(row, view)[0]) for row in rows), default=0)
    return max(widest, cell_width(column.heading)) if widest or column.rank < 2 else 0  # noqa: PLR2004  the always shown


def heading_line(
    layout: ColumnLayout, kind: ListKind, view: TopView, *, sort: int | None, reverse: bool, top: float
) -> StyledLine:
    """Build the line of headings; the sorted column has an arrow, before its heading if it is right-aligned."""
    glyphs = view.glyphs
    sorted_column = "" if sort is None else SORTS[kind][sort][1]
    segments, gap = list[StyledText](), MARGIN
    for column, width in layout:
        name = _trend_heading(view, width, top) if column.trend else glyphs.printable(column.heading)
        arrow = (glyphs.up if reverse else glyphs.down) if column.name == sorted_column else ""
        if column.align_right:
            text = pad(arrow + name, gap + width, right=True)
        else:
            text = " " * gap + pad(truncate(name, width - len(arrow), glyphs) + arrow, width)
        segments.append((text, "strong" if arrow else "soft"))
        gap = GAP
    return styled_line(*segments)


def _trend_heading(view: TopView, width: int, top: float) -> str:
    """Return the longest heading that fits: what the trend shows, its scale and its time span."""
    trends = view.trends
    ago, scale = short_duration(max(0.0, view.now - trends.start)), f"0-{100 * top:.0f}%"
    candidates = (f"USEFUL, {scale}, over the last {ago}", f"USEFUL {scale}, {ago}", f"{scale} {ago}", scale)
    return next((text for text in candidates if len(text) <= width), scale)


def row_line(row: ListRow, layout: ColumnLayout, view: TopView, *, top: float, is_selected: bool = False) -> StyledLine:
    """Build the line of one row."""
    segments: list[StyledText] = [(pad(view.glyphs.cursor if is_selected else "", MARGIN), "strong")]
    for column, width in layout:
        text, style = _trend_cell(row, view, width, top) if column.trend else column.cell(row, view)
        text = (truncate_middle if column.cut_middle else truncate)(text, width, view.glyphs)
        segments.append((pad(text, width, right=column.align_right) + " " * GAP, style))
    return styled_line(*merge_segments(segments), selected=is_selected)


def _trend_cell(row: ListRow, view: TopView, width: int, top: float) -> StyledText:
    shown = sparkline(view.trends.points(row.key, width), top, view.glyphs)
    return pad(shown, width, right=True), "useful" if row.live else "soft"
