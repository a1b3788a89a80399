"""Details of detected states: since when, with which evidence, for which job."""

from collections.abc import Mapping
from math import nan
from typing import Any

import pytest
from msgspec.structs import replace

from exporter.core.evidence import HANG_SIGNS
from exporter.core.ledger import Ledger
from exporter.core.model import Health, Observation, Owner, Process, State, TrainingReport
from exporter.core.pipeline import advance
from exporter.core.policy import EXPORTED_THRESHOLDS, Policy
from exporter.core.snapshot import DaemonMetadata, GpuView, JobView, Snapshot, take_snapshot
from tests.core.test_exposition import lines
from tests.core.test_states import state, story
from tests.worlds import H100, JOB, RESTING, SOMEBODY, SPINNING, WORKING, S, device, first, held, reading, seen

SERVER = Owner("web", workload_class="serving")
PLAIN: dict[str, Any] = {
    "gpu_utilization": 1.0, "power_watts": 130.0, "enforced_power_limit_watts": 700.0, "temperature_celsius": 40.0,
    "processes": SOMEBODY,
}  # fmt: skip
"""What NVML tells of a board without GPM."""


def shown(ledger: Ledger) -> Snapshot:
    return take_snapshot(ledger, DaemonMetadata())


def gpu(ledger: Ledger) -> GpuView:
    return shown(ledger).gpus[0]


def job(ledger: Ledger) -> JobView:
    return shown(ledger).jobs[0]


def test_a_spin_is_dated_from_its_first_reading() -> None:
    ledger = story([(60, WORKING), (30, SPINNING)])
    assert (gpu(ledger).spin_since, gpu(ledger).hang_suspected) == (60 * S, False)
    assert (job(ledger).suspected, job(ledger).spin_since) == (0, None)
    longer = story([(60, WORKING), (130, SPINNING)])
    assert (job(longer).suspected, job(longer).spin_since) == (1, 60 * S)
    hung = story([(60, WORKING), (400, SPINNING)])
    assert (gpu(hung).spin_since, job(hung).suspected) == (60 * S, 1)


def test_work_ends_a_spin_and_its_date() -> None:
    ledger = story([(60, SPINNING), (60, WORKING)])
    assert (gpu(ledger).spin_since, gpu(ledger).hang_confidence, gpu(ledger).hang_signs) == (None, None, ())
    again = story([(400, SPINNING), (60, WORKING), (10, SPINNING)])
    assert gpu(again).spin_since == 460 * S


def test_time_that_was_not_seen_takes_a_suspicion_back() -> None:
    ledger = story([(60, SPINNING), (60, SPINNING | {"distrust": "stale"})])
    assert gpu(ledger).spin_since is None
    longer = story([(60, SPINNING), (30, SPINNING | {"distrust": "stale"})])
    assert gpu(longer).spin_since == 0


@pytest.mark.parametrize(
    ("changes", "unseen"),
    [
        ({}, set[str]()),
        ({"pcie_tx_bytes_per_second": None, "pcie_rx_bytes_per_second": None}, {"pcie_rest"}),
        ({"fp32_active": None}, {"fp_rest"}),
        ({"power_watts": None}, {"power_flat"}),
    ],
)
def test_each_sign_of_a_hang_is_told_if_it_can_be_seen(changes: dict[str, Any], unseen: set[str]) -> None:
    """These readings have no temperature."""
    view = gpu(story([(200, SPINNING | changes)]))
    assert dict(view.hang_signs) == dict.fromkeys(set(HANG_SIGNS) - unseen - {"temperature_falling"}, True)
    assert view.hang_confidence == (7 - len(unseen)) / 8


@pytest.mark.parametrize(("last", "sign"), [(57, {True}), (58, set()), (62, set()), (63, {False})])
def test_a_temperature_that_falls_speaks_for_a_hang_and_one_that_rises_against(last: float, sign: set[bool]) -> None:
    warm = {"temperature_celsius": 60.0}
    ledger = story([(60, WORKING | warm), (10, SPINNING | warm), (190, SPINNING | {"temperature_celsius": last})])
    assert {agrees for name, agrees in gpu(ledger).hang_signs if name == "temperature_falling"} == sign


