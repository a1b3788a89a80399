"""`gpu-efficiency report` of what nodes kept: from their stores, and from their daemons' API over real HTTP.

Eight nodes of one job, of which one does not answer; and the node of test_report's Prometheus, so that both ways to a
receipt are held against each other.
"""

import json
import os
import socket
import threading
import time
from base64 import b64encode
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from jsonschema_rs import Draft202012Validator
from msgspec.structs import replace

from exporter.core.job_record import JobRecord, JobRecordQuery, NodeEvent
from exporter.core.ledger import Ledger
from exporter.core.model import Owner
from exporter.core.pipeline import advance
from exporter.core.snapshot import DaemonMetadata, Snapshot, take_snapshot
from exporter.history.job_tracker import JobTracker
from exporter.history.store import HistoryStore
from exporter.sockets import ListeningSocket, listeners
from exporter.web.app import create_app
from exporter.web.security import WebConfigWatcher
from tests.certificates import Authority
from tests.dashboards.past import Series, prometheus
from tests.e2e.running import site
from tests.e2e.test_report import LIVES, NOW, real_pages, report
from tests.ordinary import hidden
from tests.ports import free_port
from tests.report.commands import run
from tests.report.stated import BEGIN, HOUR, owner, stated, trained
from tests.report.stored import BEGIN as STORED
from tests.report.stored import put
from tests.web.serving import served
from tests.worlds import WORKING, S, device, first, held, reading, seen

pytestmark = pytest.mark.e2e
SCHEMA = json.loads((Path(__file__).parents[2] / "docs" / "receipt.schema.json").read_text(encoding="utf-8"))
AT = f"--at {BEGIN + 100_000:.0f}"


@pytest.fixture(autouse=True)
def _directly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1,localhost")


class Kept:
    """A node's store, as its daemon would ask it."""

    def __init__(self, told: Sequence[JobRecord]) -> None:
        self._told = told

    def job_records(self, wanted: JobRecordQuery) -> list[JobRecord]:
        found = sorted((each for each in self._told if wanted.matches(each)), key=lambda each: -each.end)
        return found[: wanted.limit]

    def events(self, since: float, limit: int) -> list[NodeEvent]:  # noqa: ARG002  nothing happened
        return []

    def checkpointed_view(self, snapshot: Snapshot) -> Snapshot | None:
        """Nothing is forgotten."""
        return snapshot


@contextmanager
def node(*told: JobRecord, **how: Any) -> Iterator[str]:
    """A daemon that has kept those; gives its address."""
    app = create_app(lambda: None, now=lambda: 0, max_age_seconds=10, history=Kept(told))
    with served(app, **how) as site:
        yield f"{site.scheme}://localhost:{site.ports[0]}"


def store(path: Path, *told: JobRecord) -> Path:
    kept = HistoryStore(path)
    kept.write(job_records=told)
    kept.close()
    return path


def found(words: str) -> dict[str, Any]:
    """What `--json` says, which its schema has foreseen."""
    status, out, err = run(f"{words} --json --quiet")
    assert (status, err) == (0, "")
    answer: dict[str, Any] = json.loads(out)
    Draft202012Validator(SCHEMA).validate(answer)
    return answer


EIGHT = tuple(stated(node=f"n{n}", life=f"n{n}", owner=owner(nodes=8)) for n in range(8))


def test_a_job_over_eight_nodes_of_which_one_is_dead() -> None:
    dead = f"http://127.0.0.1:{free_port()}"
    with ExitStack() as nodes:
        urls = [nodes.enter_context(node(each)) for each in EIGHT[:7]]
        flags = " ".join(f"--node {url}" for url in (*urls, dead))
        answer = found(f"7 {flags} {AT}")
        status, out, _ = run(f"7 {flags} {AT}")
    assert (answer["source"], answer["expected_nodes"], len(answer["nodes"])) == ("nodes", 8, 7)
    assert answer["gpu_hours"] == 14
    assert [line for line in answer["unseen"] if line.startswith(f"{dead} cannot be reached")]
    assert status == 0
    assert "7 of 8 nodes, 14 GPUs (NVIDIA H100 80GB HBM3)\n" in out
    said = " ".join(out.split())
    assert f"{dead} cannot be reached" in said
    assert "1 of the job's 8 nodes told nothing: about 2 GPUs, 2.00 GPU-hours, 12.5 % of the job" in said


