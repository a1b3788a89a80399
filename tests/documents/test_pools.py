"""The tables of docs/security.md: each figure of a limit is the code's, and each test that is named exists."""

import ast
from collections.abc import Iterator
from functools import cache

from exporter.cli import gateway as gateway_command
from exporter.config import HistorySettings, ReportsSettings
from exporter.core.exposition import MAX_LABEL_LENGTH
from exporter.core.model import SECOND
from exporter.core.policy import Policy
from exporter.engines import scraper
from exporter.history.recorder import MOST_QUEUED
from exporter.logs import MOST_ALIKE
from exporter.nccl import files as plugin_files
from exporter.nccl import flight_recorder, investigator, ras
from exporter.schedulers.kubernetes import publisher
from exporter.training import http_connections, http_server, inbox, peer
from exporter.training.logs import watcher
from exporter.training.unix_socket import OTHER_DESCRIPTORS
from exporter.web import gateway, security
from exporter.web.limits import ConnectionLimits
from tests.documents.blocks import ROOT
from tests.each import each

PAGE = (ROOT / "docs" / "security.md").read_text(encoding="utf-8")
KIB, MIB = 1 << 10, 1 << 20
WEB, REPORTS, POLICY = ConnectionLimits(), ReportsSettings(), Policy()
CHECKER = security.PasswordChecker({"ada": "$2b$04$" + "." * 53})
GUESSES, OTHERS, OF_ADDRESS = CHECKER._overall[True], CHECKER._overall[False], CHECKER._per_address


def number(value: float) -> str:
    assert value == round(value), f"{value} is not whole: write it otherwise"
    return f"{round(value):,}"


def binary(size: float, unit: int) -> str:
    return f"{number(size / unit)} {'MiB' if unit == MIB else 'KiB'}"


def percent(share: float) -> str:
    return f"{share * 100:g} %"


POOLS: dict[str, tuple[str, ...]] = {
    "connections of the web server": (number(WEB.connections), f"one /64) {number(WEB.per_address)}"),
    "TLS handshakes in progress": (
        f"{number(WEB.handshakes)}; of one address {number(WEB.handshakes_per_address)}",
    ),
    "new connections, requests": (
        f"{number(WEB.crowd_burst)} at once, {number(WEB.crowd_per_second)} a second",
        f"newcomers {number(WEB.newcomers_burst)} and {number(WEB.newcomers_per_second)}",
        f"{number(WEB.new_burst)} new connections at once, {number(WEB.new_per_second)} a second",
    ),
    "requests in work": (f"of one address {number(WEB.requests_per_address)}",),
    "responses that clients have not read": (binary(WEB.unsent_bytes, MIB),),
    "checks of passwords": (
        f"{percent(GUESSES.rate)} of a processor, {number(GUESSES.burst)} s of it at once, for addresses that failed",
        f"{percent(OTHERS.rate)}, {number(OTHERS.burst)} s at once, for others",
        f"of one address {number(OF_ADDRESS.burst)} at once, one in {number(1 / OF_ADDRESS.rate)} seconds",
        f"{number(security._MAX_WAITING)} wait",
    ),
    "requests of the gateway": (
        f"{number(gateway._REQUESTS)} in work; of one user {number(gateway._USER_REQUESTS)}",
        f"{binary(gateway_command._MAX_BYTES, MIB)} from the nodes",
        f"{number(gateway_command._LIMITS.per_address)} connections of a uid",
        f"after {number(gateway._WAIT_SECONDS)} s 503",
    ),
    "connections of the report socket": (
        f"{number(REPORTS.processes)} (`reports.processes`); of one process {number(inbox.CONNECTIONS_EACH)}",
    ),
    "file descriptors of the daemon": (f"and {number(OTHER_DESCRIPTORS)} more",),
    "connections of `reports.http`": (
        f"{number(http_server._CONNECTIONS)}, and {number(http_server._AT_ONCE)} accepted at once",
        f"of one user {number(http_connections.NEW_BURST)} new ones at once,",
        f"at once, {number(http_connections.NEW_PER_SECOND)} a second |",
    ),
    "processor time for finding the process behind an HTTP connection": (
        f"{percent(peer._SHARE_OF_ALL)} of a processor; for one user {percent(peer._SHARE_OF_USER)}",
    ),
    "queue of reports": (
        f"{number(inbox.MOST_WAITING)}; {number(inbox.MOST_UNIDENTIFIED)} of processes",
        f"{number(REPORTS.per_second)} a second of one process",
    ),
    "bytes of followed logs": (
        f"{binary(watcher.ALL_RATE, KIB)} a second; of one user {binary(watcher.USER_RATE, KIB)}",
    ),
    "followed logs": (number(watcher.MOST_FILES),),
    "files of NCCL's profiler plugins": (
        f"{number(plugin_files.MOST_PROCESSES)} processes, {number(plugin_files.MOST_PROCESSES_OF_A_JOB)} of one job",
        f"{binary(plugin_files.POLL_BYTES, MIB)} a poll, {binary(plugin_files.USER_BYTES, MIB)} of one user",
    ),
    "pages of engines in work": (f"{number(scraper.MAX_PAGES)}; of one job {number(scraper.MAX_PAGES_OF_JOB)}",),
    "memory for a page of an engine": (f"{binary(scraper.LIMIT_BYTES, MIB)}, {number(scraper.MAX_LINES)} lines",),
    "processor time for an engine's page": (
        f"{percent(1 / scraper.COST_SHARE)} of a processor", f"every {number(scraper.LONGEST_COST_WAIT / SECOND)} s",
    ),
    "questions to jobs that may hang": (f"{number(investigator.MOST_JOBS)} jobs, one after the other",),
    "memory for an answer of RAS": (f"{binary(ras.LIMIT_BYTES, MIB)}, {number(ras.MOST_VALUES)} values",),
    "memory for a Flight Recorder's dump": (
        f"{binary(flight_recorder.LIMIT_BYTES, MIB)}, {number(flight_recorder.MOST_VALUES)} values",
    ),
    "answers of RAS, kept for the next comparison": (f"{number(investigator.MOST_KEPT)} values",),
    "series of jobs and runs": (f"{number(POLICY.max_jobs)} jobs", f"{number(POLICY.max_runs)} runs"),
    "the text of a label": (f"{number(MAX_LABEL_LENGTH)} characters",),
    "series of accounts": (number(POLICY.max_accounts),),
    "job reports that wait for the store": (number(MOST_QUEUED),),
    "job reports that wait for the API server": (number(publisher._MOST_WAITING),),
    "the store": (f"{number(HistorySettings().max_mebibytes)} MiB",),
    "lines of the daemon's log": (f"{number(MOST_ALIKE)} of one kind a minute",),
}  # fmt: skip
"""What the row of each pool must contain, from the code."""