def test_signs_are_told_while_a_hang_is_suspected_and_agree_with_the_evidence() -> None:
    early, late = (story([(60, WORKING), (spun, SPINNING)]) for spun in (119, 121))
    assert lines(shown(early), "hang_sign") == []
    assert lines(shown(late), "hang_sign")[0] == 'hang_sign{uuid="GPU-0",gpu="0",sign="engine_busy"} 1'
    assert lines(shown(late), "hang_confidence_ratio") == ['hang_confidence_ratio{uuid="GPU-0",gpu="0"} 0.875']
    assert lines(shown(story([(60, WORKING)])), "hang_suspected") == []


def test_memory_and_links_are_told_while_a_gpu_spins_for_the_eye_to_confirm() -> None:
    rest = {"dram_active": 0.004, "nvlink_tx_bytes_per_second": 20.0, "nvlink_rx_bytes_per_second": 30.0}
    pcie = {"pcie_tx_bytes_per_second": 5e6, "pcie_rx_bytes_per_second": None}
    page = shown(story([(60, WORKING), (30, SPINNING | rest | pcie)]))
    assert lines(page, "spin_dram_active_ratio") == ['spin_dram_active_ratio{uuid="GPU-0",gpu="0"} 0.004']
    assert lines(page, "spin_link_bytes_per_second") == [
        'spin_link_bytes_per_second{uuid="GPU-0",gpu="0",link="nvlink"} 30.0',
        'spin_link_bytes_per_second{uuid="GPU-0",gpu="0",link="pcie"} 5000000.0',
    ]
    blind = dict.fromkeys(("nvlink_tx_bytes_per_second", "nvlink_rx_bytes_per_second"))
    assert len(lines(shown(story([(30, SPINNING | blind)])), "spin_link_bytes_per_second")) == 1
    for quiet in (story([(60, WORKING)]), story([(60, SPINNING), (10, SPINNING | {"distrust": "stale"})])):
        assert lines(shown(quiet), "spin_dram_active_ratio") == []
        assert lines(shown(quiet), "spin_link_bytes_per_second") == []


def test_the_last_reading_s_signs_are_the_last_believed_one_s() -> None:
    ledger = story([(200, SPINNING), (10, WORKING)])
    assert dict(gpu(ledger).hang_signs) == {}
    stray = story([(200, SPINNING), (1, RESTING)], step=1.0)
    assert dict(gpu(stray).hang_signs)["engine_busy"] is False


@pytest.mark.parametrize(
    ("changes", "suspected"),
    [
        ({}, True),
        ({"gpu_utilization": 0.97}, False),
        ({"power_watts": 167.0}, False),
        ({"power_watts": 165.0}, True),
        ({"power_watts": None}, False),
        ({"processes": ()}, False),
        ({"processes": None}, True),
        ({"pcie_rx_bytes_per_second": 1e10}, False),
    ],
)
def test_without_a_profiler_power_against_utilisation_is_a_suspicion_and_never_more(
    changes: dict[str, Any], suspected: bool
) -> None:
    ledger = story([(4000, PLAIN | changes)])
    assert gpu(ledger).hang_suspected is suspected
    assert state(ledger)[0] is State.ACTIVE


def test_power_says_nothing_where_the_board_smooths_it() -> None:
    ledger = Ledger()
    smooth = Health("GPU-0", power_smoothing=True)
    advance(ledger, replace(first([device()], [held()]), health=(smooth,)))
    advance(ledger, seen(400, reading(0, 400, PLAIN)))
    assert not gpu(ledger).hang_suspected


@pytest.mark.untraced
def test_a_server_that_spins_polls_until_its_requests_are_known() -> None:
    """A server is never hung or suspected, but a zombie after five hours, with the reason."""
    early, late = story([(9000, SPINNING)], owner=SERVER), story([(18000, SPINNING)], owner=SERVER)
    assert state(early) == (State.ACTIVE, "idle_spin", 0.0)
    assert (gpu(early).hang_suspected, gpu(early).spin_since) == (False, None)
    assert state(late)[:2] == (State.ACTIVE, "idle_spin")
    assert state(story([(18010, SPINNING)], owner=SERVER)) == (State.ZOMBIE, "idle_spin", 18000.0)


