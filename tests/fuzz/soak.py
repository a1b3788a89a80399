"""A node under fifty hostile connections: does it miss a second, and does who has a right to it get its page?

    python -m tests.fuzz.soak [--minutes 60]

Owns the node (eight simulated GPUs behind the real loop and the real server, TLS, a password), the attackers
(`tests.fuzz.hostile`), an honest reader once a second, and the figures. What it found is printed; status 1
where a tick was late, a second was unobserved or a scrape had no answer.
"""

import argparse
import contextlib
import os
import re
import ssl
import subprocess
import sys
import tempfile
import time
from base64 import b64encode
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPException, HTTPSConnection
from pathlib import Path
from statistics import median

import bcrypt
from msgspec import Struct

from benchmarks.figures import Row, percentile
from benchmarks.group import Group, Measured, Table
from benchmarks.rig.daemon import Daemon, cpu_seconds, running
from tests.fuzz.hostile import EACH, KINDS

_COUNTED = ("late_ticks_total", "ticks_total", "unobserved_seconds_total", "conservation_errors_total", "errors_total")
_PACE = 1.0
"""Seconds between two scrapes."""
_FULL_SECONDS = 300.0
_PATIENCE = 10.0
"""Prometheus' own scrape timeout."""


class Reader:
    """Scrapes as Prometheus does: over a connection that it keeps, and once anew where that was closed."""

    def __init__(self, port: int, word: str) -> None:
        self._port = port
        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        self._context.check_hostname, self._context.verify_mode = False, ssl.CERT_NONE
        self._line: HTTPSConnection | None = None
        self._headers = {"Authorization": "Basic " + b64encode(f"ada:{word}".encode()).decode()}
        self.times: list[float] = []
        self.reconnected, self.failures = 0, list[str]()

    def scrape(self) -> str:
        """Give the page; empty where there was no answer, and why is kept."""
        begun = time.monotonic()
        for _ in range(2):
            try:
                page = self._get()
            except (OSError, HTTPException) as err:
                self.close()
                why = f"{type(err).__name__}: {err}"
            else:
                self.times.append(time.monotonic() - begun)
                return page
        self.failures.append(f"{time.strftime('%H:%M:%S')} {why}")
        return ""

    def _get(self) -> str:
        if self._line is None:
            self._line = HTTPSConnection("127.0.0.1", self._port, timeout=_PATIENCE, context=self._context)
            self.reconnected += 1
        self._line.request("GET", "/metrics", headers=self._headers)
        answer = self._line.getresponse()
        body = answer.read().decode()
        if answer.status != 200:
            raise HTTPException(f"status {answer.status}: {body[:80]}")
        return body

    def close(self) -> None:
        """Give the connection up."""
        if self._line is not None:
            self._line.close()
        self._line = None


class Found(Struct):
    """What the soak came to."""

    seconds: float = 0
    counts: dict[str, float] = {}
    """Growth of the counters from the first scrape under attack to the last."""
    times: list[float] = []
    failures: list[str] = []
    reconnected: int = 0
    memory: list[float] = []
    """Resident MiB at each scrape."""
    files: int = 0
    """Most open files at a scrape."""
    cpu: float = 0
    """Share of a core."""
    attackers: str = ""

    @property
    def undisturbed(self) -> bool:
        """No late tick, no unobserved second, no error, no tick left out, no scrape without an answer."""
        counted = [self.counts[name] for name in _COUNTED if name != "ticks_total"]
        return not (any(counted) or self.failures) and self.counts["ticks_total"] >= self.seconds - 2


def soak(seconds: float) -> Found:
    """Attack for so long; raises RuntimeError where the node does not start."""
    word = os.urandom(9).hex()
    with tempfile.TemporaryDirectory() as folder:
        config = web_config(Path(folder), word)
        with running(["-m", "benchmarks.rig.node", f"{config}"]) as daemon:
            reader = Reader(daemon.port, word)
            try:
                return _watch(daemon, reader, word, seconds)
            finally:
                reader.close()


def web_config(folder: Path, word: str) -> Path:
    """A key, a certificate and a web configuration file with the user ada."""
    key = "openssl req -x509 -newkey rsa:2048 -nodes -keyout key.pem -out cert.pem -days 30 -subj /CN=localhost"
    subprocess.run(key.split(), cwd=folder, check=True, capture_output=True)
    users = f"basic_auth_users: {{ada: '{bcrypt.hashpw(word.encode(), bcrypt.gensalt(10)).decode()}'}}\n"
    (folder / "web.yml").write_text(f"tls_server_config: {{cert_file: cert.pem, key_file: key.pem}}\n{users}")
    return folder / "web.yml"


def _watch(daemon: Daemon, reader: Reader, word: str, seconds: float) -> Found:
    found = Found()
    _settle(reader)
    reader.times.clear()
    with _attackers(daemon.port, word, found):
        before, cpu, begun = _counts(reader.scrape()), cpu_seconds(daemon.pid), time.monotonic()
        after = before
        while (spent := time.monotonic() - begun) < seconds:
            time.sleep(_PACE)
            after = _counts(reader.scrape()) or after
            found.memory.append(_resident(daemon.pid))
            found.files = max(found.files, len(list(Path(f"/proc/{daemon.pid}/fd").iterdir())))
        found.cpu = (cpu_seconds(daemon.pid) - cpu) / spent
    found.seconds, found.times, found.failures = spent, reader.times, reader.failures
    found.reconnected = reader.reconnected
    found.counts = {name: after[name] - before[name] for name in _COUNTED}
    return found


