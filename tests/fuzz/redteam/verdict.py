"""The verdict on one run: what had to hold and did or did not, as a table and as JSON, and what each attack came to."""

import json
from statistics import median

from msgspec import Struct

from tests.fuzz.redteam.attacks.guesses import CHECKED
from tests.fuzz.redteam.campaign import GUESSES, Course
from tests.fuzz.redteam.cgroups import Memory
from tests.fuzz.redteam.honest import EVERY, Scrape, step_at
from tests.fuzz.redteam.target import BY_HTTP, FORGED_STEP, HONEST

_SLOW = 0.1
"""The bar of the 99th percentile of scrapes, seconds."""
_STALE = 10.0
"""The oldest that an honest report in /metrics may be, seconds; one is sent every two."""
_FIRST_LOGIN = 10.0
"""The longest that a first login may take while others guess, seconds: Prometheus' own scrape timeout."""
_GUESSING = 0.25
"""The share of a processor that checking the guesses may take, at any cost: 20 %, and what is allowed at once."""
_SHORT = 60.0
"""Seconds of guessing below which its share is not judged: a burst of checks is allowed at once."""
_SLOWEST = 12
_SHOWN = 7
"""Outcomes shown of each attack."""


class Check(Struct, frozen=True):
    """One row of the verdict."""

    what: str
    result: str
    bar: str
    good: bool | None
    """None: no bar."""


class Verdict(Struct, frozen=True):
    checks: list[Check]
    attacks: list[dict[str, object]]
    slowest: list[dict[str, object]]
    findings: list[str]
    run: dict[str, object]

    @property
    def good(self) -> bool:
        return all(check.good is not False for check in self.checks)


def judge(course: Course) -> Verdict:
    """Return the verdict."""
    scrapes = [scrape for scrape in course.scrapes if scrape.at >= course.attacked_from]
    findings = _findings(course, scrapes)
    return Verdict(
        checks=[
            *_life(course),
            *_scraping(scrapes),
            *_figures(course, scrapes),
            *_reports(course, scrapes),
            *judge_guessing(course),
            _protected(course),
            _log(course),
        ],
        attacks=_attacks(course, scrapes),
        slowest=_slowest(course, scrapes),
        findings=findings,
        run=_run(course),
    )


def _life(course: Course) -> list[Check]:
    memory = course.memory
    assert isinstance(memory, Memory)
    mib = memory.peak / (1 << 20)
    state = "the same process to the end" if course.alive else f"ended: {course.how_ended}"
    return [
        Check("daemon", state, "never killed or restarted", course.alive),
        Check("killed for memory", f"{memory.out_of_memory} ({memory.how})", "0", memory.out_of_memory == 0),
        Check(
            "peak of its memory group",
            f"{mib:.0f} MiB, the limit was met {memory.limit_reached} times",
            "512 MiB",
            None,
        ),
        Check("peak resident set", f"{course.peak_resident / (1 << 20):.0f} MiB", "", None),
    ]


def _scraping(scrapes: list[Scrape]) -> list[Check]:
    lost = [scrape for scrape in scrapes if scrape.lost]
    times = sorted(scrape.seconds for scrape in scrapes if not scrape.lost)
    again = sum(scrape.again for scrape in scrapes)
    if not times:
        return [Check("scrapes", "none was answered", "all", good=False)]
    p99 = percentile(times, 0.99)
    late = max((scrape.late for scrape in scrapes), default=0.0)
    return [
        Check("scrapes lost", f"{len(lost)} of {len(scrapes)}", "0", not lost),
        Check("scrape p50, ms", f"{median(times) * 1e3:.1f}", "", None),
        Check("scrape p99, ms", f"{p99 * 1e3:.1f}", f"{_SLOW * 1e3:.0f}", p99 <= _SLOW),
        Check("scrape max, ms", f"{times[-1] * 1e3:.1f}", "", None),
        Check("kept connection closed, sent again", f"{again}", "", None),
        Check("scraper itself late, at most, ms", f"{late * 1e3:.1f}", "", None),
    ]


def percentile(ordered: list[float], share: float) -> float:
    """Return the smallest value that as large a share of the values does not exceed."""
    return ordered[min(int(len(ordered) * share), len(ordered) - 1)]


def _figures(course: Course, scrapes: list[Scrape]) -> list[Check]:
    wrong = [text for scrape in course.scrapes for text in scrape.wrong]
    back = [text for text in wrong if "went back" in text or " is NaN" in text or " is +Inf" in text]
    books = [text for text in wrong if text not in back]
    last = next((scrape for scrape in reversed(scrapes) if scrape.compared), None)
    compared, sums = (last.compared, last.sums) if last else (0, 0)
    return [
        Check("counters that went back", f"{len(back)} of {compared} comparisons", "0", not back and compared > 0),
        Check("books that do not add up", f"{len(books)} of {sums} sums", "0", not books and sums > 0),
    ]


