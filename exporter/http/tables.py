"""The page's two tables: jobs, and leaks with what to do about them. Owns columns and order."""

from collections.abc import Iterable
from html import escape

from exporter.core.leaks import LAYER_OF, LEAKS, NAMES
from exporter.http.api import JobOut, WindowOut
from exporter.http.appearance import LOWERS
from exporter.http.drawing import losses, parts, swatch
from exporter.http.words import duration, own_word, percent, plain, ratio, text

_LAYER = dict(zip(NAMES, LAYER_OF, strict=True))
_JOB_RATIOS = ("ectr", "emfu", "product", "driver_utilization")
_TAKES = {leak.name: leak.takes for leak in LEAKS} | {
    "useful": "GPU-seconds at 100 % of peak that advanced a model",
    "unresolved": "kernel time of a board or a source that cannot say what it was worth",
    "unobserved": "no trustworthy telemetry",
}
_FIX = {leak.name: leak.fix for leak in LEAKS}


def job_table(jobs: Iterable[JobOut]) -> str:
    """Jobs of the node, the one that lost most in the last hour first."""
    listed = sorted(jobs, key=_lost, reverse=True)
    spoken = any(map(own_word, listed))
    rows = "".join(_job(job, spoken=spoken) for job in listed)
    if not rows:
        return '<h2>Jobs</h2><p class="mute">No job holds a GPU of this node, or did lately.</p>'
    heads = _heads(
        ("job", False), ("user", False), *([("its own word", False)] if spoken else ()), ("GPUs", False),
        ("GPU-time, last hour", True), ("computing", True), ("useful", True), ("product", True), ("nvidia-smi", True),
        ("largest loss", False),
    )  # fmt: skip
    return f"<h2>Jobs</h2>{_table('Jobs', heads, rows)}"


def _job(job: JobOut, *, spoken: bool) -> str:
    hour, owner = job.last_hour, job.owner
    lost = losses(hour)
    worst = f"{swatch(lost[0][0])}{plain(lost[0][0])} {duration(lost[0][1])}" if lost else ""
    name = f" <small><bdi>{text(owner.name)}</bdi></small>" if owner.name else ""
    figures = (duration(hour.seconds), *(ratio(hour, name) for name in _JOB_RATIOS))
    return (
        f'<tr><th scope="row" class="name"><bdi>{text(owner.job_id)}</bdi>{name}</th>'
        f"<td><bdi>{text(owner.user or owner.namespace or owner.account)}</bdi></td>"
        + (f'<td class="wide">{own_word(job)}</td>' if spoken else "")
        + f"<td>{text(', '.join(job.gpus)) or 'ended'}</td>"
        + "".join(f'<td class="n">{figure}</td>' for figure in figures)
        + f'<td class="tight">{worst}</td></tr>'
    )


def _lost(job: JobOut) -> float:
    return job.last_hour.seconds - job.last_hour.leaks["useful"]


def leak_table(hour: WindowOut) -> str:
    """Where the node's time went, the largest loss first, and the first thing to do about each."""
    rows = "".join(
        f'<tr><th scope="row" class="name">{swatch(name)}{plain(name)}</th>'
        f'<td class="n">{duration(seconds)}</td><td class="n">{percent(seconds / hour.seconds)}</td>'
        f"<td>{LOWERS.get(_LAYER[name], '')}</td>"
        f'<td class="wide">{escape(_TAKES[name])}</td><td class="wide">{escape(_FIX.get(name, ""))}</td></tr>'
        for name, seconds in sorted(parts(hour), key=lambda part: (part[0] != "useful", -part[1]))
    )
    if not rows:
        return ""
    heads = _heads(("leak", False), ("GPU-time", True), ("of paid", True), ("lowers", False), ("what it is", False),
                   ("first thing to do", False))  # fmt: skip
    return f"<h2>Where the time went</h2>{_table('Where the time went', heads, rows)}"


def _heads(*columns: tuple[str, bool]) -> str:
    """Head cells of (words, numeric)."""
    return "".join(f'<th scope="col"{" class=n" if numeric else ""}>{words}</th>' for words, numeric in columns)


def _table(about: str, heads: str, rows: str) -> str:
    """Scrolls by itself where it is wider than a phone; it takes the focus so that a keyboard can do that too."""
    return (
        f'<div class="scroll" role="region" aria-label="{about}" tabindex="0"><table>'
        f"<thead><tr>{heads}</tr></thead><tbody>{rows}</tbody></table></div>"
    )
