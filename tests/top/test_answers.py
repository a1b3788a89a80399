"""Tests that `top` decodes the daemon's responses: of the real app, and of older and newer daemons."""

from typing import Any

import httpx
import msgspec
import pytest
from msgspec.structs import replace

from exporter.top.client import NodeClient, parse_target, poll_once
from exporter.top.view import UNICODE, hourly_loss, node_names
from exporter.web import api
from exporter.web.app import create_app
from tests.top.nodes import answers as said
from tests.top.nodes import responses, seen, snapshot
from tests.web.serving import served


@pytest.mark.slow
def test_the_real_app_is_understood_over_a_socket() -> None:
    taken = snapshot()
    app = create_app(lambda: taken, now=lambda: taken.at, max_age_seconds=10.0)
    with (
        served(app) as site,
        NodeClient(parse_target(f"127.0.0.1:{site.ports[0]}", headers={})) as asking,
    ):
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


_REQUIRED = {
    "uuid", "index", "model", "state", "last_5_minutes", "last_hour", "owner", "host", "sampled_at", "seconds", "node",
    "gpus", "jobs", "owners", "training", "serving", "leaks", "health", "latency_seconds",
}  # fmt: skip


def _oldest(value: Any) -> Any:
    """Remove all fields that the first daemons may have lacked."""
    if isinstance(value, dict):
        return {key: _oldest(inner) for key, inner in value.items() if key in _REQUIRED}
    return [_oldest(one) for one in value] if isinstance(value, list) else value


def test_the_answers_of_an_older_daemon_are_read_though_they_lack_what_is_newer() -> None:
    gpus, jobs, _ = said(snapshot())
    old = seen(told=(_oldest(gpus), _oldest(jobs), {"host": "gpu-node-00", "uptime": 1.0}))
    assert old.gpus is not None
    assert [gpu.uuid for gpu in old.gpus.gpus] == [gpu["uuid"] for gpu in gpus["gpus"]]
    assert (old.gpus.gpus[0].live, old.gpus.gpus[0].share, old.gpus.gpus[0].health.last_xid) == (True, 1.0, None)
    assert old.accounts is not None
    assert old.accounts.last_hour.money is None


def test_an_older_daemon_without_the_newer_paths_is_asked_for_them_once() -> None:
    gpus, jobs, _ = said(snapshot())
    asked = []

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append(request.url.path)
        found = {"/api/v1/gpus": gpus, "/api/v1/jobs": jobs}.get(request.url.path)
        return httpx.Response(404) if found is None else httpx.Response(200, json=found)

    with NodeClient(parse_target("old:19400", headers={}), transport=responses(answer)) as asking:
        for _ in range(3):
            assert asking.accounts() is None
            assert asking.receipts("41001") is None
    assert asked == ["/api/v1/node", "/api/v1/receipts"]


def test_what_leaks_in_money_is_told_where_there_is_one_price() -> None:
    money = {"USD": {"useful": 3.0, "hung": 4.0, "memory_bound": 2.0, "unobserved": 1.0}}
    told_so = {"prices": {"USD": 20.0}, "last_hour": {"money": money}}
    known = msgspec.convert(told_so, api.AccountsOut)
    leaks, price, currency = hourly_loss(known, "last_hour") or (0.0, 0.0, "")
    assert (round(leaks, 9), price, currency) == (12.0, 20.0, "USD")
    assert hourly_loss(known, "last_5_minutes") is None
    two = msgspec.convert(told_so | {"prices": {"USD": 20.0, "EUR": 1.0}}, api.AccountsOut)
    assert hourly_loss(two, "last_hour") is None


def test_a_node_has_its_name_in_the_scheduler_and_where_its_daemon_is_older_its_hosts() -> None:
    told = seen()
    pod, old = ({"node": name, "host": "gpu-efficiency-x7k2p"} for name in ("n1", ""))
    assert told.gpus
    for named, shown in ((pod, "n1"), (old, "gpu-efficiency-x7k2p")):
        there = replace(told, gpus=replace(told.gpus, node=replace(told.gpus.node, **named)))
        assert node_names((there,), UNICODE) == (shown,)


def test_nodes_are_named_by_their_hosts_unless_two_say_the_same() -> None:
    one, two = seen(), seen(address="http://other:19400")
    assert node_names((one,), UNICODE) == ("gpu-node-00",)
    assert node_names((one, two), UNICODE) == ("gpu-node-00:19400", "other:19400")


def test_all_are_asked_at_once_and_one_that_is_not_there_costs_only_itself() -> None:
    taken = snapshot()
    app = create_app(lambda: taken, now=lambda: taken.at, max_age_seconds=10.0)
    with served(app) as site:
        urls = (f"127.0.0.1:{site.ports[0]}", "127.0.0.1:1")
        there, absent = poll_once([parse_target(url, headers={}) for url in urls])
    assert there.live
    assert "refused" in absent.problem
    assert not absent.live
    assert absent.gpus is None