CONNECTIONS: dict[str, tuple[str, ...]] = {
    "connections in total": (number(WEB.connections),),
    "connections of one address (IPv6: of one /64)": (number(WEB.per_address),),
    "new connections of one address": (
        f"{number(WEB.new_burst)} at once, {number(WEB.new_per_second)} a second",
    ),
    "new connections of the crowd, all together": (
        f"{number(WEB.crowd_burst)} at once, {number(WEB.crowd_per_second)} a second",
        f"newcomers {number(WEB.newcomers_burst)} and {number(WEB.newcomers_per_second)} before that",
    ),
    "requests of one address, while others are connected": (
        f"{number(WEB.requests_burst)} at once, {number(WEB.requests_per_second)} a second",
    ),
    "requests of the crowd, all together": (
        f"{number(WEB.crowd_burst)} at once, {number(WEB.crowd_per_second)} a second",
        f"newcomers {number(WEB.newcomers_burst)} and {number(WEB.newcomers_per_second)} before that",
    ),
    "TLS handshakes in progress": (f"{number(WEB.handshakes)}, of one address {number(WEB.handshakes_per_address)}",),
    "handshake": (f"{number(WEB.handshake_seconds)} s",),
    "a whole request, from its first byte": (f"{number(WEB.request_seconds)} s",),
    "until the client has received a response": (f"{number(WEB.answer_seconds)} s",),
    "pause between requests": (f"{number(WEB.idle_seconds)} s",),
    "requests of one address at once": (number(WEB.requests_per_address),),
    "headers": (binary(WEB.header_bytes, KIB),),
    "everything sent with a request": (binary(WEB.request_bytes, KIB),),
    "responses not yet received": (f"{binary(WEB.unsent_bytes, MIB)} in total",),
    "rejected requests of one address (401, 403, 405, 429)": (
        f"{number(WEB.refusals_burst)} at once, {number(WEB.refusals_per_second)} a second",
        f"waits {number(WEB.refusal_seconds)} s",
    ),
    "methods other than GET and HEAD": ("405",),
}  # fmt: skip


def rows(heading: str) -> Iterator[list[str]]:
    """Yield the cells of each row of the table below the heading."""
    section = PAGE[PAGE.index(f"{heading}\n") + len(heading) :].split("\n#", 1)[0]
    table = [line for line in section.splitlines() if line.startswith("| ")]
    for line in table[1:]:
        yield [cell.strip() for cell in line.strip("|").split("|")]


@each("heading, figures", [("### What is shared, and who can fill it", POOLS),
                           ("## Limits of connections and requests", CONNECTIONS)])  # fmt: skip
def test_each_limit_is_the_codes(heading: str, figures: dict[str, tuple[str, ...]]) -> None:
    found = {cells[0]: " | ".join(cells[1:]) for cells in rows(heading)}
    assert list(found) == list(figures)
    for pool, phrases in figures.items():
        for phrase in phrases:
            assert phrase in found[pool], f"{pool}: the code says {phrase!r}"


@cache
def functions_of(path: str) -> frozenset[str]:
    """Return the names of a file's functions."""
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    return frozenset(node.name for node in tree.body if isinstance(node, ast.FunctionDef))


@each("heading", ["### What is shared, and who can fill it", "### Who proves who somebody is"])
def test_what_each_row_promises_is_shown_by_tests(heading: str) -> None:
    for *_, shown in rows(heading):
        for test in shown.split(", "):
            path, _, name = test.strip("`").partition("::")
            assert name in functions_of(path), test


def test_first_logins_have_as_much_as_guesses() -> None:
    assert OTHERS.rate == GUESSES.rate
    assert OTHERS.burst >= GUESSES.burst
