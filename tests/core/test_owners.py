"""Effects of an owner's limits, processes and account on the books."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exporter.core.attribution import divide_proportionally
from exporter.core.leaks import LEAK_NAMES
from exporter.core.ledger import OTHER_ACCOUNTS, Ledger
from exporter.core.model import Owner, Process, State
from exporter.core.pipeline import advance
from exporter.core.policy import Policy
from exporter.core.snapshot import DaemonMetadata, Snapshot, take_snapshot
from tests.worlds import RESTING, WORKING, S, device, first, held, reading, seen

ANN, BOB = Owner("ann", account="nlp"), Owner("bob", account="vision")


def paid(ledger: Ledger, job: str) -> float:
    return ledger.jobs[job].book.paid / S


def together(*processes: Process, share: float = 0.6, **signals: float) -> Ledger:
    """Ann and Bob on one GPU that has a kernel for `share` of ten seconds."""
    ledger = Ledger()
    advance(ledger, first([device()], [held(owner=ANN), held(owner=BOB)]))
    half = WORKING | dict.fromkeys(("gr_engine_active", "sm_active", "tensor_active"), share) | signals
    advance(ledger, seen(10, reading(0, 10, half, processes=processes)))
    return ledger


def test_who_shares_a_gpu_waits_in_equal_parts_and_pays_for_the_sm_time_its_processes_used() -> None:
    ledger = together(
        Process(1, job_id="ann", sm_active=0.3), Process(2, job_id="ann", sm_active=0.0),
        Process(3, job_id="bob", sm_active=0.1),
    )  # fmt: skip
    assert (paid(ledger, "ann"), paid(ledger, "bob")) == (2 + 6 * 0.75, 2 + 6 * 0.25)
    assert ledger.gpus["GPU-0"].shared == {"sm": 10 * S}
    assert sum(job.book.engine for job in ledger.jobs.values()) == ledger.gpus["GPU-0"].book.engine == 6 * S


@pytest.mark.parametrize(
    "processes",
    [
        (),
        (Process(1, job_id="ann", sm_active=0.0), Process(2, job_id="bob", sm_active=0.0)),
        (Process(1, job_id="ann", sm_active=0.3), Process(2, job_id="bob")),
        (Process(1, job_id="ann", sm_active=0.3), Process(2, job_id="eve", sm_active=0.1)),
        (Process(1, job_id="ann", sm_active=0.3), Process(2, sm_active=0.1)),
        (Process(1, job_id="ann", sm_active=7.0), Process(2, job_id="bob", sm_active=0.1)),
        (Process(1, job_id="ann", sm_active=float("nan")), Process(2, job_id="bob", sm_active=0.1)),
    ],
)
def test_where_it_is_not_told_whose_sm_time_it_was_all_is_split_equally(processes: tuple[Process, ...]) -> None:
    ledger = together(*processes)
    assert (paid(ledger, "ann"), paid(ledger, "bob")) == (5.0, 5.0)
    assert ledger.gpus["GPU-0"].shared == {"equal": 10 * S}


def test_what_runs_while_there_is_one_process_is_that_one_s() -> None:
    ledger = together(Process(2, job_id="bob"))
    assert (paid(ledger, "ann"), paid(ledger, "bob")) == (2.0, 8.0)
    assert together(Process(2, job_id="eve")).gpus["GPU-0"].shared == {"equal": 10 * S}


def test_a_process_of_nobody_that_rests_spoils_nothing() -> None:
    ledger = together(Process(1, job_id="ann", sm_active=0.3), Process(9, sm_active=0.0))
    assert (paid(ledger, "ann"), paid(ledger, "bob")) == (8.0, 2.0)


def test_a_gpu_held_by_one_is_not_shared_whatever_runs_on_it() -> None:
    ledger = Ledger()
    advance(ledger, first([device()], [held(owner=ANN)]))
    advance(ledger, seen(10, reading(0, 10, processes=(Process(1, job_id="bob", sm_active=0.9),))))
    assert paid(ledger, "ann") == 10.0
    assert ledger.gpus["GPU-0"].shared == {}


@given(st.integers(0, 10**12), st.lists(st.integers(0, 10**9), min_size=1).filter(any))
def test_parts_add_up_to_the_whole_and_are_as_large_as_their_weights(whole: int, weights: list[int]) -> None:
    parts = divide_proportionally(whole, weights)
    assert sum(parts) == whole
    assert all(abs(p - whole * w / sum(weights)) <= 1 + whole * 1e-12 for p, w in zip(parts, weights, strict=True))


@pytest.mark.parametrize(("own", "after"), [(None, 1800), (60.0, 60), (7200.0, 7200)])
def test_an_owner_may_have_its_own_limit_of_rest(own: float | None, after: int) -> None:
    ledger = Ledger()
    advance(ledger, first([device()], [held(owner=Owner("j", zombie_seconds=own))]))
    advance(ledger, seen(1, reading(0, 1)))
    at = 1
    while ledger.gpus["GPU-0"].state is not State.ZOMBIE:
        at += 10
        assert at < 9000
        advance(ledger, seen(at, reading(at - 10, at, RESTING)))
    assert after <= at <= after * 1.02 + 120


def test_of_several_owners_the_longest_limit_of_rest_counts() -> None:
    ledger = Ledger()
    owners = [Owner("short", zombie_seconds=60.0), Owner("long", zombie_seconds=600.0)]
    advance(ledger, first([device()], [held(owner=owner) for owner in owners]))
    states = []
    for start, end in ((0, 590), (590, 610)):
        advance(ledger, seen(end, reading(start, end, RESTING)))
        states.append(ledger.gpus["GPU-0"].state)
    assert states == [State.STALLED, State.ZOMBIE]


def bills(ledger: Ledger) -> dict[tuple[str, str, str], float]:
    return {account: sum(parts) / S for account, parts in snapshot(ledger).account_totals}


def snapshot(ledger: Ledger) -> Snapshot:
    return take_snapshot(ledger, DaemonMetadata())


def test_what_a_job_cost_stays_in_its_account_when_the_job_is_gone() -> None:
    ledger = Ledger(Policy(job_linger_seconds=5))
    advance(ledger, first([device()], [held(owner=ANN, end=S)]))
    advance(ledger, seen(1, reading(0, 1)))
    assert bills(ledger) == {("", "nlp", ""): 1.0}
    for at in range(2, 12):
        advance(ledger, seen(at, reading(at - 1, at, RESTING), allocations=()))
    assert ledger.jobs == {}
    assert bills(ledger) == {("", "nlp", ""): 1.0}
    parts = dict(snapshot(ledger).account_totals)["", "nlp", ""]
    assert parts[LEAK_NAMES.index("useful")] == round(0.45 * S)


@pytest.mark.parametrize("read", [True, False])
def test_what_is_learnt_of_a_job_bills_its_later_time_and_no_counter_falls(*, read: bool) -> None:
    """Independent of reads of the account totals in between."""
    ledger = Ledger()
    advance(ledger, first([device()], [held(owner=Owner("ann"))]))
    advance(ledger, seen(2, reading(0, 2)))
    before = bills(ledger) if read else {("", "", ""): 2.0}
    advance(ledger, seen(5, reading(2, 5), allocations=(held(owner=ANN),)))
    advance(ledger, seen(6, reading(5, 6)))
    assert before == {("", "", ""): 2.0}
    assert bills(ledger) == {("", "", ""): 2.0, ("", "nlp", ""): 4.0}
    advance(ledger, seen(7, reading(6, 7), allocations=(held(owner=Owner("ann", "slurm", account="nlp")),)))
    assert bills(ledger) == {("", "", ""): 2.0, ("", "nlp", ""): 5.0}, "another name, the same account"


def in_turn(policy: Policy, *accounts: str) -> list[dict[str, float]]:
    """A job of each account in turn, for a second and one after the other; the bills after each."""
    ledger, found = Ledger(policy), []
    advance(ledger, first([device()]))
    for n, account in enumerate(accounts):
        job = Owner(f"j{n}", account=account)
        advance(ledger, seen(n + 1, reading(n, n + 1), allocations=(held(owner=job, start=n, end=(n + 1) * S),)))
        found.append({key[1]: seconds for key, seconds in bills(ledger).items()})
    return found


def test_of_accounts_in_turn_the_one_without_a_job_for_longest_makes_room() -> None:
    """A job stays for a second after its end; until then its account is not dropped."""
    policy = Policy(max_accounts=3, job_linger_seconds=0.5)
    *_, before, last = in_turn(policy, "a", "b", "a", "c", "d", "a")
    assert before == {"a": 2.0, "c": 1.0, "d": 1.0}, "b was billed longest ago, though a came first"
    assert last == {"a": 3.0, "c": 1.0, "d": 1.0}
    assert in_turn(policy, "a", "b", "c", "d", "a")[-1] == {"a": 1.0, "c": 1.0, "d": 1.0}, "what returns begins anew"
    storm = in_turn(policy, *(f"a{n}" for n in range(200)))
    assert all(set(told.values()) == {1.0} and len(told) <= 3 for told in storm)
    assert storm[-1].keys() == {"a197", "a198", "a199"}


def test_an_account_is_billed_as_other_only_while_all_have_jobs() -> None:
    """Four jobs where there is room for three accounts; when two of them have ended, the next account has a series."""
    ledger = Ledger(Policy(max_accounts=3, job_linger_seconds=0.5))
    owners = [Owner(f"{n}", account=f"a{n}") for n in range(5)]
    advance(ledger, first([device()], [held(owner=owner) for owner in owners[:4]]))
    advance(ledger, seen(4, reading(0, 4, RESTING)))
    assert bills(ledger) == {("", "a0", ""): 1.0, ("", "a1", ""): 1.0, ("", "a2", ""): 1.0, OTHER_ACCOUNTS: 1.0}
    advance(ledger, seen(6, reading(4, 6, RESTING), allocations=(held(owner=owners[0]), held(owner=owners[3]))))
    assert ledger.jobs.keys() == {"0", "3"}
    now = tuple(held(owner=owners[n]) for n in (0, 4))
    advance(ledger, seen(8, reading(6, 8, RESTING), allocations=now))
    assert bills(ledger) == {("", "a0", ""): 3.0, ("", "a2", ""): 1.0, ("", "a4", ""): 1.0, OTHER_ACCOUNTS: 2.0}


def test_a_lower_limit_applies_with_the_next_account() -> None:
    ledger = Ledger(Policy(max_accounts=4, job_linger_seconds=0.5))
    advance(ledger, first([device()]))
    for n, limit in enumerate((4, 4, 4, 4, 2, 2)):
        ledger.update_policy(Policy(max_accounts=limit, job_linger_seconds=0.5), {})
        job = Owner(f"j{n}", account=f"a{n}")
        advance(ledger, seen(n + 1, reading(n, n + 1), allocations=(held(owner=job, start=n, end=(n + 1) * S),)))
    assert [key[1] for key in bills(ledger)] == ["a4", "a5"]


def test_a_job_that_is_gone_and_comes_back_is_billed_on() -> None:
    ledger = Ledger(Policy(job_linger_seconds=1))
    advance(ledger, first([device()], [held(owner=ANN, end=S)]))
    for at in range(1, 10):
        advance(ledger, seen(at, reading(at - 1, at), allocations=() if at > 1 else None))
    advance(ledger, seen(12, reading(9, 12), allocations=(held(owner=ANN, start=9),)))
    assert bills(ledger) == {("", "nlp", ""): 4.0}


def test_from_the_first_gpu_to_the_first_kernel() -> None:
    ledger = Ledger()
    advance(ledger, first([device()]))
    advance(ledger, seen(10, reading(0, 10, RESTING), allocations=(held(owner=ANN, start=3),)))
    assert [(j.start / S, j.first_work) for j in snapshot(ledger).jobs] == [(3.0, None)]
    advance(ledger, seen(20, reading(10, 20, RESTING)))
    advance(ledger, seen(30, reading(20, 30)))
    advance(ledger, seen(40, reading(30, 40)))
    (job,) = snapshot(ledger).jobs
    assert job.first_work == 17 * S


def test_a_job_that_was_there_before_the_daemon_has_no_first_kernel_to_tell() -> None:
    ledger = Ledger()
    advance(ledger, first([device()], [held(owner=ANN, start=-100)]))
    advance(ledger, seen(10, reading(0, 10, RESTING)))
    advance(ledger, seen(20, reading(10, 20)))
    (job,) = snapshot(ledger).jobs
    assert (job.start / S, job.first_work) == (-100.0, None)