def test_stores_and_nodes_together_count_nothing_twice(tmp_path: Path) -> None:
    paths = [store(tmp_path / f"{each.node}.db", each) for each in EIGHT[:4]]
    with node(*EIGHT[3:]) as url:
        words = " ".join(f"--store {path}" for path in paths)
        answer = found(f"7 {words} --node {url} {AT}")
    assert (answer["gpu_hours"], len(answer["nodes"]), answer["money"]) == (16, 8, 32)
    alone = found(f"7 --store {paths[0]} {AT}")
    assert (alone["source"], alone["gpu_hours"]) == ("stores", 2)


def test_two_jobs_of_a_store_side_by_side(tmp_path: Path) -> None:
    progress = trained(tokens=115_200.0, gpu_time=4 * HOUR, target_at=round((BEGIN + 1200) * 1e9))
    larger = stated(
        owner=owner(job_id="8"), whole_gpus=4.0, paid=4 * HOUR, money={"USD": 8.0},
        parts={"useful": 2 * HOUR, "hung": 2 * HOUR}, training=progress,
    )  # fmt: skip
    path = store(tmp_path / "history.db", stated(training=trained()), larger)
    answer = found(f"--compare 7 8 --store {path} {AT}")
    assert (answer["per_gpu"], answer["scaling"], answer["of"]) == ([10, 8], 0.8, "tokens")
    assert answer["per_cost"] == [pytest.approx(18_000), pytest.approx(14_400)]
    (same,) = answer["same"]
    assert (same["quality"], same["seconds"], same["cost"]) == (0.6, [1800, 1200], [2, pytest.approx(8 / 3)])