def processes_of(signals: dict[str, Any], uses: Mapping[str, float | None]) -> dict[str, Any]:
    """`signals` with a process of each job that uses so much of the SM time."""
    used = enumerate(uses.items())
    return signals | {"processes": tuple(Process(n, job_id=job_id, sm_active=share) for n, (job_id, share) in used)}


def shared(*owners: Owner, uses: dict[str, float], spun: float) -> Ledger:
    """A GPU of several jobs with one process each works for a minute, then spins; `uses`: SM time by job ID."""
    ledger = Ledger()
    advance(ledger, first([device()], [held(owner=owner) for owner in owners]))
    advance(ledger, seen(60, reading(0, 60, processes_of(WORKING, uses))))
    advance(ledger, seen(60 + spun, reading(60, 60 + spun, processes_of(SPINNING, uses))))
    return ledger


def test_a_server_beside_a_batch_job_on_one_gpu_proves_nothing_about_the_other() -> None:
    ledger = shared(SERVER, JOB, uses={"41": 0.1, "web": 0.0}, spun=700)
    assert state(ledger) == (State.HUNG, "spinning", 660.0)


def test_an_owner_s_own_patience_counts_and_of_several_the_longest() -> None:
    slow = Owner("slow", hang_seconds=1000.0)
    assert state(story([(60, WORKING), (990, SPINNING)], owner=slow))[0] is State.ACTIVE
    assert state(story([(60, WORKING), (1010, SPINNING)], owner=slow)) == (State.HUNG, "spinning", 1060.0)
    quick = Owner("quick", hang_seconds=60.0)
    assert state(story([(60, WORKING), (70, SPINNING)], owner=quick)) == (State.HUNG, "spinning", 120.0)
    assert gpu(story([(60, WORKING), (60, SPINNING)], owner=quick)).hang_suspected
    both = {"slow": 0.05, "quick": 0.05}
    assert state(shared(slow, quick, uses=both, spun=990))[0] is State.ACTIVE
    assert state(shared(slow, quick, uses=both, spun=1010)) == (State.HUNG, "spinning", 1060.0)


def test_a_hang_with_little_patience_is_not_confirmed_without_its_evidence_either() -> None:
    blind = SPINNING | {"dram_active": None}
    ledger = story([(60, WORKING), (400, blind)], owner=Owner("quick", hang_seconds=60.0))
    assert state(ledger)[0] is State.ACTIVE
    assert gpu(ledger).hang_suspected


def test_a_hang_with_little_patience_ends_with_the_spin() -> None:
    quick = Owner("quick", hang_seconds=60.0)
    ledger = story([(60, WORKING), (70, SPINNING), (20, WORKING)], owner=quick, step=1.0)
    assert state(ledger)[0] is State.ACTIVE
    assert state(story([(60, WORKING), (70, SPINNING)], owner=quick, step=1.0))[0] is State.HUNG


@pytest.mark.parametrize("name", ["NVIDIA H100 80GB HBM3", "H100"])
def test_a_model_may_have_thresholds_of_its_own(name: str) -> None:
    ledger = Ledger(Policy(), {name: Policy(hang_seconds=60.0, spin_power_share_with_fp=0.5)})
    other = replace(device("GPU-1", "1"), model="NVIDIA L4", spec=replace(H100, name="L4"))
    advance(ledger, first([device(), other], [held(), held("GPU-1", Owner("42"))]))
    advance(ledger, seen(60, reading(0, 60), reading(0, 60, uuid="GPU-1")))
    loud = SPINNING | {"power_watts": 400.0}
    advance(ledger, seen(150, reading(60, 150, loud), reading(60, 150, loud, uuid="GPU-1")))
    assert [state(ledger, uuid)[0] for uuid in ("GPU-0", "GPU-1")] == [State.HUNG, State.ACTIVE]
    unknown = Ledger(Policy(), {name: Policy(hang_seconds=60.0)})
    advance(unknown, first([replace(device(), model="other", spec=None)], [held()]))
    advance(unknown, seen(60, reading(0, 60)))
    advance(unknown, seen(150, reading(60, 150, SPINNING)))
    assert state(unknown)[0] is State.ACTIVE