def _reports(course: Course, scrapes: list[Scrape]) -> list[Check]:
    checks = []
    for job, way in ((HONEST, "socket"), (BY_HTTP, "HTTP")):
        tally = course.reports.get(job.id)
        taken = tally.outcomes["taken"] if tally else 0
        other = {name: n for name, n in tally.outcomes.items() if name != "taken"} if tally else {"killed": 1}
        said = f"{taken} taken" + "".join(f"; {n} {name}" for name, n in other.items())
        checks.append(Check(f"honest reports over {way}", said, "all taken", taken > 0 and not other))
        ages = [_age(course, scrape, job.id) for scrape in scrapes if not scrape.lost]
        absent = sum(age is None for age in ages)
        oldest = max((age for age in ages if age is not None), default=float("inf"))
        result = f"absent in {absent}, oldest {oldest:.1f} s"
        good = not absent and oldest <= _STALE
        checks.append(Check(f"seen in /metrics, over {way}", result, f"in all, {_STALE:.0f} s", good))
    forged = [text for scrape in course.scrapes for text in scrape.forged]
    forged += [
        f"step of job {job}"
        for scrape in course.scrapes
        for job, step in scrape.steps.items()
        if _is_forged(course, scrape, job, step)
    ]
    checks.append(
        Check("forged reports that counted", f"{len(forged)} {sorted(set(forged))[:2] or ''}".strip(), "0", not forged)
    )
    return checks


def _age(course: Course, scrape: Scrape, job: int) -> float | None:
    """Return how old the report is that the page shows: when its step was due is known."""
    step = scrape.steps.get(str(job))
    return None if step is None else scrape.at + scrape.seconds - (course.honest_began + step * EVERY)


def _is_forged(course: Course, scrape: Scrape, job: str, step: float) -> bool:
    if job in {str(HONEST.id), str(BY_HTTP.id)}:
        return step > step_at(course.honest_began, scrape.at + scrape.seconds)
    return FORGED_STEP - 20 <= step <= FORGED_STEP


def judge_guessing(course: Course) -> list[Check]:
    """Check how long first logins took while passwords were guessed, and what checking the guesses cost."""
    spans = [(ran.since, ran.until) for ran in course.episodes if ran.attack == GUESSES]
    logins = [one for one in course.logins if any(a <= one.at + one.seconds and one.at <= b for a, b in spans)]
    tally = course.tallies.get(GUESSES)
    if tally is None or not spans:
        return []
    times, failed = sorted(one.seconds for one in logins), [one for one in logins if one.came != "200"]
    slowest = f"median {median(times):.2f}, slowest {times[-1]:.2f}, " if times else ""
    result = f"{slowest}{len(failed)} of {len(times)} failed"
    guessed = sum(b - a for a, b in spans)
    share = tally.outcomes[CHECKED] * course.check_seconds / guessed
    checked = (
        f"{share:.0%} ({tally.outcomes[CHECKED]} checks of {course.check_seconds * 1e3:.0f} ms in {guessed:.0f} s)"
    )
    long = guessed >= _SHORT
    logged_in = not failed and times[-1] <= _FIRST_LOGIN if times else None
    return [
        Check("first login while others guess, s", result, f"{_FIRST_LOGIN:.0f}", logged_in),
        Check("processor for guesses", checked, f"{_GUESSING:.0%}", share <= _GUESSING if long else None),
    ]


def _protected(course: Course) -> Check:
    leaks = {
        f"{name}: {came}": number
        for name, tally in course.tallies.items()
        for came, number in tally.outcomes.items()
        if "PROTECTED" in came or "OLD TLS" in came
    }
    return Check("served without a right", f"{sum(leaks.values())} {'; '.join(leaks)}".strip(), "0", not leaks)


def _log(course: Course) -> Check:
    tracebacks = course.log.count("Traceback (most recent call last)")
    return Check(
        "tracebacks in the log", f"{tracebacks}; {course.log_bytes / 1024:.0f} KiB of log", "0", not tracebacks
    )


def _attacks(course: Course, scrapes: list[Scrape]) -> list[dict[str, object]]:
    return [
        {
            "attack": name,
            "episodes": sum(ran.attack == name for ran in course.episodes),
            "attempts": tally.attempts,
            "scrape p99 ms": _p99_while(course, scrapes, name),
            "outcomes": dict(tally.outcomes.most_common()),
        }
        for name, tally in course.tallies.items()
    ]


def _p99_while(course: Course, scrapes: list[Scrape], attack: str) -> float:
    """Return that of the scrapes during which this attack went on, among others."""
    spans = [(ran.since, ran.until) for ran in course.episodes if ran.attack == attack]
    times = sorted(
        scrape.seconds
        for scrape in scrapes
        if any(a <= scrape.at + scrape.seconds and scrape.at <= b for a, b in spans)
    )
    return round(percentile(times, 0.99) * 1e3, 1) if times else 0.0


