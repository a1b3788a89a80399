"""A red team against one daemon with everything switched on: does it live, answer and count right?

    python -m tests.fuzz.redteam [--minutes 30] [--seed N] [--only "ATTACK"] [--cost N] [--json FILE]

Prints a table and JSON; status 1 where something did not hold, 2 where it could not be run. Full strength needs root:
other users, control groups and a memory limit are left out without.
"""

import argparse
import sys
import time
from pathlib import Path

from tests.fuzz.redteam.campaign import ATTACKS, Plan, run
from tests.fuzz.redteam.logins import COST
from tests.fuzz.redteam.verdict import as_json, judge, table


def main() -> int:
    words = argparse.ArgumentParser(prog="python -m tests.fuzz.redteam", description=__doc__, add_help=True)
    words.add_argument("--minutes", type=float, default=30.0, help="of attack")
    words.add_argument("--seed", type=int, default=time.time_ns() % 100_000, help="of the dice; it is printed")
    words.add_argument("--settle", type=float, default=65.0, help="seconds of honest scrapes before the attack")
    words.add_argument("--intensity", type=float, default=1.0, help="share of connections, processes and messages")
    words.add_argument("--overlap", type=int, default=3, help="attacks at the same time")
    words.add_argument(
        "--only", action="append", choices=list(ATTACKS), default=[], help="this attack; may be repeated"
    )
    words.add_argument("--cost", type=int, default=COST, help="of bcrypt, for the hashes of passwords")
    words.add_argument("--json", type=Path, help="file for the JSON, else it follows the table")
    words.add_argument("--log", type=Path, help="file for a copy of the daemon's log")
    given = words.parse_args()
    plan = Plan(
        given.minutes * 60, given.seed, given.settle, given.intensity, given.overlap, tuple(given.only), given.cost
    )
    course = run(plan, lambda text: print(text, file=sys.stderr, flush=True))
    verdict = judge(course)
    print(table(verdict))
    if given.json:
        given.json.write_text(as_json(verdict), encoding="utf-8")
    else:
        print(as_json(verdict))
    if given.log:
        given.log.write_text(course.log, encoding="utf-8")
    return 0 if verdict.good else 1


if __name__ == "__main__":
    sys.exit(main())
