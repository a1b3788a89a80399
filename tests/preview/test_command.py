"""Tests `gpu-efficiency preview`: its output, its errors and its progress."""

import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from msgspec.structs import replace

from exporter.cli import main
from exporter.preview.scoring import WIDTH
from exporter.trace import TraceHeader, TraceWriter
from exporter.web.security import WebConfigWatcher
from tests.certificates import Authority
from tests.preview.commands import preview
from tests.web.serving import served
from tests.worlds import JOB, RESTING, WORKING, S, device, first, held, reading, seen

ASKED = "--policy zombie.batch=15m,45m"
CLOSED = "http://127.0.0.1:1"
PRICES = """
[[prices]]
model = "H100"
per_gpu_hour = 3.0
currency = "EUR"
"""
Answer = tuple[int, str, bytes]


@pytest.fixture(name="trace")
def _trace(tmp_path: Path) -> Path:
    return record(tmp_path / "node.jsonl.gz", "n1")


def record(path: Path, host: str, gpu: str = "GPU-0") -> Path:
    """Write a trace of an hour without work, then work; not simulated."""
    with TraceWriter(path, TraceHeader(host=host), flush_every=0) as trace:
        trace.append(replace(first([device(gpu)], [held(gpu, owner=JOB)]), wall=0))
        for at in range(60, 4201, 60):
            shows = RESTING if at <= 3600 else WORKING
            trace.append(replace(seen(at, reading(at - 60, at, shows, uuid=gpu)), wall=at * S))
    return path


@pytest.fixture(name="prices")
def _prices(tmp_path: Path) -> Path:
    path = tmp_path / "prices.toml"
    path.write_text(PRICES)
    return path


@pytest.fixture(name="says")
def _says(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int, str, bytes], str]]:
    """Serve the same response to every request until the test ends; yield the address."""
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    servers: list[tuple[ThreadingHTTPServer, threading.Thread]] = []

    def serve(status: int, kind: str, body: bytes) -> str:
        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                self.rfile.read(int(self.headers["Content-Length"]))
                told = self.headers.get("Authorization") or "nobody"
                self.send_response(status)
                self.send_header("Content-Type", kind)
                self.end_headers()
                self.wfile.write(body.replace(b"WHO", told.encode()))

            def log_message(self, *_: object) -> None:
                """Log nothing."""

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        servers.append((server, thread))
        return f"http://127.0.0.1:{server.server_address[1]}"

    yield serve
    for server, thread in servers:
        server.shutdown()
        thread.join()
        server.server_close()


def test_one_table_shows_what_each_threshold_frees_and_hits(trace: Path, prices: Path) -> None:
    status, out, err = preview(f"{trace} {ASKED} --config {prices}")
    assert (status, err) == (0, "")
    lines = out.splitlines()
    assert max(map(len, lines)) <= WIDTH
    named = ("as configured", "  batch", "zombie.batch=", "engine at 0 for 300 min")
    table = [line.split() for line in lines if line.startswith(named)]
    assert [row[0] for row in table[:7]] == [
        "as", "batch", "zombie.batch=15m", "batch", "zombie.batch=45m", "batch", "engine",
    ]  # fmt: skip
    assert [row[-5:] for row in table[:7]] == [
        *[["0.0", "0.7", "0.2", "0", "1/1"]] * 2,
        *[["0.0", "0.9", "0.2", "0", "1/1"]] * 2,
        *[["0.0", "0.4", "0.2", "0", "1/1"]] * 2,
        ["0.0", "0.0", "0.0", "0", "0/0"],
    ]
    assert "Right: until its allocation or the recording ended, the GPU did no real work." in lines
    assert "  41                           ada          worked 45 min later for 0.2 h" in lines


def test_json_has_the_same_figures(trace: Path, prices: Path) -> None:
    other = record(trace.parent / "other.jsonl.gz", "n2")
    status, out, _ = preview(f"{trace} {other} {ASKED} --json --config {prices}")
    found = json.loads(out)
    assert (status, [row["label"] for row in found["rows"]]) == (
        0,
        ["as configured", "zombie.batch=15m", "zombie.batch=45m"],
    )
    row = found["rows"][1]
    assert row["money_wrongly_freed"]["EUR"] == pytest.approx(3 * row["gpu_hours_wrongly_freed"])
    assert row["gpu_hours_wrongly_freed"] == pytest.approx(2 * 55 / 60)
    assert (row["precision"], row["by_class"][0]["label"], row["by_class"][0]["jobs_hit"]) == (0.0, "batch", 1)
    assert (found["plain_rule"]["episodes"], "more than 1 %" in found["definition"]) == (0, True)
    assert [(hit["job_id"], hit["user"], hit["gpus"]) for hit in row["hits"]] == [("41", "ada", ["GPU-0"])]