def test_the_last_work_of_a_gpu_and_of_its_job() -> None:
    ledger = story([(60, WORKING), (200, RESTING)])
    assert (gpu(ledger).worked_at, job(ledger).worked_at) == (60 * S, 60 * S)
    assert lines(shown(ledger), "last_work_timestamp_seconds") == [
        'last_work_timestamp_seconds{uuid="GPU-0",gpu="0"} 60.0'
    ]
    assert gpu(story([(60, RESTING)], owner=None)).worked_at is None
    assert gpu(story([(60, RESTING)])).worked_at == 0


def test_who_comes_next_is_not_told_of_the_work_before() -> None:
    ledger = Ledger()
    late = replace(JOB, job_id="42")
    advance(ledger, first([device()], [held(end=100 * S)]))
    advance(ledger, seen(100, reading(0, 100)))
    advance(ledger, Observation(110 * S, 110 * S, allocations=(held(owner=late, start=100),)))
    advance(ledger, seen(120, reading(100, 120, RESTING)))
    assert gpu(ledger).worked_at == 100 * S


def test_gpus_without_a_process_are_counted_and_dated() -> None:
    bare = RESTING | {"processes": ()}
    ledger = story([(60, WORKING), (200, bare)])
    assert (job(ledger).without_process, job(ledger).without_process_since) == (1, 60 * S)
    assert lines(shown(ledger), "job_no_process_gpus") == ['job_no_process_gpus{job_id="41"} 1']
    back = story([(60, bare), (60, RESTING)])
    assert (job(back).without_process, job(back).without_process_since) == (0, None)
    unseen = story([(60, bare), (60, RESTING | {"processes": None})])
    assert (job(unseen).without_process, lines(shown(unseen), "job_no_process_since_timestamp_seconds")) == (0, [])


def test_a_job_s_gpus_by_their_state() -> None:
    ledger = Ledger()
    gpus = [device(f"GPU-{n}", f"{n}") for n in range(3)]
    advance(ledger, first(gpus, [held(g.uuid, gpus=3) for g in gpus]))
    kinds = (WORKING, RESTING, WORKING)
    advance(ledger, seen(60, *(reading(0, 60, k, g.uuid) for k, g in zip(kinds, gpus, strict=True))))
    assert lines(shown(ledger), "job_state_gpus") == [
        'job_state_gpus{job_id="41",state="active"} 2', 'job_state_gpus{job_id="41",state="stalled"} 1',
    ]  # fmt: skip


def test_entries_and_detection_times_of_states() -> None:
    """One hang after 600 s of spinning; a zombie after half an hour.

    The first spin lasts 700 s and ten more, in which work ends it; the second is a hang after 1.2 times that.
    """
    hung = shown(story([(60, WORKING), (700, SPINNING), (60, WORKING), (900, SPINNING)]))
    assert dict(hung.state_entries)[State.HUNG] == 2
    assert hung.detections == ((State.HUNG, 2, (600 + 852) * S), (State.ZOMBIE, 0, 0))
    zombie = shown(story([(60, WORKING), (2000, RESTING)]))
    assert dict(zombie.state_entries)[State.ZOMBIE] == 1
    assert zombie.detections == ((State.HUNG, 0, 0), (State.ZOMBIE, 1, 1800 * S))
    assert lines(zombie, "detections_total")[1] == 'detections_total{state="zombie"} 1'
    assert lines(zombie, "state_entries_total")[5] == 'state_entries_total{state="zombie"} 1'


def test_an_exemption_covers_a_job_until_it_expires() -> None:
    spared = replace(JOB, exemption="eval", exempt_until=100.0)
    early, late = story([(90, RESTING)], owner=spared), story([(100, RESTING)], owner=spared)
    assert lines(shown(early), "job_exempt") == ['job_exempt{job_id="41",exemption="eval"} 1']
    assert lines(shown(late), "job_exempt") == []