def _settle(reader: Reader) -> None:
    """Wait for live ticks: the first come before there is a baseline."""
    first = _counts(reader.scrape())["ticks_total"]
    until = time.monotonic() + 60
    while time.monotonic() < until and _counts(reader.scrape())["ticks_total"] < first + 5:
        time.sleep(0.5)


@contextmanager
def _attackers(port: int, word: str, found: Found) -> Iterator[None]:
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.fuzz.hostile", f"{port}", word], stdout=subprocess.PIPE, text=True
    )
    try:
        yield
    finally:
        process.terminate()
        try:
            found.attackers, _ = process.communicate(timeout=20)
        finally:
            process.kill()


def _counts(page: str) -> dict[str, float]:
    """Sums of the counters over their labels; empty for no page."""
    return {name: sum(map(float, _values(name, page))) for name in _COUNTED if page}


def _values(name: str, page: str) -> list[str]:
    return re.findall(rf"^gpu_efficiency_{name}(?:\{{.*\}})? (\S+)$", page, re.MULTILINE)


def _resident(pid: int) -> float:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE") / 2**20


def told(found: Found) -> str:
    """The figures, a line each."""
    ms = sorted(1e3 * one for one in found.times) or [float("nan")]
    kept = found.memory
    return "\n".join(
        [
            f"{found.seconds:.0f} s under {EACH * len(KINDS)} hostile connections of {len(KINDS)} kinds",
            *(f"{name}: {found.counts[name]:g} more" for name in _COUNTED),
            f"scrapes: {len(found.times)} answered, {len(found.failures)} not; {found.reconnected} connections made",
            f"scrape: {percentile(ms, 0.5):.1f} ms median, {percentile(ms, 0.99):.1f} ms p99, {ms[-1]:.1f} ms at most",
            f"resident: {kept[0]:.0f} MiB at first, {max(kept):.0f} at most, {kept[-1]:.0f} at last",
            f"open files: {found.files} at most; CPU: {100 * found.cpu:.0f} % of a core",
            *found.failures[:20],
            found.attackers.strip(),
        ]
    )


def rows(found: Found) -> list[Row]:
    """The same as lines of the table."""
    ms = [1e3 * one for one in found.times] or [float("inf")]
    often = f"{found.seconds:.0f} s under {EACH * len(KINDS)} hostile connections of {len(KINDS)} kinds"
    disturbed = sum(found.counts[name] for name in _COUNTED if name != "ticks_total")
    return [
        _row(
            "late ticks, unobserved seconds, errors, parts that do not add up",
            often,
            f"{disturbed:g}",
            "",
            budget="0",
            met=not disturbed,
        ),
        _row(
            "ticks of one a second that did not come",
            often,
            f"{max(0, found.seconds - 2 - found.counts['ticks_total']):.0f}",
            f"{found.counts['ticks_total']:.0f} came",
            budget="0",
            met=found.counts["ticks_total"] >= found.seconds - 2,
        ),
        _row(
            "honest scrapes without an answer",
            f"{len(found.times) + len(found.failures)} scrapes",
            f"{len(found.failures)}",
            f"{found.reconnected} connections made",
            budget="0",
            met=not found.failures,
        ),
        _row(
            "an honest scrape: TLS, a password",
            f"{len(found.times)} scrapes",
            f"{percentile(ms, 0.5):.1f} ms",
            f"p99 {percentile(ms, 0.99):.1f} ms, max {max(ms):.1f} ms",
            budget=f"<= {_PATIENCE:g} s, Prometheus' own patience",
            met=max(ms) <= 1e3 * _PATIENCE,
        ),
        _row(
            "resident memory under attack",
            f"{len(found.memory)} looks",
            f"{median(found.memory):.0f} MiB",
            f"{found.memory[0]:.0f} at first, {max(found.memory):.0f} at most, {found.memory[-1]:.0f} at last",
        ),
        _row("open files at most, and the processor", often, f"{found.files}", f"{100 * found.cpu:.0f} % of a core"),
    ]


def _row(what: str, often: str, value: str, spread: str, *, budget: str = "", met: bool | None = None) -> Row:
    return Row(group="soak", what=what, often=often, median=value, spread=spread, budget=budget, met=met)


def run() -> Measured:
    """Five minutes of it."""
    return _measured(_FULL_SECONDS)


def quick() -> Measured:
    """Five seconds of it."""
    return _measured(5.0)


def _measured(seconds: float) -> Measured:
    found = soak(seconds)
    got = tuple(tuple(line.rsplit(": ", 1)) for line in found.attackers.splitlines() if ": " in line)
    return Measured(rows=rows(found), tables=[Table(about="What the attackers got", head=("what", "times"), rows=got)])


SOAK = Group(
    name="soak",
    title="A web server under hostile clients",
    about=(
        "Eight simulated GPUs behind the real loop and the real server with TLS and a password, a reading a "
        f"second. Beside an honest reader, which scrapes once a second, {EACH * len(KINDS)} workers of {len(KINDS)} "
        "kinds attack from a process that is nice: connections that never speak, half handshakes, headers a byte "
        "at a time, readers that do not read, crowds, guessed passwords, floods of connections, headers and bodies "
        "without end, pipelines, and one with the password that asks as fast as it may. All on loopback of one "
        "machine, so the attackers' processor time is in what an honest scrape takes. A longer one: python -m "
        "tests.fuzz.soak --minutes 60."
    ),
    measures=("exporter/web", "exporter/connections.py", "exporter/agent", "exporter/core/exposition.py"),
    run=run,
    quick=quick,
)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=60)
    found = soak(60 * parser.parse_args().minutes)
    print(told(found))
    print("undisturbed" if found.undisturbed else "DISTURBED")
    return not found.undisturbed


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        sys.exit(main())