def test_two_recordings_of_one_node_and_the_same_time_are_refused(trace: Path) -> None:
    copy = trace.with_name("copy.jsonl.gz")
    copy.write_bytes(trace.read_bytes())
    status, out, err = preview(f"{trace} {copy} {ASKED}")
    assert (status, out, len(err.splitlines())) == (1, "", 1)
    assert f"{trace} begins 1970-01-01 00:00 UTC, before {copy} of the same node n1 ends (1970-01-01 01:10 UTC)" in err


def test_nodes_of_two_clusters_may_have_the_same_name(trace: Path) -> None:
    other = record(trace.with_name("other.jsonl.gz"), "n1", "GPU-9")
    assert preview(f"{trace} {other} {ASKED}")[0] == 0


def test_the_configured_policy_is_the_baseline(trace: Path, tmp_path: Path) -> None:
    (tmp_path / "own.toml").write_text("[policy]\nzombie_batch_seconds = 5400\n")
    _, out, _ = preview(f"{trace} {ASKED} --json --config {tmp_path / 'own.toml'}")
    assert [row["episodes"] for row in json.loads(out)["rows"]] == [0, 1, 1]


def test_a_model_s_own_threshold_is_moved_by_no_row_and_that_is_said(trace: Path, tmp_path: Path) -> None:
    (tmp_path / "own.toml").write_text("[policy_by_model.H100]\nzombie_batch_seconds = 5400\n")
    _, out, _ = preview(f"{trace} {ASKED} --json --config {tmp_path / 'own.toml'}")
    found = json.loads(out)
    assert [row["episodes"] for row in found["rows"]] == [0, 0, 0]
    assert found["notes"] == ["models with a zombie_batch_seconds of their own, which no row changes: H100"]


def test_what_is_simulated_is_marked(tmp_path: Path) -> None:
    path = tmp_path / "made_up.jsonl"
    with TraceWriter(path, TraceHeader(simulated=True)) as trace:
        trace.append(first([device()]))
    assert preview(f"{path} {ASKED}")[1].startswith("Replayed (SIMULATED): ")


def test_a_recording_that_breaks_off_is_told_beside_the_answer(trace: Path) -> None:
    trace.write_bytes(trace.read_bytes()[:-20])
    status, out, err = preview(f"{trace} {ASKED}")
    assert (status, "as configured" in out) == (0, True)
    assert f"gpu-efficiency: {trace}: " in err


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("a.jsonl", "the following arguments are required: --policy"),
        (ASKED, "preview: give one or more traces, or --prometheus URL, and not both"),
        (f"a.jsonl --prometheus {CLOSED} {ASKED}", "and not both"),
        ("a.jsonl --policy zombie.training=1h", "there is no threshold 'zombie.training'; known are zombie.batch"),
        ("a.jsonl --policy zombie.batch=soon", "--policy zombie.batch=soon: 'soon' is not a duration"),
        (f"--prometheus {CLOSED} --policy hang=5m", "--policy hang: Prometheus does not store its input"),
        (f"--prometheus {CLOSED} --policy zombie.duty=0.1", "--policy zombie.duty: Prometheus does not store"),
        (f"--prometheus {CLOSED} {ASKED} --since soon", "'soon' is not a duration"),
        (f"--prometheus {CLOSED} {ASKED} --step 0.5s", "'0.5s' is less than 1s"),
        (f"--prometheus {CLOSED} {ASKED} --header secret", "--header: what was given is not 'Name: value'"),
        (f"--prometheus {CLOSED} {ASKED} --header @absent", "--header: absent: cannot be read: No such file"),
        (f"--prometheus {CLOSED} {ASKED} --ca-file absent", "--ca-file: absent: no certificate can be read of it: No"),
    ],
)
def test_wrong_usage_is_status_2_and_says_what_to_write(line: str, why: str) -> None:
    status, out, err = preview(line)
    assert (status, out) == (2, "")
    assert why in err
    assert "secret" not in err
    assert len(err.splitlines()) == 1 or err.startswith("usage:")


@pytest.mark.parametrize(("content", "why"), [(b"", "is empty"), (b"{}\n", "is not a trace")])
def test_a_file_that_is_no_recording_is_status_1(tmp_path: Path, content: bytes, why: str) -> None:
    (tmp_path / "x.jsonl").write_bytes(content)
    status, out, err = preview(f"{tmp_path / 'x.jsonl'} {ASKED}")
    assert (status, out, why in err, len(err.splitlines())) == (1, "", True, 1)


