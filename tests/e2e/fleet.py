"""A small fleet, at the pace of `pace`: nodes, their exporters, Prometheus, Alertmanager, and whoever is told.

Owns the processes, their ports and their end. Refuses to say what happens in that world, and what should come of it.
"""

import json
import os
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import yaml
from msgspec import Struct

from exporter.core.model import Observation
from exporter.trace import TraceError, TraceHeader, TraceWriter
from tests.e2e import pace
from tests.e2e.pace import faster, faster_routes, faster_rules, sooner
from tests.e2e.running import ROOT, Program, command, environment, running
from tests.ports import free_port
from tests.waiting import PATIENCE, wait_for

RULES = sorted((ROOT / "alerts").glob("*.yaml"))
ROUTES = ROOT / "alerts" / "examples" / "alertmanager.yaml"
_PACE = {"scrape_interval": "15s", "scrape_timeout": "15s", "evaluation_interval": "1m"}
_RESEND = "5m"
"""Alertmanager takes an alert for resolved that Prometheus has not sent again for four times as long. With Prometheus'
default of a minute that is ten seconds at the first pace, for which a busy machine may keep either of them waiting."""
_TROUBLE = re.compile(r"(?i)level=error|evaluating rule failed|template failed")
"""What Prometheus says of rules that it cannot use."""
_SERVING = re.compile(r"serving http://\S+:(\d+)/")


class Told(Struct, frozen=True):
    """One alert of one notification, as the webhook was told it."""

    at: float
    """time.monotonic() of its arrival."""
    receiver: str
    status: str
    labels: dict[str, str]
    annotations: dict[str, str]

    @property
    def name(self) -> str:
        return self.labels["alertname"]

    @property
    def text(self) -> str:
        return f"{self.annotations['summary']}\n{self.annotations['description']}"


