"""Notifications as Slack, PagerDuty and a mail server get them from a real Alertmanager with the templates."""

import json
import re
import socketserver
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from email import message_from_bytes, policy
from email.message import EmailMessage
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar

import httpx
import pytest
import yaml

from tests.alerts.test_alertmanager import EXAMPLE
from tests.e2e.running import environment, running
from tests.ports import free_port
from tests.waiting import wait_for

pytestmark = pytest.mark.e2e

LABELS = {"alertname": "JobDeadlocked", "severity": "page", "cluster": "east", "job_id": "7", "pack": "gpu-efficiency"}
RUNBOOK, BOARD = "docs/runbooks/JobDeadlocked.md", "/d/gpu-efficiency-zombies?var-job_id=7"
ALERTS = [
    {
        "labels": LABELS | {"team": team},
        "annotations": {
            "summary": f"east: Job 7 (train) of ann, team {team}, hangs for 5m 0s: 8 GPUs, 20.00 USD an hour",
            "description": 'None of its GPUs works. First: dump "the" stacks <of> its processes.',
            "runbook_url": RUNBOOK,
            "dashboard_url": BOARD,
        },
    }
    for team in ("speech", "vision")
]


class Web(BaseHTTPRequestHandler):
    """Keeps what is posted."""

    got: ClassVar[dict[str, dict[str, Any]]] = {}

    def do_POST(self) -> None:
        """Slack is posted to /slack, PagerDuty to /pagerduty."""
        self.got[self.path] = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.send_response(202 if self.path == "/pagerduty" else 200)
        self.send_header("Content-Length", "2")
        self.end_headers()
        self.wfile.write(b"ok")

    def log_message(self, *_: object) -> None:
        """Keep still: the test speaks."""


class Mail(socketserver.StreamRequestHandler):
    """As much of SMTP as one message needs (RFC 5321)."""

    got: ClassVar[list[bytes]] = []

    def handle(self) -> None:
        """Answer each command, and keep the message."""
        self.wfile.write(b"220 here\r\n")
        for line in self.rfile:
            match line[:4].upper():
                case b"EHLO" | b"HELO" | b"MAIL" | b"RCPT":
                    self.wfile.write(b"250 ok\r\n")
                case b"DATA":
                    self.wfile.write(b"354 go on\r\n")
                    self.got.append(b"".join(iter(self.rfile.readline, b".\r\n")))
                    self.wfile.write(b"250 ok\r\n")
                case _:
                    self.wfile.write(b"221 bye\r\n")
                    return


class Notified:
    """What each of the three has been sent."""

    slack: dict[str, Any]
    pagerduty: dict[str, Any]
    mail: EmailMessage


@pytest.fixture(name="sent", scope="module")
def _sent(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Notified]:
    folder = tmp_path_factory.mktemp("alertmanager")
    with ExitStack() as stack:
        posts = stack.enter_context(ThreadingHTTPServer(("127.0.0.1", 0), Web))
        letters = stack.enter_context(socketserver.ThreadingTCPServer(("127.0.0.1", 0), Mail))
        for server in (posts, letters):
            threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
            stack.callback(server.shutdown)
        config = folder / "alertmanager.yaml"
        config.write_text(yaml.safe_dump(_config(posts.server_address[1], letters.server_address[1])))
        port = free_port()
        words = [
            "prometheus-alertmanager", f"--config.file={config}", f"--storage.path={folder}",
            "--cluster.listen-address=", f"--web.listen-address=127.0.0.1:{port}", "--web.external-url=http://alertmanager.example",
        ]  # fmt: skip
        program = stack.enter_context(running(words, folder / "said", environment()))
        client = stack.enter_context(httpx.Client(base_url=f"http://127.0.0.1:{port}", trust_env=False))
        wait_for(lambda: program.alive() and _ready(client), "Alertmanager ready")
        assert client.post("/api/v2/alerts", json=ALERTS).status_code == 200
        wait_for(lambda: len(Web.got) == 2 and Mail.got, "three notifications")
        found = Notified()
        found.slack, found.pagerduty = Web.got["/slack"], Web.got["/pagerduty"]
        found.mail = message_from_bytes(Mail.got[0], EmailMessage, policy=policy.default)
        yield found


def _ready(client: httpx.Client) -> bool:
    try:
        return client.get("/-/ready").status_code == 200
    except httpx.TransportError:
        return False


def _config(posts: int, letters: int) -> dict[str, Any]:
    """Every alert to the three receivers of the example, which here are ours."""
    receivers = {row["name"]: row for row in yaml.safe_load(EXAMPLE.read_text())["receivers"]}
    three = [receivers[name] for name in ("slack", "mail", "pagerduty")]
    three[0]["slack_configs"][0]["api_url"] = f"http://127.0.0.1:{posts}/slack"
    three[1]["email_configs"][0] |= {"smarthost": f"127.0.0.1:{letters}", "require_tls": False}
    three[2]["pagerduty_configs"][0]["url"] = f"http://127.0.0.1:{posts}/pagerduty"
    routes = [{"receiver": row["name"], "continue": True} for row in three]
    return {
        "templates": [str(EXAMPLE.with_name("gpu-efficiency.tmpl"))],
        "route": {"receiver": "slack", "group_by": ["cluster"], "group_wait": "1s", "routes": routes},
        "receivers": three,
    }


TITLE = f"PAGE JobDeadlocked: {ALERTS[0]['annotations']['summary']} (and 1 more)"
LINKS = {
    "https://runbooks.example/JobDeadlocked.md", f"https://grafana.example{BOARD}",
}  # fmt: skip


def test_slack_gets_a_title_the_text_of_each_and_links(sent: Notified) -> None:
    (said,) = sent.slack["attachments"]
    assert said["title"] == TITLE
    assert said["title_link"] == f"https://grafana.example{BOARD}"
    assert said["color"] == "danger"
    for alert in ALERTS:
        assert f"{alert['annotations']['summary']}\n{alert['annotations']['description']}\nRunbook: " in said["text"]
    assert set(re.findall(r"https?://\S+", said["text"])) == LINKS


def test_pagerduty_gets_a_title_a_text_and_links(sent: Notified) -> None:
    payload = sent.pagerduty["payload"]
    assert payload["summary"] == TITLE
    assert (payload["severity"], payload["group"], payload["component"]) == ("critical", "east", "7")
    assert ALERTS[1]["annotations"]["summary"] in payload["custom_details"]["text"]
    assert {link["href"] for link in sent.pagerduty["links"]} == LINKS


def test_a_mail_has_both_forms_and_escapes_what_is_no_markup(sent: Notified) -> None:
    assert sent.mail["Subject"] == TITLE
    parts = {part.get_content_type(): part.get_content() for part in sent.mail.walk() if not part.is_multipart()}
    assert 'First: dump "the" stacks <of> its processes.' in parts["text/plain"]
    assert "stacks &lt;of&gt; its processes." in parts["text/html"]
    assert {link.replace("&amp;", "&") for link in re.findall(r'href="(.*?)"', parts["text/html"])} == LINKS


def test_a_whole_address_is_left_as_it_is() -> None:
    text = EXAMPLE.with_name("gpu-efficiency.tmpl").read_text()
    assert text.count('match "^https?://"') == 2