def _slowest(course: Course, scrapes: list[Scrape]) -> list[dict[str, object]]:
    chosen = sorted(scrapes, key=lambda scrape: (bool(scrape.lost), scrape.seconds), reverse=True)[:_SLOWEST]
    return [
        {
            "at": round(scrape.at - course.attacked_from, 1),
            "ms": round(scrape.seconds * 1e3, 1),
            "fresh": scrape.fresh or scrape.again,
            "lost": scrape.lost,
            "daemon ran ms": round(scrape.daemon_ran * 1e3, 1),
            "its threads waited ms": round(scrape.daemon_waited * 1e3, 1),
            "scraper waited ms": round(scrape.scraper_waited * 1e3, 1),
            "attacks": [
                ran.attack
                for ran in course.episodes
                if ran.since <= scrape.at + scrape.seconds and scrape.at <= ran.until
            ],
        }
        for scrape in chosen
    ]


def _findings(course: Course, scrapes: list[Scrape]) -> list[str]:
    wrong = [f"{scrape.at - course.attacked_from:.0f} s: {text}" for scrape in course.scrapes for text in scrape.wrong]
    lost = [
        f"{scrape.at - course.attacked_from:.0f} s: scrape lost: {scrape.lost}" for scrape in scrapes if scrape.lost
    ]
    return [*wrong[:20], *lost[:20]]


def _run(course: Course) -> dict[str, object]:
    seconds = max(course.plan.seconds, 0.1)
    return {
        "seed": course.plan.seed,
        "seconds": course.plan.seconds,
        "intensity": course.plan.intensity,
        "cost of passwords": course.plan.cost,
        "daemon's processor": course.core,
        "others' processors": list(course.others),
        "daemon used of its processor": round(course.daemon_seconds / seconds, 3),
        "others used of it": round(max(course.core_busy_seconds - course.daemon_seconds, 0) / seconds, 3),
    }


def table(verdict: Verdict) -> str:
    """Return it as text."""
    run = verdict.run
    what = f"seed {run['seed']}, {run['seconds']:.0f} s of attack, intensity {run['intensity']}"
    what += f", passwords of cost {run['cost of passwords']}"
    shares = f"used {run[_USED]:.0%} of it, others and the kernel {run[_OTHERS]:.0%}"
    lines = [
        f"{what}; daemon on processor {run[_CORE]} ({shares}), all else on {run[_REST]}",
        "",
        f"{'':6}{'check':<38}{'bar':<28}result",
    ]
    marks = {True: "ok", False: "FAIL", None: ""}
    lines += [f"{marks[check.good]:<6}{check.what:<38}{check.bar:<28}{check.result}" for check in verdict.checks]
    lines += ["", f"{'attack':<40}{'episodes':>8}{'attempts':>10}{'scrape p99':>12}  what came of it"]
    for row in verdict.attacks:
        outcomes = row["outcomes"]
        assert isinstance(outcomes, dict)
        first = sorted(outcomes.items(), key=lambda item: -item[1])
        shown = ", ".join(f"{name} {number}" for name, number in first[:_SHOWN])
        more = f", {len(first) - _SHOWN} more" if len(first) > _SHOWN else ""
        lines.append(
            f"{row['attack']:<40}{row['episodes']:>8}{row['attempts']:>10}{row['scrape p99 ms']:>12}  {shown}{more}"
        )
    lines += ["", "slowest scrapes:"]
    lines += [_line(row) for row in verdict.slowest]
    if verdict.findings:
        lines += ["", "findings:", *verdict.findings]
    return "\n".join(lines)


def _line(row: dict[str, object]) -> str:
    attacks = row["attacks"]
    assert isinstance(attacks, list)
    way = "fresh" if row["fresh"] else "kept"
    waits = f"its threads waited {row['its threads waited ms']}, scraper waited {row['scraper waited ms']}"
    when = f"{row['ms']:>8} ms at {row['at']:>6} s, {way:<5}"
    return f"{when}; daemon ran {row['daemon ran ms']}, {waits}; {', '.join(attacks)} {row['lost']}"


_CORE, _REST = "daemon's processor", "others' processors"
_USED, _OTHERS = "daemon used of its processor", "others used of it"


def as_json(verdict: Verdict) -> str:
    return json.dumps(
        {
            "good": verdict.good,
            "run": verdict.run,
            "checks": {
                check.what: {"result": check.result, "bar": check.bar, "good": check.good} for check in verdict.checks
            },
            "attacks": verdict.attacks,
            "slowest": verdict.slowest,
            "findings": verdict.findings,
        },
        indent=1,
    )