def test_a_node_with_tls_and_a_password(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    certificate, key = authority.issue("node")
    (tmp_path / "web.yml").write_text(
        f"tls_server_config: {{cert_file: {certificate}, key_file: {key}}}\n"
        "basic_auth_users: {ada: $2b$04$VpkVsVErMqhMat/K2rzJb.j.ajGD7Wu8kn5WyRe/MKIU9DMXP5lEO}\n"
    )
    with node(stated(), guarding=WebConfigWatcher(tmp_path / "web.yml")) as url:
        status, _, err = run(f"7 --node {url} {AT}")
        assert (status, "CERTIFICATE_VERIFY_FAILED" in err) == (1, True)
        status, _, err = run(f"7 --node {url} {AT} --ca-file {authority.certificate}")
        assert (status, "answered HTTP 401: it tells who is known to it (--header)" in err) == (1, True)
        (tmp_path / "header").write_text("Authorization: Basic " + b64encode(b"ada:right").decode() + "\n")
        words = f"--ca-file {authority.certificate} --header @{tmp_path}/header"
        assert found(f"7 --node {url} {AT} {words}")["gpu_hours"] == 2


def test_more_than_one_answer_holds_is_asked_for_in_parts() -> None:
    many = [
        stated(owner=owner(job_id=f"{n}", comment="c" * 900), start=BEGIN + 10 * n, end=BEGIN + 10 * n + 5)
        for n in range(20_000)
    ]
    with node(*many) as url:
        for job in (3, 19_999):
            assert found(f"{job} --node {url} --at {BEGIN + 1e6:.0f}")["when"]["start"] == BEGIN + 10 * job
        from exporter.report.nodes import fetch_records  # noqa: PLC0415  what sums ask

        answer = fetch_records([url], JobRecordQuery(since=BEGIN, until=BEGIN + 1e6, limit=1_000_000))
    assert len(answer.records) == 20_000
    assert answer.notes == ()


def test_what_is_no_daemon_of_ours_is_silent() -> None:
    with site(lambda: (b"<html>", "text/html")) as other, node(stated()) as url:
        answer = found(f"7 --node {url} --node http://127.0.0.1:{other.port} {AT}")
    assert "answered with what is no list of receipts" in answer["unseen"][0]
    assert answer["gpu_hours"] == 2


def test_an_epilog_waits_for_the_end(tmp_path: Path) -> None:
    path = store(tmp_path / "history.db", stated(running=True, end=BEGIN + 3000))

    def end() -> None:
        time.sleep(1.0)
        store(path, stated())

    ending = threading.Thread(target=end)
    ending.start()
    status, out, _ = run(f"7 --store {path} {AT} --wait 20 --line -o {tmp_path}/line")
    ending.join()
    assert (status, out) == (0, "")
    assert (tmp_path / "line").read_text().startswith("job 7: 50.0 % useful")
    assert "in 1 h 00 min" in (tmp_path / "line").read_text()
    (tmp_path / "link").symlink_to(tmp_path / "line")
    status, out, err = run(f"7 --store {path} {AT} --short -o {tmp_path}/link")
    assert (status, out, "is no plain file and is left as it is" in err) == (1, "", True)
    assert run(f"7 --store {path} {AT} --short -o -")[1].startswith("GPU efficiency of job 7")
    began = time.monotonic()
    running = store(tmp_path / "running.db", stated(running=True))
    status, out, _ = run(f"7 --store {running} {AT} --wait 1 --short")
    assert (status, "so far" in out) == (0, True)
    assert time.monotonic() - began >= 1


def test_without_a_source_this_nodes_store_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store(tmp_path / "history.db", stated())
    monkeypatch.setenv("STATE_DIRECTORY", f"{tmp_path}:/nowhere")
    assert found(f"7 {AT}")["source"] == "stores"
    (tmp_path / "config.toml").write_text(
        f"[history]\nfile = '{tmp_path}/history.db'\n[energy]\ngrams_co2_per_kwh = 500\nprice_per_kwh = 0.2\n"
    )
    monkeypatch.delenv("STATE_DIRECTORY")
    assert found(f"7 {AT} --config {tmp_path}/config.toml")["co2_kg"] == pytest.approx(0.5)
    assert found(f"7 {AT} --config {tmp_path}/config.toml")["energy_money"] == pytest.approx(0.2)


def test_carbon_is_of_the_hours_in_a_file_as_electricity_maps_exports_it(tmp_path: Path) -> None:
    path = store(tmp_path / "history.db", stated(start=BEGIN, end=BEGIN + 7200, life="a"))
    (tmp_path / "hours.csv").write_text(
        "\ufeffDatetime (UTC),Country,Zone name,Zone id,Carbon intensity gCO\u2082eq/kWh (direct),"
        "Carbon intensity gCO\u2082eq/kWh (Life cycle),Carbon-free energy percentage (CFE%),"
        "Renewable energy percentage (RE%),Data source,Data estimated,Data estimation method\r\n"
        "2026-01-01 00:00:00,Sweden,North,SE-1,20.5,100,99,60,x,false,\r\n"
        "2026-01-01 01:00:00,Sweden,North,SE-1,20.5,300,99,60,x,false,\r\n"
        "2026-01-01 02:00:00,Sweden,North,SE-1,,,,,x,false,\r\n",
        encoding="utf-8",
    )
    config = tmp_path / "config.toml"
    config.write_text(f"[energy]\ncarbon_intensity_file = '{tmp_path}/hours.csv'\n")
    assert found(f"7 --store {path} {AT} --config {config}")["co2_kg"] == pytest.approx(0.2)
    assert "of the energy: 50.0 % useful, 0.2 kg of CO2" in run(f"7 --store {path} {AT} --config {config}")[1]
    late = store(tmp_path / "late.db", stated(start=BEGIN + 3600, end=BEGIN + 10_800))
    config.write_text(
        f"[energy]\ncarbon_intensity_file = '{tmp_path}/hours.csv'\ncarbon_intensity_column = 'direct'\n"
        "grams_co2_per_kwh = 400\n"
    )
    told = found(f"7 --store {late} {AT} --config {config}")
    assert told["co2_kg"] == pytest.approx((20.5 + 400) / 2 / 1000)
    assert (
        "50.0 % of the energy is of hours without a carbon intensity: for them it is grams_co2_per_kwh, 400"
        in (told["unseen"])
    )
    with (tmp_path / "hours.csv").open("a", encoding="utf-8") as file:
        file.write("2026-01-01 03:00:00,Sweden,North,SE-1,many,,,,,,\r\n")
    status, out, err = run(f"7 --store {late} {AT} --config {config}")
    assert (status, out, len(err.splitlines())) == (2, "", 1)
    assert f"{config}: line 2: energy.carbon_intensity_file: {tmp_path}/hours.csv: line 5: 'many' is not from 0" in err


def test_this_nodes_store_has_what_ended_and_its_daemon_what_runs(tmp_path: Path) -> None:
    now = time.time()
    runs = stated(owner=owner(job_id="8"), start=now - 3600, end=now, running=True)
    with node(runs) as url:
        (tmp_path / "config.toml").write_text(
            f"[history]\nfile = '{store(tmp_path / 'history.db', stated())}'\n"
            f"[web]\nlisten_address = '127.0.0.1:{url.rpartition(':')[2]}'\n"
        )
        assert found(f"7 {AT} --config {tmp_path}/config.toml")["when"]["running"] is False
        assert found(f"8 --config {tmp_path}/config.toml")["when"]["running"] is True
    assert found(f"7 {AT} --config {tmp_path}/config.toml")["source"] == "stores"


def test_without_a_store_this_nodes_daemon_is_asked(tmp_path: Path) -> None:
    with node(stated()) as url:
        port = url.rpartition(":")[2]
        (tmp_path / "config.toml").write_text(f"[history]\nfile = ''\n[web]\nlisten_address = '127.0.0.1:{port}'\n")
        assert found(f"7 {AT} --config {tmp_path}/config.toml")["source"] == "nodes"
    status, _, err = run(f"7 {AT} --config {tmp_path}/config.toml")
    assert (status, len(err.splitlines())) == (1, 1)
    assert "cannot be reached" in err
    assert "--store FILE, --node URL or --prometheus URL" in err


@pytest.mark.parametrize("host", ["127.0.0.1", "", "localhost"])
def test_whoever_took_the_port_of_this_nodes_daemon_is_not_believed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, host: str
) -> None:
    """While the daemon is down any user may listen there, and answer root's epilog with jobs of his own."""
    config, now = tmp_path / "config.toml", time.time()
    invented = stated(owner=owner(job_id="8"), start=now - 3600, end=now, running=True)
    kept = store(tmp_path / "history.db", stated())
    owners = {os.geteuid(): 4711}

    def foreign(folder: Path) -> list[ListeningSocket]:
        return [replace(each, uid=owners.get(each.uid, each.uid)) for each in listeners(folder)]

    monkeypatch.setattr("exporter.sockets.listeners", foreign)
    with node(invented) as url:
        web = f"[web]\nlisten_address = '{host}:{url.rpartition(':')[2]}'\n"
        config.write_text(f"[history]\nfile = ''\n{web}")
        status, out, err = run(f"8 --config {config}")
        assert (status, out, len(err.splitlines())) == (1, "", 1)
        assert "is user 4711's" in err
        config.write_text(f"[history]\nfile = '{kept}'\n{web}")
        assert run(f"8 --config {config}")[:2] == (1, "")
        (note,) = [each for each in found(f"7 {AT} --config {config}")["unseen"] if "4711" in each]
        assert "not believed" in note
        assert found(f"8 --node {url} --config {config}")["source"] == "nodes", "an address that is named is believed"
        if os.geteuid() == 0:
            os.chown(kept, 4711, -1)
            assert found(f"8 --config {config}")["when"]["running"] is True, "the daemon's user owns its store"


