"""Notifications as Slack, PagerDuty and a mail server get them from a real Alertmanager, and how many there are."""

import json
import re
import socketserver
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime
from email import message_from_bytes, policy
from email.message import EmailMessage
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import httpx
import pytest
import yaml

from tests.alerts.test_alertmanager import EXAMPLE, routes
from tests.e2e.running import environment, running
from tests.ports import free_port
from tests.waiting import wait_for

pytestmark = pytest.mark.e2e

LABELS = {
    "alertname": "GPUEfficiencyJobDeadlocked",
    "severity": "page",
    "cluster": "east",
    "job_id": "7",
    "pack": "gpu-efficiency",
}
RUNBOOK, BOARD = "docs/runbooks/GPUEfficiencyJobDeadlocked.md", "/d/gpu-efficiency-zombies?var-job_id=7"
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
    """Keeps what is posted, by path."""

    got: ClassVar[dict[str, list[dict[str, Any]]]] = {}

    def do_POST(self) -> None:
        """Slack is posted to /slack, PagerDuty to /pagerduty."""
        posted = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.got.setdefault(self.path, []).append(posted)
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
    """What each of the three has been sent, at one of the three moments below."""

    def __init__(self, moment: int) -> None:
        self.slack = Web.got["/slack"][moment]
        self.pagerduty = Web.got["/pagerduty"][moment]
        self.mail = message_from_bytes(Mail.got[moment], EmailMessage, policy=policy.default)


FIRING, ONE_ENDED, RESOLVED = range(3)


@pytest.fixture(name="told", scope="module")
def _told(tmp_path_factory: pytest.TempPathFactory) -> list[Notified]:
    """Both fire; then that of team speech has ended; then both."""
    with ExitStack() as stack:
        posts = stack.enter_context(ThreadingHTTPServer(("127.0.0.1", 0), Web))
        letters = stack.enter_context(socketserver.ThreadingTCPServer(("127.0.0.1", 0), Mail))
        for server in (posts, letters):
            threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
            stack.callback(server.shutdown)
        config = _config(posts.server_address[1], letters.server_address[1])
        client = stack.enter_context(alertmanager(config, tmp_path_factory.mktemp("alertmanager")))
        for moment in (FIRING, ONE_ENDED, RESOLVED):
            _post(client, ALERTS, ended=moment)
            wait_for(lambda: len(Mail.got) > moment and _all_posted(moment), "three notifications")  # noqa: B023
        return [Notified(moment) for moment in (FIRING, ONE_ENDED, RESOLVED)]


def _all_posted(moment: int) -> bool:
    return all(len(Web.got.get(path, ())) > moment for path in ("/slack", "/pagerduty"))


def _post(client: httpx.Client, alerts: list[dict[str, Any]], *, ended: int = 0) -> None:
    """Post alerts, of which the first ones have ended."""
    now = datetime.now(UTC).isoformat()
    ends = [alert | ({"endsAt": now} if number < ended else {}) for number, alert in enumerate(alerts)]
    assert client.post("/api/v2/alerts", json=ends).status_code == 200


@pytest.fixture(name="sent", scope="module")
def _sent(told: list[Notified]) -> Notified:
    return told[FIRING]


@contextmanager
def alertmanager(content: dict[str, Any], folder: Path) -> Iterator[httpx.Client]:
    """Run an Alertmanager with that configuration, and give a client of it."""
    config = folder / "alertmanager.yaml"
    config.write_text(yaml.safe_dump(content))
    port = free_port()
    words = [
        "prometheus-alertmanager", f"--config.file={config}", f"--storage.path={folder}",
        "--cluster.listen-address=", f"--web.listen-address=127.0.0.1:{port}", "--web.external-url=http://alertmanager.example",
    ]  # fmt: skip
    with (
        running(words, folder / "said", environment()) as program,
        httpx.Client(base_url=f"http://127.0.0.1:{port}", trust_env=False) as client,
    ):
        wait_for(lambda: program.alive() and _ready(client), "Alertmanager ready")
        yield client


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
    each = [{"receiver": row["name"], "continue": True} for row in three]
    return {
        "templates": [str(EXAMPLE.with_name("gpu-efficiency.tmpl"))],
        "route": {
            "receiver": "slack", "group_by": ["cluster"], "group_wait": "1s", "group_interval": "1s", "routes": each,
        },
        "receivers": three,
    }  # fmt: skip


TITLE = f"PAGE JobDeadlocked: {ALERTS[0]['annotations']['summary']} (and 1 more)"
LINKS = {
    "https://runbooks.example/GPUEfficiencyJobDeadlocked.md", f"https://grafana.example{BOARD}",
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


def test_while_one_still_fires_the_title_is_about_that_one(told: list[Notified]) -> None:
    title = f"PAGE JobDeadlocked: {ALERTS[1]['annotations']['summary']}"
    (said,) = told[ONE_ENDED].slack["attachments"]
    assert (said["title"], said["color"]) == (title, "danger")
    assert told[ONE_ENDED].mail["Subject"] == title
    assert told[ONE_ENDED].pagerduty["payload"]["summary"] == title
    paragraphs = said["text"].split("\n\n")
    assert sorted(text.startswith("Resolved: ") for text in paragraphs) == [False, True]
    assert f"Resolved: {ALERTS[0]['annotations']['summary']}" in said["text"]


def test_what_has_ended_is_called_resolved_everywhere(told: list[Notified]) -> None:
    (said,) = told[RESOLVED].slack["attachments"]
    assert said["title"].startswith("RESOLVED JobDeadlocked: east: Job 7")
    assert said["color"] == "good"
    assert said["text"].startswith("Resolved: ")
    assert told[RESOLVED].pagerduty["event_action"] == "resolve"
    assert told[RESOLVED].pagerduty["dedup_key"] == told[FIRING].pagerduty["dedup_key"]
    mail = told[RESOLVED].mail
    parts = {part.get_content_type(): part.get_content() for part in mail.walk() if not part.is_multipart()}
    assert mail["Subject"] == said["title"]
    assert parts["text/plain"].startswith("Resolved: ")
    assert "<b>Resolved: " in parts["text/html"]


def test_nine_zombies_of_a_user_are_one_notification(tmp_path: Path) -> None:
    """By the example's own routes; only its waits are shorter, and its receivers ours."""
    content = yaml.safe_load(EXAMPLE.read_text())
    for route in routes(content["route"]):
        if "group_wait" in route:
            route["group_wait"] = "3s"
    labels = LABELS | {"alertname": "GPUEfficiencyGPUZombie", "severity": "ticket", "team": "platform"}
    jobs = [("ann", number) for number in range(9)] + [("bob", 9)]
    alerts = [{"labels": labels | {"user": user, "job_id": f"{number}"}} for user, number in jobs]
    with ThreadingHTTPServer(("127.0.0.1", 0), Web) as posts:
        threading.Thread(target=posts.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
        for receiver in content["receivers"]:
            for webhook in receiver.get("webhook_configs", ()):
                webhook["url"] = webhook["url"].replace("127.0.0.1:9095", f"127.0.0.1:{posts.server_address[1]}")
        content["templates"] = [str(EXAMPLE.with_name("gpu-efficiency.tmpl"))]
        with alertmanager(content, tmp_path) as client:
            _post(client, alerts)
            told = Web.got.setdefault("/tickets/platform", [])
            wait_for(lambda: sum(len(each["alerts"]) for each in told) == len(alerts), "all sent")
        posts.shutdown()
    assert sorted((each["commonLabels"]["user"], len(each["alerts"])) for each in told) == [("ann", 9), ("bob", 1)]