def test_a_recording_without_an_observation_is_status_1(tmp_path: Path) -> None:
    with TraceWriter(tmp_path / "x.jsonl", TraceHeader()):
        pass
    status, _, err = preview(f"{tmp_path / 'x.jsonl'} {ASKED}")
    assert (status, err) == (1, f"gpu-efficiency: {tmp_path / 'x.jsonl'} holds no observation\n")


def test_nobody_at_the_address_is_status_1_and_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    status, out, err = preview(f"--prometheus {CLOSED} {ASKED}")
    assert (status, out, len(err.splitlines())) == (1, "", 1)
    assert err.startswith(f"gpu-efficiency: {CLOSED} cannot be reached (")


@pytest.mark.parametrize(
    ("status", "body", "why"),
    [
        (401, b"", "answered HTTP 401: it requires authentication; give --header"),
        (403, b"{}", "answered HTTP 403: it requires authentication"),
        (404, b"<html>not here", "answered HTTP 404 and not as Prometheus does: is the path complete?"),
        (502, b"<html>proxy", "answered HTTP 502 and not as Prometheus does: it is overloaded or broken"),
        (200, b'{"status":"success"}', "refused a query"),
        (400, b'{"status":"error","error":"parse\\nerror"}', "refused a query: parse error\n"),
        (422, b'{"status":"error","error":"too many"}', "refused a query: too many: ask for less with --since, --step"),
        (200, b'{"status":"success","data":{"result":[]}}', 'no gpu_efficiency_last_work_timestamp_seconds{a="b"} is'),
    ],
)
def test_an_answer_that_cannot_be_used_is_status_1_and_one_line(
    says: Callable[[int, str, bytes], str], status: int, body: bytes, why: str
) -> None:
    url = says(status, "text/html", body)
    found, out, err = preview(f"--prometheus {url}/ {ASKED} --match '{{a=\"b\"}}'")
    assert (found, out, len(err.splitlines())) == (1, "", 1)
    assert why in err


def test_a_warning_of_the_server_is_a_note_and_a_remark_on_a_query_is_none(
    says: Callable[[int, str, bytes], str],
) -> None:
    """Thanos gives what its live stores have, VictoriaMetrics what its live storage nodes have."""
    result = b'"data":{"result":[{"metric":{},"value":[1,"1"]}]}'
    warned = b'"warnings":["no\\nstore","PromQL info: metric might not be a counter"],"infos":["PromQL info: such"]'
    url = says(200, "application/json", b'{"status":"success","isPartial":true,' + warned + b"," + result + b"}")
    found, out, _ = preview(f"--prometheus {url.replace('//', '//ops:s3cret@')} {ASKED} --json --quiet")
    notes = [note for note in json.loads(out)["notes"] if "warned" in note]
    assert found == 0
    assert [note.partition(": ")[2] for note in notes] == ["no store", "some of its storage did not answer (isPartial)"]
    assert ("s3cret" in out, json.loads(out)["source"].startswith("Stored in http://")) == (False, True)


def test_headers_are_sent_from_the_line_and_from_a_file(says: Callable[[int, str, bytes], str], tmp_path: Path) -> None:
    url = says(400, "application/json", b'{"status":"error","error":"hello WHO"}')
    (tmp_path / "token").write_text("\nAuthorization: Bearer abc \n")
    for given in (f"@{tmp_path / 'token'}", "Authorization:Bearer abc"):
        assert "hello Bearer abc" in preview(f"--prometheus {url} {ASKED} --header '{given}'")[2]


def test_a_long_recording_tells_how_far_it_is_by_its_bytes_and_quiet_does_not(
    trace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("exporter.cli.progress._LINE_SECONDS", 0.0)
    told = preview(f"{trace} {ASKED}")[2].splitlines()
    assert len(told) > 2
    assert all(line.startswith("gpu-efficiency: ") and " %, " in line for line in told)
    assert told[-1].split(": ")[2].startswith("100 %")
    assert preview(f"{trace} {ASKED} --quiet")[2] == ""


@pytest.mark.parametrize("line", [f"preview {ASKED}", "advise", "report --all", "report 7"])
def test_a_prometheus_behind_an_authority_of_ones_own(
    line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The server is no Prometheus: whoever learns that has verified its certificate."""
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    authority = Authority(tmp_path)
    authority.issue("server")
    (tmp_path / "web.yml").write_text("tls_server_config:\n  cert_file: server.crt\n  key_file: server.key\n")
    with served(guarding=WebConfigWatcher(tmp_path / "web.yml")) as site:
        words = [*line.split(), "--prometheus", f"https://127.0.0.1:{site.ports[0]}"]
        assert main(words) == 1
        assert "certificate verify failed" in capsys.readouterr().err
        assert main([*words, "--ca-file", f"{authority.certificate}"]) == 1
        assert " answered HTTP 40" in capsys.readouterr().err
