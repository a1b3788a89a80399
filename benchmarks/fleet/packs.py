"""Compares what packs of rules cost Prometheus: their expressions evaluated over one head, while nothing else happens.

`python -m benchmarks.fleet.packs alerts OTHER...`: folders of rule files, such as those of an earlier commit.
Prometheus scrapes the simulated fleet and evaluates our rules until all windows are full, and what only other packs
record, so that their rules find what they read; then scrapes and rules end, and the expressions of each pack are asked
as of that moment, each group as often as in twenty minutes of life. The processor time of that is the pack's share of a
core, with the garbage it leaves; storing the results is not in it. A collection of garbage falls on the group that
happens to run: so often, a pack's sum has them all, and a group's own figure is steady only over many rounds.

Owns the order of the measurement. Needs Debian's package prometheus.
"""

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from urllib.parse import quote

import yaml
from msgspec import Struct
from msgspec.structs import replace

from benchmarks.fleet.past import remember
from benchmarks.fleet.server import Server, Size, check, prometheus, settled
from benchmarks.rig.daemon import cpu_seconds, running
from tests.e2e.pace import milliseconds

_FULL_SECONDS = 180
"""Time beyond the longest window, in which rules of rules are evaluated."""
ROUND_SECONDS = 1200
"""In which each of our groups is evaluated a whole number of times."""
_QUICK_NODES = 50
"""Fleets below this are for trying it out: they are not waited for until all windows are full."""


class Rules(Struct, frozen=True):
    """A group of rules."""

    name: str
    interval: float
    """Seconds between two evaluations."""
    expressions: tuple[str, ...]


def groups(folder: Path, *, default: str = "1m") -> Iterator[Rules]:
    """Yield the groups of a folder's rule files."""
    for path in sorted(folder.glob("*.yaml")):
        for group in yaml.safe_load(path.read_text(encoding="utf-8"))["groups"]:
            exprs = tuple(rule["expr"] for rule in group["rules"])
            yield Rules(group["name"], milliseconds(group.get("interval", default)) / 1000, exprs)


def turns(pack: Sequence[Rules]) -> list[int]:
    """Give which groups are evaluated in a round, one after the other, as their intervals have it."""
    due = [(turn * rules.interval, number) for number, rules in enumerate(pack) for turn in range(_times(rules))]
    return [number for _, number in sorted(due)]


def _times(rules: Rules) -> int:
    return round(ROUND_SECONDS / rules.interval)


def _still(server: Server, size: Size) -> float:
    """Wait until what the rules read is there; then end scrapes and rules, and return the moment to ask about."""
    settled(server, size.nodes + 1)
    time.sleep(size.warm_up + (_FULL_SECONDS if size.nodes >= _QUICK_NODES else 0))
    check(server, size.nodes + 1)
    at = time.time() - 5
    server.forget_rules(scrapes=True)
    return at


def _spent(server: Server, rules: Rules, at: float) -> float:
    """Return the processor seconds of one evaluation. Raises RuntimeError for an expression that fails."""
    before = cpu_seconds(server.pid)
    for expr in rules.expressions:
        server.ask(f"query?time={at:.3f}&query={quote(f'count({expr})')}")
    return cpu_seconds(server.pid) - before


def compare(folders: Sequence[Path], size: Size, rounds: int) -> Iterator[str]:
    """Yield lines: of each pack its share of a core, round by round, and the mean of its groups."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory()))
        fleet = stack.enter_context(running(["-m", "benchmarks.fleet.site", f"{size.nodes}"]))
        server = stack.enter_context(prometheus(folder, fleet.port, size, remember, others=folders))
        at = _still(server, size)
        packs = {path: list(groups(path)) for path in folders}
        shares: dict[Path, list[list[float]]] = {path: [] for path in folders}
        for _ in range(rounds):
            for path, pack in packs.items():
                row = [0.0] * len(pack)
                for number in turns(pack):
                    row[number] += 100 * _spent(server, pack[number], at) / ROUND_SECONDS
                shares[path].append(row)
    for path, pack in packs.items():
        totals = [sum(row) for row in shares[path]]
        yield f"{path}: {sum(totals) / rounds:.1f} % of a core ({', '.join(f'{total:.1f}' for total in totals)})"
        means = [sum(column) / rounds for column in zip(*shares[path], strict=True)]
        for mean, rules in sorted(zip(means, pack, strict=True), key=lambda row: -row[0]):
            yield f"  {mean:5.2f} %  {rules.name}, every {rules.interval:.0f} s"


def main(arguments: Sequence[str]) -> int:
    """Print the comparison."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("packs", nargs="+", type=Path, metavar="FOLDER", help="folder of rule files")
    parser.add_argument("--nodes", type=int, default=1250, help="simulated nodes of eight GPUs; 1250")
    parser.add_argument("--rounds", type=int, default=3, help="twenty minutes each; 3")
    options = parser.parse_args(arguments)
    size = Size(nodes=options.nodes, every=120, own_intervals=False)
    if options.nodes < _QUICK_NODES:
        size = replace(size, scrape=2, every=2, warm_up=12)
    for line in compare(options.packs, size, options.rounds):
        sys.stdout.write(f"{line}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
