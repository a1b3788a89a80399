"""Applies each deliberate break of mutants.toml to a copy of the repository and runs the tests that must notice it.

A mutant is killed if these tests pass without it and one of them fails with it. The working tree is not changed: each
worker has a copy of its own, with the files that git lists and those that it does not ignore.

Usage: python -m tests.mutants.run [--list] [-j WORKERS] [NAME ...]; NAME selects the mutants whose name contains it.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from pathlib import Path
from queue import SimpleQueue
from typing import NamedTuple

from tests.mutants.rows import ROOT, Mutant, mutants

PYTEST = ("-x", "-q", "--no-header", "--tb=no", "-p", "no:cacheprovider", "-p", "no:randomly", "-p", "no:xdist")
TIME_LIMIT = 120.0
"""Seconds for one run of tests; a mutant may be an endless loop."""
PASSED, FAILED, TIMED_OUT, UNREADABLE = 0, 1, -1, -2
"""Exit statuses of pytest and promtool, and ours for a run beyond the limit and for rules that promtool cannot read;
any other shows that tests were not run as asked."""
KILLED = "killed"
_FAILURE = re.compile(r"^(?:FAILED|ERROR) (\S+)|^ +(?:name|expr): (.+?),(?: time: .+)?$", re.MULTILINE)
_PASSES = re.compile(r"\d+ passed|SUCCESS")
"""What pytest and promtool print of tests that were run."""


class Outcome(NamedTuple):
    """What became of one mutant; `details` names the test that noticed it, or what to do."""

    mutant: Mutant
    verdict: str
    details: str
    seconds: float = 0.0


class Run(NamedTuple):
    """One run of tests."""

    status: int
    output: str
    seconds: float


def main(arguments: list[str]) -> int:
    """Return 0 if every selected mutant was killed, 1 if one was not, 2 if there is none or no promtool."""
    options = _options(arguments)
    chosen = [row for row in mutants() if not options.names or any(part in row.name for part in options.names)]
    if not chosen:
        sys.stderr.write(f"No mutant has {' or '.join(options.names)} in its name: --list names them all.\n")
        return 2
    if options.list:
        sys.stdout.writelines(f"{row.file}: {row.name}\n" for row in chosen)
        return 0
    if not shutil.which("promtool"):
        sys.stderr.write("promtool is missing, which tests the alerts: `make packages` installs it on Debian.\n")
        return 2
    began = time.monotonic()
    outcomes = [_printed(outcome) for outcome in _judged(chosen, workers=options.workers)]
    killed = sum(outcome.verdict == KILLED for outcome in outcomes)
    sys.stdout.write(f"{len(outcomes)} mutants, {killed} killed, {time.monotonic() - began:.0f} s\n")
    return int(killed < len(outcomes))


def _options(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants.run", description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("names", metavar="NAME", nargs="*", help="only mutants whose name contains it")
    parser.add_argument("--list", action="store_true", help="list the mutants, run nothing")
    parser.add_argument("-j", dest="workers", type=int, default=os.cpu_count() or 1, help="parallel runs of pytest")
    return parser.parse_args(arguments)


def _printed(outcome: Outcome) -> Outcome:
    sys.stdout.write(f"{outcome.verdict:8} {outcome.mutant.name}  [{outcome.details}] {outcome.seconds:.1f} s\n")
    sys.stdout.flush()
    return outcome


def _judged(chosen: Iterable[Mutant], *, workers: int) -> Iterator[Outcome]:
    """Judge mutants of the same tests one after the other, for those tests are first run without any."""
    groups: dict[tuple[str, ...], list[Mutant]] = {}
    for mutant in chosen:
        groups.setdefault(mutant.tests, []).append(mutant)
    copies: SimpleQueue[Path] = SimpleQueue()

    def judge(group: list[Mutant]) -> list[Outcome]:
        copy = copies.get()
        try:
            return list(_judge_group(copy, group))
        finally:
            copies.put(copy)

    with _copied(workers) as folders, ThreadPoolExecutor(workers) as pool:
        for folder in folders:
            _require_own_package(folder)
            copies.put(folder)
        for done in as_completed([pool.submit(judge, group) for group in groups.values()]):
            yield from done.result()


@contextmanager
def _copied(count: int) -> Iterator[list[Path]]:
    """Copy the working tree `count` times; beside each copy is `shared`, which some tests read, if there is one."""
    listed = ("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard")
    output = subprocess.run(listed, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    files = [name for name in output.split("\0") if name and (ROOT / name).exists()]
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        yield [_copy(Path(folder) / f"{number}" / ROOT.name, files) for number in range(count)]


def _copy(folder: Path, files: Iterable[str]) -> Path:
    for name in files:
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, target, follow_symlinks=False)
    for link, target in ((folder / ".venv", ROOT / ".venv"), (folder.parent / "shared", ROOT.parent / "shared")):
        if target.exists():
            link.symlink_to(target.resolve())
    return folder


def _environment(copy: Path) -> dict[str, str]:
    return os.environ | {"PYTHONPATH": f"{copy}", "PYTHONDONTWRITEBYTECODE": "1"}


def _require_own_package(copy: Path) -> None:
    """Exit unless a process in the copy imports the copy's package: an editable install names the working tree's."""
    command = (sys.executable, "-c", "import exporter; print(exporter.__file__)")
    output = subprocess.run(
        command, cwd=copy, env=_environment(copy), check=True, capture_output=True, text=True
    ).stdout
    if not Path(output.strip()).is_relative_to(copy):
        sys.exit(f"A process in {copy} imports {output.strip()}, so that mutants would not be seen: check sys.path.")


def _judge_group(copy: Path, group: list[Mutant]) -> Iterator[Outcome]:
    unchanged = _run(copy, group[0].tests)
    for mutant in group:
        if unchanged.status != PASSED:
            details = f"its tests fail without it: {_failed_test(unchanged)}; make them pass first"
            yield Outcome(mutant, "unclear", details, unchanged.seconds)
        elif not _PASSES.search(unchanged.output):
            yield Outcome(mutant, "unclear", "its tests are skipped on this machine", unchanged.seconds)
        else:
            yield _judge(copy, mutant)


def _judge(copy: Path, mutant: Mutant) -> Outcome:
    path = copy / mutant.file
    text = path.read_text(encoding="utf-8")
    try:
        _write(path, mutant.changed(text))
    except ValueError as error:
        return Outcome(mutant, "stale", str(error))
    try:
        run = _run(copy, mutant.tests)
    finally:
        _write(path, text)
    return Outcome(mutant, *_verdict(run, mutant.tests), run.seconds)


def _write(path: Path, text: str) -> None:
    """Write a source file; bytecode of the former text may have the same size and the same second."""
    path.write_text(text, encoding="utf-8")
    shutil.rmtree(path.parent / "__pycache__", ignore_errors=True)


def _verdict(run: Run, tests: tuple[str, ...]) -> tuple[str, str]:
    if run.status == FAILED:
        return KILLED, _failed_test(run)
    if run.status == PASSED:
        return "SURVIVED", f"{' '.join(tests)}: add a test that fails"
    if run.status == TIMED_OUT:
        return "hung", f"no end after {TIME_LIMIT:.0f} s: choose a break that ends"
    return "unclear", f"exit status {run.status}, the tests did not run: {run.output.strip().splitlines()[-1:]}"


def _failed_test(run: Run) -> str:
    found = _FAILURE.search(run.output)
    return found[1] or found[2] if found else f"exit status {run.status}"


def _run(copy: Path, tests: tuple[str, ...]) -> Run:
    """Run pytest on its tests, and, if these pass, promtool on its own."""
    rules = tuple(test for test in tests if test.endswith(".yaml"))
    others = tuple(test for test in tests if test not in rules)
    run = _timed(copy, (sys.executable, "-m", "pytest", *PYTEST, *others)) if others else Run(PASSED, "", 0.0)
    return _run_promtool(copy, rules) if rules and run.status == PASSED else run


def _run_promtool(copy: Path, tests: tuple[str, ...]) -> Run:
    run = _timed(copy, ("promtool", "test", "rules", *tests))
    if run.status == FAILED and "got:" not in run.output:  # it could not evaluate them
        return run._replace(status=UNREADABLE)
    return run


def _timed(copy: Path, command: tuple[str, ...]) -> Run:
    began = time.monotonic()
    try:
        done = subprocess.run(
            command, cwd=copy, env=_environment(copy), check=False, capture_output=True, text=True, timeout=TIME_LIMIT
        )
    except subprocess.TimeoutExpired:
        return Run(TIMED_OUT, "", time.monotonic() - began)
    return Run(done.returncode, done.stdout + done.stderr, time.monotonic() - began)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
