"""User-chosen label values: whatever they contain, every line can be parsed and no two values share a series."""

import re
from collections.abc import Callable, Iterable
from typing import Any, cast

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from prometheus_client.openmetrics.parser import text_string_to_metric_families as openmetrics
from prometheus_client.parser import text_string_to_metric_families as text

from exporter.cluster.metrics import page
from exporter.cluster.watcher import ClusterView, QuestionStatus, QueueTotals
from exporter.core.exposition import MAX_LABEL_LENGTH, render
from exporter.core.ledger import Ledger
from exporter.core.model import Fault, Owner, ServingReport, TrainingReport
from exporter.core.pipeline import advance
from exporter.core.policy import Policy
from exporter.core.snapshot import DaemonMetadata, Snapshot, take_snapshot
from tests.worlds import device, first, held, reading, seen

NASTY = '\0\n\r\t\x1b\x7f\x85\u2028\\"{}=,#é😀'
ANYTHING = st.text(st.characters(), max_size=40) | st.text(st.sampled_from(NASTY), max_size=20)
"""Surrogates too: what Python makes of bytes that are no UTF-8."""
LONG = 1 << 20
FEW = settings(max_examples=25)
"""Each is a whole page, parsed."""
families = cast("Callable[[str], Iterable[Any]]", text)
open_families = cast("Callable[[str], Iterable[Any]]", openmetrics)
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")
"""Of these only a tab and a line's end may stand in a label, the latter as two characters."""


def told(*owners: Owner, policy: Policy | None = None, **said: Any) -> Snapshot:
    """One job per GPU, with the reports in `said`."""
    ledger = Ledger(policy)
    names = [f"GPU-{n}" for n in range(len(owners))]
    holds = [held(name, owner) for name, owner in zip(names, owners, strict=True)]
    advance(ledger, first([device(name, name[4:]) for name in names], holds))
    advance(ledger, seen(60, *(reading(0, 60, uuid=name) for name in names), **said))
    return take_snapshot(ledger, DaemonMetadata(host=owners[0].name, source_reason=owners[0].comment))


def rows(body: bytes, metric: str = "gpu_efficiency_job_info") -> list[dict[str, str]]:
    """Label values of one metric; parses the whole exposition."""
    decoded = body.decode()
    parsed = [sample for family in families(decoded) for sample in family.samples]
    assert len(parsed) == sum(bool(line) and not line.startswith("#") for line in decoded.split("\n"))
    keys = [(sample.name, tuple(sorted(sample.labels.items()))) for sample in parsed]
    assert len(set(keys)) == len(keys)
    return [sample.labels for sample in parsed if sample.name == metric]


@pytest.mark.untraced
@FEW
@given(ANYTHING, ANYTHING, ANYTHING)
@example("\udcff", "\udcff\udcfe", "\ud83d")
@example("\0", 'a"b\\', "\r\n")
def test_any_name_leaves_a_page_that_can_be_read(name: str, user: str, job: str) -> None:
    snapshot = told(Owner(job_id=job, user=user, name=name, team=user, account=name, namespace=job, comment=name))
    (row,) = rows(render(snapshot))
    whole = list(open_families(render(snapshot, openmetrics=True).decode() + "# EOF\n"))
    assert any(family.name == "gpu_efficiency_job_info" for family in whole)
    for label, value in (("name", name), ("user", user), ("job_id", job)):
        assert not CONTROL.search(row[label])
        assert row[label] == value or CONTROL.search(value)


@pytest.mark.untraced
@FEW
@given(st.lists(ANYTHING, min_size=2, max_size=4, unique=True))
def test_what_differs_stays_different(names: list[str]) -> None:
    owners = (Owner(job_id=str(n), name=name) for n, name in enumerate(names))
    spelt = {row["name"] for row in rows(render(told(*owners)))}
    sure = [name for name in names if "\\" not in name and not re.search("[\u2400-\u2421]", name)]
    assert len(spelt) >= len(set(sure))


@pytest.mark.untraced
@pytest.mark.slow
@pytest.mark.parametrize("sign", ["n", "\n", "\0", "\udcff", '"', "é", "\\"])
def test_a_megabyte_is_cut_and_two_that_begin_alike_are_two(sign: str) -> None:
    pair = [Owner(job_id=sign * LONG + end, name=sign * LONG) for end in "ab"]
    body = render(told(*pair))
    found = rows(body)
    assert len({row["job_id"] for row in found}) == 2
    assert all(len(row[label]) <= MAX_LABEL_LENGTH for row in found for label in ("job_id", "name"))
    assert len(body) < 1 << 20


@pytest.mark.untraced
@FEW
@given(ANYTHING, ANYTHING)
def test_what_jobs_and_engines_say_of_themselves_likewise(run: str, engine: str) -> None:
    second = 10**9
    said = TrainingReport("j", 0, 50 * second, run=run, steps=1, step=1, rank="0", quality=1.0, quality_name=engine)
    serves = ServingReport("j", 0, 50 * second, engine=engine, running=1.0)
    snapshot = told(Owner(job_id="j"), reports=(said,), serving=(serves,), faults=(Fault(run, engine),))
    body = render(snapshot)
    assert rows(body, "gpu_efficiency_job_engine_info")
    assert rows(body, "gpu_efficiency_faults_total")[-1]["kind"] == "other"


def test_accounts_beyond_the_limit_are_one() -> None:
    owners = [Owner(job_id=str(n), account=f"a{n}") for n in range(20)]
    found = rows(render(told(*owners, policy=Policy(max_accounts=5))), "gpu_efficiency_account_seconds_total")
    assert len({row["account"] for row in found}) <= 6
    assert "other" in {row["account"] for row in found}


@FEW
@given(ANYTHING, ANYTHING)
def test_the_whole_cluster_s_page_likewise(partition: str, reason: str) -> None:
    """Partitions are chosen by the site, namespaces by users; both are labels."""
    key = (partition, reason)
    queue = QueueTotals(jobs={key: 1}, gpus={key: 8}, waits={partition: 5.0})
    view = ClusterView(scheduler="slurm", questions=(QuestionStatus("jobs", 10, at=0),), queue=queue)
    (row,) = rows(page(view, now=1), "gpu_efficiency_cluster_queue_jobs")
    assert not CONTROL.search(row["partition"] + row["reason"])