class Inbox:
    """Everything that Alertmanager has sent, in order."""

    def __init__(self) -> None:
        self.told: list[Told] = []
        inbox = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                at, body = time.monotonic(), json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                inbox.told += [
                    Told(at, body["receiver"], a["status"], a["labels"], a["annotations"]) for a in body["alerts"]
                ]
                self.send_response(200)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *_: object) -> None:
                """Keep still: the test speaks."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05})
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def __str__(self) -> str:
        return "\n".join(f"{t.at:.2f} {t.receiver} {t.status} {t.labels} {t.annotations}" for t in self.told)


class Node(Struct):
    """A simulated node: what it tells through a pipe, and the exporter that replays it."""

    name: str
    story: Iterable[Observation]
    pipe: Path
    program: Program
    port: int = 0

    def tell(self, begin: threading.Event) -> None:
        """Write the header at once, so that the exporter serves, and the story once it may `begin`."""
        header = TraceHeader(host=self.name, simulated=True)
        with suppress(TraceError), TraceWriter(self.pipe, header, overwrite=True) as out:
            begin.wait()
            for seen in self.story:
                out.append(faster(seen))

    def serves(self) -> bool:
        """Whether it says where it serves."""
        found = self.program.alive() and _SERVING.search(self.program.log())
        self.port = int(found[1]) if found else 0
        return bool(found)

    def kill(self) -> None:
        """As the kernel does when memory is short: no word of farewell."""
        self.program.process.kill()
        self.program.process.wait()


class Fleet(Struct):
    """The running world."""

    nodes: list[Node]
    inbox: Inbox
    client: httpx.Client
    """Asks Prometheus."""
    prometheus: Program
    began: float
    """time.monotonic() when all nodes began to tell."""

    def minute(self, at: float) -> float:
        """What minute of the world it is at that moment of ours."""
        return (at - self.began) * pace.FASTER / 60

    def until(self, true: Callable[[], Any], what: str, *, minute: float) -> None:
        """Wait until it is true, at the latest in that minute of the world."""
        left = self.began + minute * 60 / pace.FASTER - time.monotonic()
        try:
            wait_for(lambda: self.prometheus.alive() and true(), f"{what}, by minute {minute:g}", seconds=left)
        except AssertionError as err:
            err.add_note(f"told by then:\n{self.inbox}")
            raise

    def overtaken(self) -> bool:
        """Whether Prometheus missed evaluations of rules: the machine is too slow for this pace."""
        missed = re.findall(
            r"^prometheus_rule_group_iterations_missed_total\{.*\} (\S+)$", self._own_page(), re.MULTILINE
        )
        assert missed
        return any(float(count) for count in missed)

    def _own_page(self) -> str:
        return self.client.get("/metrics").text

    def ask(self, query: str) -> list[dict[str, str]]:
        """Labels of all series that the query finds."""
        answer = self.client.get("/api/v1/query", params={"query": query}).json()
        assert answer["status"] == "success", answer
        return [row["metric"] for row in answer["data"]["result"]]


@contextmanager
def fleet(folder: Path, stories: Mapping[str, Iterable[Observation]], config: str) -> Iterator[Fleet]:
    """Run the world from its beginning until the block ends; the exporters read that configuration."""
    (folder / "exporter.toml").write_text(config)
    begin = threading.Event()
    with ExitStack() as stack:
        inbox = Inbox()
        stack.callback(inbox.close)
        nodes = [_node(stack, folder, name, story) for name, story in stories.items()]
        tellers = [threading.Thread(target=node.tell, args=(begin,), daemon=True) for node in nodes]
        for teller in tellers:
            teller.start()
        manager = _manager(stack, folder, inbox.url)
        for node in nodes:
            wait_for(node.serves, f"{node.name} says where it serves")
        client, prometheus = _prometheus(stack, folder, {node.name: node.port for node in nodes}, manager)
        begin.set()
        yield Fleet(nodes, inbox, client, prometheus, began=time.monotonic())
        _end(nodes, tellers)
        assert not _TROUBLE.findall(prometheus.log()), prometheus.log()


def _node(stack: ExitStack, folder: Path, name: str, story: Iterable[Observation]) -> Node:
    pipe = folder / f"{name}.jsonl"
    os.mkfifo(pipe)
    words = command("replay", f"{pipe}", "--serve", "--config", f"{folder / 'exporter.toml'}")
    listen = ["--web.listen-address", "127.0.0.1:0"]
    return Node(name, story, pipe, stack.enter_context(running(words + listen, folder / f"{name}.log", environment())))


def _end(nodes: list[Node], tellers: list[threading.Thread]) -> None:
    """Ask all at once, then look that each ended well."""
    left = [node for node in nodes if node.program.process.poll() is None]
    for node in left:
        node.program.process.terminate()
    assert [node.program.gone() for node in left] == [0] * len(left)
    assert all("Traceback" not in node.program.log() for node in nodes)
    for teller in tellers:  # whose pipe has nobody at its other end any more
        teller.join(PATIENCE)


def _manager(stack: ExitStack, folder: Path, url: str) -> int:
    port, config = free_port(), folder / "alertmanager.yaml"
    config.write_text(yaml.safe_dump(faster_routes(ROUTES.read_text(), url)))
    words = [
        "prometheus-alertmanager", f"--config.file={config}", f"--storage.path={folder / 'alertmanager'}",
        f"--web.listen-address=127.0.0.1:{port}", "--cluster.listen-address=", "--log.level=warn",
    ]  # fmt: skip
    program = stack.enter_context(running(words, folder / "alertmanager.log", environment()))
    _client(stack, program, port)
    return port


def _prometheus(stack: ExitStack, folder: Path, targets: dict[str, int], manager: int) -> tuple[httpx.Client, Program]:
    """Scrape each node four times a minute, under its own name."""
    for rules in RULES:
        (folder / f"rules-{rules.name}").write_text(faster_rules(rules.read_text()))
    scraped = [{"targets": [f"127.0.0.1:{port}"], "labels": {"instance": name}} for name, port in targets.items()]
    config = {
        "global": {name: sooner(time) for name, time in _PACE.items()},
        "rule_files": [f"{folder}/rules-*.yaml"],
        "alerting": {"alertmanagers": [{"static_configs": [{"targets": [f"127.0.0.1:{manager}"]}]}]},
        "scrape_configs": [
            {
                "job_name": "gpu-efficiency",
                "static_configs": scraped,
                # As real nodes: no alert calls them simulated, and of those that fall silent a page is held.
                "metric_relabel_configs": [
                    {"source_labels": ["__name__"], "regex": "gpu_efficiency_simulated", "action": "drop"}
                ],
            }
        ],
    }
    (folder / "prometheus.yaml").write_text(yaml.safe_dump(config))
    port = free_port()
    words = [
        "prometheus", f"--config.file={folder / 'prometheus.yaml'}", f"--storage.tsdb.path={folder / 'tsdb'}",
        f"--web.listen-address=127.0.0.1:{port}", f"--query.lookback-delta={sooner('5m')}",
        f"--rules.alert.resend-delay={sooner(_RESEND)}", "--log.level=warn",
    ]  # fmt: skip
    program = stack.enter_context(running(words, folder / "prometheus.log", environment()))
    return _client(stack, program, port), program


def _client(stack: ExitStack, program: Program, port: int) -> httpx.Client:
    """Whom to ask, once it is ready to be asked."""
    client = stack.enter_context(httpx.Client(base_url=f"http://127.0.0.1:{port}", trust_env=False, timeout=PATIENCE))
    wait_for(lambda: program.alive() and _ready(client), f"port {port} is ready")
    return client


def _ready(client: httpx.Client) -> bool:
    try:
        return client.get("/-/ready").status_code == 200
    except httpx.TransportError:
        return False
