"""The red team's runner works, and its reading of the books notices what is wrong with them."""

import json
import subprocess
import sys
from base64 import b64encode
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.fuzz.redteam.attacks.guesses import CHECKED, is_checked
from tests.fuzz.redteam.books import Books
from tests.fuzz.redteam.campaign import ATTACKS, GUESSES, Ran
from tests.fuzz.redteam.child import Child
from tests.fuzz.redteam.logins import Login
from tests.fuzz.redteam.tally import Tally
from tests.fuzz.redteam.verdict import judge_guessing

_ROOT = Path(__file__).resolve().parents[3]
_PAGE = """# TYPE gpu_efficiency_seconds_total counter
gpu_efficiency_seconds_total{{uuid="a",gpu="0",leak="hung",layer="ectr"}} 0.1
gpu_efficiency_seconds_total{{uuid="a",gpu="0",leak="useful",layer="useful"}} {useful}
gpu_efficiency_paid_seconds_total{{uuid="a",gpu="0"}} {paid}
gpu_efficiency_faults_total{{kind="x"}} {faults}
"""


def page(*, useful: str = "0.2", paid: str = "0.3", faults: str = "7") -> str:
    return _PAGE.format(useful=useful, paid=paid, faults=faults)


def test_books_that_are_right() -> None:
    books = Books()
    assert books.check(page()) == books.check(page(useful="1.2", paid="1.3", faults="8")) == []
    assert books.sums == 2
    assert books.compared == 8


def test_parts_are_compared_digit_for_digit() -> None:
    (wrong,) = Books().check(page(paid="0.3000000001"))
    assert "paid_seconds_total of a is 0.3000000001, its parts are 0.3" in wrong


def test_a_counter_that_goes_back_is_noticed_even_after_an_absence() -> None:
    books = Books()
    books.check(page())
    books.check("")
    (wrong,) = books.check(page(faults="6"))
    assert 'faults_total{kind="x"} went back from 7 to 6' in wrong


def test_a_counter_that_is_no_number_is_noticed() -> None:
    assert "is NaN" in Books().check(page(faults="NaN"))[0]


def test_tallies_come_back_from_processes() -> None:
    def work(tally: Tally) -> None:
        tally.attempt(3)
        tally.came("refused", 2)

    tally = Child(work).wait(30)
    assert (tally.attempts, dict(tally.outcomes)) == (3, {"refused": 2})


@pytest.mark.parametrize(
    ("slowest", "came", "checks", "good"),
    [(9.0, "200", 400, [True, True]), (11.0, "200", 500, [False, False]), (9.0, "429", 400, [False, True])],
)
def test_first_logins_and_the_cost_of_guesses_are_judged(
    slowest: float, came: str, checks: int, good: list[bool]
) -> None:
    """In 100 s of guessing: a check takes 60 ms; 400 are 24 % of a processor. Logins at other times do not count."""
    tally = Tally()
    tally.came(CHECKED, checks)
    course: Any = SimpleNamespace(
        episodes=[Ran(GUESSES, 0.0, 100.0)],
        tallies={GUESSES: tally},
        logins=[Login(1.0, 0.2, 1, "200"), Login(50.0, slowest, 9, came), Login(150.0, 30.0, 9, "429")],
        check_seconds=0.06,
    )
    assert [check.good for check in judge_guessing(course)] == good


def test_only_a_name_and_a_password_cost_a_hash() -> None:
    assert is_checked("Basic " + b64encode(b"ada:guess").decode())
    assert not any(map(is_checked, ("Basic %%%", "Basic", "Bearer YTpi", "Basic " + b64encode(b"ada").decode())))


def _ran(out: Path, minutes: float) -> Any:
    words = ["--minutes", f"{minutes}", "--settle", "1", "--intensity", "0.03", "--overlap", "10", "--seed", "7"]
    ran = subprocess.run(
        [sys.executable, "-m", "tests.fuzz.redteam", *words, "--json", f"{out}"],
        cwd=_ROOT, check=False, capture_output=True, text=True,
    )  # fmt: skip
    assert ran.returncode in {0, 1}, ran.stderr
    assert "Traceback" not in ran.stderr, ran.stderr
    return json.loads(out.read_text())


@pytest.mark.e2e
def test_the_runner_runs(tmp_path: Path) -> None:
    """Every class attacks, in small; times are not judged, for this machine may do anything else meanwhile."""
    for minutes in (0.08, 0.4, 2.0):  # on a busy machine an attack may not come to its first attempt
        found = _ran(tmp_path / "out", minutes)
        attacked = {row["attack"] for row in found["attacks"] if row["attempts"]}
        if attacked == set(ATTACKS):
            break
    assert attacked == set(ATTACKS)
    for check in ("daemon", "killed for memory", "counters that went back", "books that do not add up"):
        assert found["checks"][check]["good"], found