def test_thresholds_are_told_as_they_are() -> None:
    told = dict(take_snapshot(Ledger(Policy(hang_seconds=77.0)), DaemonMetadata()).thresholds)
    assert (told["hang_seconds"], told["zombie_batch_seconds"], len(told)) == (77.0, 1800.0, len(EXPORTED_THRESHOLDS))


def report(flops: float, start: float = 0, end: float = 60, job_id: str = "41") -> TrainingReport:
    return TrainingReport(job_id, round(start * S), round(end * S), flops)


def test_a_job_s_own_count_stands_beside_what_its_gpus_could_do() -> None:
    ledger = story([(60, WORKING)])
    assert lines(shown(ledger), "job_reported_mfu_ratio") == []
    advance(ledger, replace(seen(61), reports=(report(0.4 * 989.4e12 * 60),)))
    assert shown(ledger).jobs[0].counters.short_ratio("reported", "reportable") == pytest.approx(0.4)
    assert ledger.refused["report"] == 0


@pytest.mark.parametrize(
    "wrong", [report(nan), report(-1.0), report(1e30), report(1.0, 60, 60), report(1.0, job_id="42")]
)
def test_a_count_that_cannot_be_is_refused(wrong: TrainingReport) -> None:
    ledger = story([(60, WORKING)])
    advance(ledger, replace(seen(61), reports=(wrong,)))
    assert (ledger.refused["report"], ledger.jobs["41"].book.reportable) == (1, 0)


def test_of_a_count_on_an_unknown_board_nobody_can_say_what_share_of_the_peak_it_is() -> None:
    ledger = Ledger()
    advance(ledger, first([device(spec=None)], [held()]))
    advance(ledger, replace(seen(60, reading(0, 60)), reports=(report(1.0),)))
    assert ledger.refused["report"] == 0
    assert lines(shown(ledger), "job_reported_mfu_ratio") == []


def test_a_process_list_that_is_not_empty_is_no_sign_of_anything() -> None:
    """A process of another job counts as a process on the GPU."""
    ledger = story([(60, RESTING | {"processes": (Process(1), Process(2))})])
    assert job(ledger).without_process == 0


def learnt(before: Owner, after: Owner, seconds: float, signals: dict[str, Any]) -> Ledger:
    """Attributes of a job become known after it has been spinning or idle for a while."""
    ledger, at = story([(60, WORKING), (seconds, signals)], owner=before), 60 + seconds
    advance(ledger, Observation(round(at * S), round(at * S), allocations=(held(owner=after),)))
    advance(ledger, seen(at + 10, reading(at, at + 10, signals)))
    return ledger


def test_what_becomes_known_of_a_job_moves_its_limits() -> None:
    person = replace(JOB, workload_class="interactive")
    assert state(learnt(JOB, JOB, 2000, RESTING))[0] is State.ZOMBIE
    assert state(learnt(JOB, person, 2000, RESTING))[0] is State.STALLED
    assert state(learnt(JOB, replace(JOB, user="bob"), 2000, RESTING)) == (State.ZOMBIE, "idle_context", 1860.0)
    assert state(learnt(person, JOB, 2000, RESTING))[0] is State.ZOMBIE
    patient = replace(JOB, hang_seconds=900.0)
    assert state(learnt(JOB, patient, 700, SPINNING))[0] is State.ACTIVE
    assert state(learnt(patient, JOB, 700, SPINNING))[0] is State.HUNG
    assert state(learnt(JOB, replace(JOB, zombie_seconds=60.0), 700, SPINNING))[0] is State.HUNG


def test_a_job_that_turns_out_to_serve_hangs_no_more() -> None:
    ledger = learnt(JOB, replace(JOB, workload_class="serving"), 700, SPINNING)
    assert state(ledger)[:2] == (State.ACTIVE, "idle_spin")
    assert (gpu(ledger).hang_suspected, gpu(ledger).spin_since) == (False, None)