def test_the_user_of_the_packaged_unit_is_believed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who asks is any user, who can read no store."""
    packaged = SimpleNamespace(pw_uid=4711)
    monkeypatch.setattr("pwd.getpwnam", {"gpu-efficiency": packaged}.__getitem__)
    with node(stated()) as url:
        port = int(url.rpartition(":")[2])
        daemon = [ListeningSocket("127.0.0.1", port, 1, 4711), ListeningSocket("10.0.0.1", port, 2, 4712)]
        monkeypatch.setattr("exporter.sockets.listeners", lambda _: daemon)
        config = tmp_path / "config.toml"
        config.write_text(f"[history]\nfile = ''\n[web]\nlisten_address = '127.0.0.1:{port}'\n")
        assert found(f"7 {AT} --config {config}")["source"] == "nodes", "user 4712 listens at another address"
        daemon[0] = replace(daemon[0], uid=4713)
        assert run(f"7 {AT} --config {config}")[:2] == (1, "")
        daemon[0] = ListeningSocket("0.0.0.0", port, 1, 4713)  # noqa: S104  nothing is bound
        assert run(f"7 {AT} --config {config}")[:2] == (1, "")


def test_a_store_that_is_none_is_named(tmp_path: Path) -> None:
    (tmp_path / "no.db").write_text("nothing of the kind")
    for path in ("no.db", "absent.db"):
        status, out, err = run(f"7 --store {tmp_path}/{path} {AT}")
        assert (status, out, len(err.splitlines())) == (1, "", 1)
        assert f"{tmp_path}/{path}" in err


# -- the same node, by a Prometheus and by its statements --


def lives() -> list[JobRecord]:
    """Of the node of `test_report.real_pages`: the same observations, remembered instead of scraped."""
    boards = [device("GPU-a", "0"), device("GPU-b", "1")]
    holds = [held(board.uuid, Owner("61", user="ada"), gpus=2) for board in boards]
    told: list[JobRecord] = []
    for life, (begin, end) in enumerate(LIVES):
        ledger, memory = Ledger(), JobTracker(node="real", ledger_id=f"{life}")
        observed = replace(first(boards, holds), at=begin * 60 * S, wall=(STORED + begin * 60) * S)
        for minute in range(begin, end + 1):
            at = minute * 60
            if minute > begin:
                readings = [reading(at - 60, at, WORKING, board.uuid) for board in boards]
                observed = replace(seen(at, *readings, reports=(report(at),)), wall=(STORED + at) * S)
            advance(ledger, observed)
            snapshot = take_snapshot(ledger, DaemonMetadata())
            told += memory.update(snapshot)[1]
        told += memory.all_records(snapshot)
    return told


def test_a_prometheus_and_the_nodes_tell_the_same(tmp_path: Path) -> None:
    scraped: Series = {}
    for minute, page in real_pages():
        for (name, labels), value in page.samples.items():
            put(scraped, name, dict(labels) | {"cluster": "", "instance": "real:19400"}, float(value), minute)
    with prometheus(tmp_path) as past:
        past.write(scraped)
        by_scrapes = found(f"61 --prometheus {past.url} --at {NOW}")
    by_statements = found(f"61 --store {store(tmp_path / 'history.db', *lives())} --at {NOW}")
    for name in ("gpu_hours", "seen_gpu_hours", "gpus", "energy_kwh", "ofu"):
        assert by_statements[name] == pytest.approx(by_scrapes[name], rel=1e-6), name
    assert by_statements["layers"] == pytest.approx(by_scrapes["layers"])
    assert parts(by_statements) == pytest.approx(parts(by_scrapes), rel=1e-6)
    assert by_statements["when"]["start"] == pytest.approx(by_scrapes["when"]["start"])
    alike = ("steps", "tokens", "padding", "mfu", "hfu", "tokens_per_gpu_second", "told_share", "progress")
    assert {name: by_statements["truth"][name] for name in alike} == {
        name: pytest.approx(by_scrapes["truth"][name], rel=1e-6) for name in alike
    }
    assert by_statements["truth"]["phases"] == pytest.approx(by_scrapes["truth"]["phases"])


def parts(answer: dict[str, Any]) -> dict[str, float]:
    return {part["name"]: part["nanoseconds"] for part in answer["parts"]}


def test_a_user_who_may_not_read_the_store_asks_the_daemon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPU_EFFICIENCY_HISTORY_FILE", f"{store(tmp_path / 'history.db', stated())}")
    with node(stated()) as url:
        monkeypatch.setenv("GPU_EFFICIENCY_WEB_LISTEN_ADDRESS", url.removeprefix("http://"))
        with hidden(tmp_path):
            status, out, err = run(f"7 {AT} --short")
    assert (status, err) == (0, "")
    assert out.endswith(f"\n  all of it, on node n1: gpu-efficiency report 7 --node {url}\n")
    with hidden(tmp_path):
        status, out, err = run(f"7 {AT}")
    assert (status, out) == (1, "")
    assert "history.db: this user may not read it: ask its daemon (--node URL), or run this as root; " in err
    assert f"{url} cannot be reached" in err
    assert err.endswith("name a source with --store FILE, --node URL or --prometheus URL\n")


def test_where_a_gateway_is_configured_the_command_works_on_a_login_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GPU_EFFICIENCY_HISTORY_FILE", f"{store(tmp_path / 'history.db', stated())}")
    monkeypatch.setenv("GPU_EFFICIENCY_GATEWAY_NODES", "[http://{node}:19400]")
    monkeypatch.setenv("GPU_EFFICIENCY_GATEWAY_SOCKET", f"{tmp_path}/gateway.sock")
    with socket.socket(socket.AF_UNIX) as unused:
        unused.bind(f"{tmp_path}/gateway.sock")  # a node with a store asks no gateway
        status, out, _ = run(f"7 {AT} --short")
    assert (status, out.endswith("\n  all of it, on a login node: gpu-efficiency report 7\n")) == (0, True)


def test_the_short_form_names_a_command_that_finds_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = store(tmp_path / "history.db", stated())
    assert run(f"7 --store {path} {AT} --short")[1].endswith(f"  all of it: gpu-efficiency report 7 --store {path}\n")
    monkeypatch.setattr("sys.argv", [f"{tmp_path}/bin/gpu-efficiency"])
    monkeypatch.setattr("shutil.which", lambda _name, path: None if "/usr/local/bin:" in path else "")
    assert f"all of it: {tmp_path}/bin/gpu-efficiency report 7" in run(f"7 --store {path} {AT} --short")[1]
