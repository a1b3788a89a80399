"""Ten thousand jobs an hour on one node: memory stays bounded, and all time is billed."""

import gc
import tracemalloc

import pytest

from exporter.core.exposition import render
from exporter.core.ledger import AccountKey, Ledger
from exporter.core.metrics import max_series_of_scope
from exporter.core.model import Owner
from exporter.core.pipeline import advance
from exporter.core.policy import Policy
from exporter.core.snapshot import DaemonMetadata, take_snapshot
from tests.worlds import S, device, first, held, reading, seen

GPUS = [f"GPU-{n}" for n in range(8)]


def storm(ledger: Ledger, begin: int, end: int) -> None:
    """Each second three of the eight GPUs are allocated to new jobs, of new users and accounts."""
    for at in range(begin, end):
        jobs = [Owner(f"{at}-{n}", user=f"u{at}{n}", account=f"a{at}{n}", namespace=f"n{at}") for n in range(3)]
        holding = [held(uuid, job, start=at) for uuid, job in zip(GPUS, jobs, strict=False)]
        ended = [held(uuid, Owner(f"{at - 1}-{n}"), start=at - 1, end=at * S) for n, uuid in enumerate(GPUS[:3])]
        readings = [reading(at, at + 1, uuid=uuid) for uuid in GPUS]
        advance(ledger, seen(at + 1, *readings, allocations=(*ended, *holding)))


@pytest.mark.untraced
@pytest.mark.slow
def test_series_and_memory_stay_bounded_and_every_second_is_billed() -> None:
    ledger = Ledger()
    advance(ledger, first([device(uuid, uuid[-1]) for uuid in GPUS]))
    storm(ledger, 0, 300)
    gc.collect()
    tracemalloc.start()
    storm(ledger, 300, 330)
    gc.collect()
    before, _ = tracemalloc.get_traced_memory()
    storm(ledger, 330, 600)
    gc.collect()
    after, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert after - before < 1_000_000
    policy = Policy()
    # Three more hold a GPU, and three more ended in the last second.
    assert len(ledger.jobs) <= policy.max_jobs + 6
    page = render(take_snapshot(ledger, DaemonMetadata())).decode()
    told = [line for line in page.splitlines() if "job_id=" in line and "allocation_info" not in line]
    assert len(told) <= (policy.max_jobs + 6) * max_series_of_scope("job")
    assert page.count("account_seconds_total{") <= (policy.max_accounts + 1) * max_series_of_scope("account")


@pytest.mark.untraced
@pytest.mark.slow
def test_whoever_scrapes_sees_every_second_billed() -> None:
    """Accounts come and go; a counter that is lower than before, or new, has begun at 0."""
    ledger = Ledger()
    advance(ledger, first([device(uuid, uuid[-1]) for uuid in GPUS]))
    seen_before: dict[AccountKey, int] = {}
    billed = 0
    for at in range(300):
        storm(ledger, at, at + 1)
        bills = {account: sum(parts) for account, parts in ledger.account_totals().items()}
        for account, total in bills.items():
            last = seen_before.get(account, 0)
            billed += total - (last if last <= total else 0)
        seen_before = bills
    assert billed == 3 * 300 * S
