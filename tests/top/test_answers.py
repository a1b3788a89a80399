"""What `top` reads is what the daemon says: held against the API's own shapes, and against the real app."""

import httpx
import msgspec
import pytest
from msgspec import Struct

from exporter.core.statement import Statement
from exporter.http import account, api, create_app, told
from exporter.top import answers
from exporter.top.asking import Asking, place_of
from exporter.top.seen import names
from exporter.top.signs import UNICODE
from exporter.top.watching import once
from tests.http.serving import served
from tests.top.nodes import answers as said
from tests.top.nodes import seen, snapshot

PAIRS = [
    (answers.Window, api.WindowOut),
    (answers.Owner, api.OwnerOut),
    (answers.Health, api.HealthOut),
    (answers.Gpu, api.GpuOut),
    (answers.Training, told.TrainingOut),
    (answers.Latency, told.LatencyOut),
    (answers.Serving, told.ServingOut),
    (answers.Job, api.JobOut),
    (answers.Node, api.NodeOut),
    (answers.Gpus, api.GpusOut),
    (answers.Jobs, api.JobsOut),
    (answers.Account, account.AccountOut),
    (answers.Accounts, account.AccountsOut),
    (answers.Part, Statement),
    (answers.Problem, api.Problem),
]


@pytest.mark.parametrize(("ours", "daemons"), PAIRS, ids=lambda shape: shape.__name__)
def test_no_field_is_read_that_the_daemon_does_not_have(ours: type[Struct], daemons: type[Struct]) -> None:
    assert set(ours.__struct_fields__) <= set(daemons.__struct_fields__)


def test_the_real_app_is_understood_over_a_socket() -> None:
    taken = snapshot()
    app = create_app(lambda: taken, now=lambda: taken.at, max_age_seconds=10.0)
    with served(app) as site, Asking(place_of(f"127.0.0.1:{site.ports[0]}", headers={}, ca_file=None)) as asking:
        gpus, jobs, accounts = asking.gpus(), asking.jobs(), asking.accounts()
        receipts = asking.receipts("41001")
    known = api.gpus_out(taken, 0)
    assert [gpu.uuid for gpu in gpus.gpus] == [gpu.uuid for gpu in known.gpus]
    assert gpus.node.last_hour.product == known.node.last_hour.product
    assert gpus.node.simulated
    assert [job.owner.job_id for job in jobs.jobs] == [job.owner.job_id for job in api.jobs_out(taken, 0).jobs]
    assert accounts is not None
    assert receipts is not None
    assert [part.paid > 0 for part in receipts.receipts] == [True]


def test_what_a_newer_daemon_adds_is_passed_over() -> None:
    gpus, jobs, node = said(snapshot())
    for one in (gpus, gpus["node"], gpus["gpus"][0], gpus["gpus"][0]["last_hour"], jobs["jobs"][0]["owner"]):
        one["of_tomorrow"] = {"deep": [1]}
    gpus["gpus"][0]["last_hour"]["leaks"]["gravity"] = 12.0
    assert seen(told=(gpus, jobs, node)).node == seen().node


def test_an_older_daemon_without_the_newer_paths_is_asked_for_them_once() -> None:
    gpus, jobs, _ = said(snapshot())
    asked = []

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append(request.url.path)
        found = {"/api/v1/gpus": gpus, "/api/v1/jobs": jobs}.get(request.url.path)
        return httpx.Response(404) if found is None else httpx.Response(200, json=found)

    with Asking(place_of("old:19400", headers={}, ca_file=None), transport=httpx.MockTransport(answer)) as asking:
        for _ in range(3):
            assert asking.accounts() is None
            assert asking.receipts("41001") is None
    assert asked == ["/api/v1/node", "/api/v1/receipts"]


def test_what_leaks_in_money_is_told_where_there_is_one_price() -> None:
    money = {"USD": {"useful": 3.0, "hung": 4.0, "memory_bound": 2.0, "unobserved": 1.0}}
    told_so = {"prices": {"USD": 20.0}, "last_hour": {"money": money}}
    known = msgspec.convert(told_so, answers.Accounts)
    leaks, price, currency = known.lost("last_hour") or (0.0, 0.0, "")
    assert (round(leaks, 9), price, currency) == (12.0, 20.0, "USD")
    assert known.lost("last_5_minutes") is None
    assert msgspec.convert(told_so | {"prices": {"USD": 20.0, "EUR": 1.0}}, answers.Accounts).lost("last_hour") is None


def test_nodes_are_named_by_their_hosts_unless_two_say_the_same() -> None:
    one, two = seen(), seen(address="http://other:19400")
    assert names((one,), UNICODE) == ("gpu-node-00",)
    assert names((one, two), UNICODE) == ("gpu-node-00:19400", "other:19400")


def test_all_are_asked_at_once_and_one_that_is_not_there_costs_only_itself() -> None:
    taken = snapshot()
    app = create_app(lambda: taken, now=lambda: taken.at, max_age_seconds=10.0)
    with served(app) as site:
        urls = (f"127.0.0.1:{site.ports[0]}", "127.0.0.1:1")
        there, absent = once([place_of(url, headers={}, ca_file=None) for url in urls])
    assert there.live
    assert "refused" in absent.problem
    assert not absent.live
    assert absent.gpus is None
