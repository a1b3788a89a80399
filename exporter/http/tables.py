"""The page's tables: the jobs, and the node over time. Owns columns and order."""

from collections.abc import Iterable

from exporter.core.leaks import LEAKS
from exporter.http.account import AccountOut, AccountsOut
from exporter.http.api import JobOut
from exporter.http.drawing import losses, swatch
from exporter.http.words import duration, energy, hours, job_path, money, own_word, plain, ratio, text

_UNKNOWN = '<span class="mute">\N{EN DASH}</span>'
_JOB_RATIOS = ("ectr", "emfu", "product", "driver_utilization")


def job_table(jobs: Iterable[JobOut]) -> str:
    """Jobs of the node, the one that lost most in the last hour first."""
    listed = sorted(jobs, key=_lost, reverse=True)
    spoken = any(map(own_word, listed))
    rows = "".join(_job(job, spoken=spoken) for job in listed)
    if not rows:
        return (
            '<section id="jobs"><h2>Jobs</h2><p class="mute">No job holds a GPU of this node, or did lately.</p>'
            "</section>"
        )
    names = heads(
        ("job", False), ("user", False), *([("its own word", False)] if spoken else ()), ("GPUs", False),
        ("GPU-time, last hour", True), ("computing", True), ("useful", True), ("product", True), ("nvidia-smi", True),
        ("largest loss", False),
    )  # fmt: skip
    return f'<section id="jobs"><h2>Jobs</h2>{table("Jobs", names, rows)}</section>'


def _job(job: JobOut, *, spoken: bool) -> str:
    hour, owner = job.last_hour, job.owner
    lost = losses(hour)
    worst = f"{swatch(lost[0][0])}{plain(lost[0][0])} {duration(lost[0][1])}" if lost else ""
    name = f" <small><bdi>{text(owner.name)}</bdi></small>" if owner.name else ""
    figures = (duration(hour.seconds), *(ratio(hour, name) for name in _JOB_RATIOS))
    return (
        f'<tr data-key="job-{text(owner.job_id)}"><th scope="row" class="name">'
        f'<a href="{job_path(owner.job_id)}"><bdi>{text(owner.job_id)}</bdi></a>{name}</th>'
        f"<td><bdi>{text(owner.user or owner.namespace or owner.account)}</bdi></td>"
        + (f'<td class="wide">{own_word(job)}</td>' if spoken else "")
        + f"<td>{text(', '.join(job.gpus)) or 'ended'}</td>"
        + "".join(f'<td class="n">{figure}</td>' for figure in figures)
        + f"<td>{worst}</td></tr>"
    )


def _lost(job: JobOut) -> float:
    return job.last_hour.seconds - job.last_hour.leaks["useful"]


def account_table(accounts: AccountsOut) -> str:
    """The node's last 5 minutes, last hour and all since the start, side by side."""
    rows = "".join(
        _account(words, account, key=key)
        for key, words, account in (
            ("short", "last 5 minutes", accounts.last_5_minutes),
            ("hour", "last hour", accounts.last_hour),
            ("start", "since the start", accounts.since_start),
        )
        if account.window.seconds
    )
    priced = bool(accounts.prices)
    names = heads(
        ("", False), ("allocated", True), ("computing", True), ("useful", True), ("product", True),
        ("nvidia-smi", True), ("GPU-hours", True), *([("paid", True), ("lost", True)] if priced else []),
        ("energy", True),
    )  # fmt: skip
    return f'<section data-key="accounts">{table("The node over time", names, rows)}</section>' if rows else ""


def _account(words: str, account: AccountOut, *, key: str) -> str:
    window, spent = account.window, account.money
    ratios = [ratio(window, name) for name in ("gau", "ectr", "emfu", "product", "driver_utilization")]
    paid = {currency: sum(by_leak.values()) for currency, by_leak in (spent or {}).items()}
    lost = {currency: sum(by_leak[leak.name] for leak in LEAKS) for currency, by_leak in (spent or {}).items()}
    moneys = [money(paid) or _UNKNOWN, money(lost) or _UNKNOWN] if spent is None or spent else []
    joules = _UNKNOWN if account.energy_joules is None else energy(sum(account.energy_joules.values()))
    figures = (*ratios, hours(window.seconds), *moneys, joules)
    cells = "".join(f'<td class="n">{figure}</td>' for figure in figures)
    return f'<tr data-key="{key}"><th scope="row" class="tight">{words}</th>{cells}</tr>'


def heads(*columns: tuple[str, bool]) -> str:
    """Head cells of (words, numeric)."""
    return "".join(f'<th scope="col"{" class=n" if numeric else ""}>{words}</th>' for words, numeric in columns)


def table(about: str, names: str, rows: str) -> str:
    """Scrolls by itself where it is wider than a phone; it takes the focus so that a keyboard can do that too."""
    return (
        f'<div class="scroll" role="region" aria-label="{about}" tabindex="0"><table>'
        f"<thead><tr>{names}</tr></thead><tbody>{rows}</tbody></table></div>"
    )
