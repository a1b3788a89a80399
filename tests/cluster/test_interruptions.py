"""Requeues, preemptions and node failures, step by step."""

from typing import Any

from exporter.cluster.interruptions import MOST_FAILURES, MOST_PREEMPTION_KINDS, Interruptions
from exporter.cluster.model import ClusterJob, ClusterNode, Nodes, Partition

TIERS = {"gpu": Partition(1, preemptable=True), "urgent": Partition(9, preemptable=False)}


def running(job_id: str = "1", restarts: int = 0, **gpus: int) -> ClusterJob:
    return ClusterJob(job_id, "gpu", gpus, tuple(gpus), restarts=restarts, running=True)


def waiting(job_id: str = "1", restarts: int = 1, **more: object) -> ClusterJob:
    return ClusterJob(job_id, "gpu", restarts=restarts, **more)  # type: ignore[arg-type]


def nodes(**states: str) -> list[ClusterNode]:
    return [ClusterNode(name, {"h100": 8}, state=state) for name, state in states.items()]


def told(*steps: list[ClusterJob] | list[ClusterNode]) -> Interruptions:
    """Apply each in turn."""
    found = Interruptions()
    for at, step in enumerate(steps):
        if step and isinstance(step[0], ClusterNode):
            found.update_nodes(Nodes(tuple(each for each in step if isinstance(each, ClusterNode)), TIERS))
        else:
            found.update_jobs([each for each in step if isinstance(each, ClusterJob)], at=float(at))
    return found


GOOD = nodes(n1="mixed", n2="mixed")


def test_a_node_that_went_down_is_the_cause_and_named() -> None:
    found = told(GOOD, [running(n1=8, n2=8)], [waiting()], nodes(n1="mixed", n2="down"))
    assert found.jobs == {("gpu", "node_failure", "requeued"): 1}
    assert found.gpus == {("gpu", "node_failure", "requeued"): 16}
    assert [(each.node, each.job_id, each.at) for each in found.failures] == [("n2", "1", 2.0)]


def test_nodes_that_were_seen_bad_before_the_requeue_was_need_not_be_seen_again() -> None:
    found = told(GOOD, [running(n1=8)], nodes(n1="down"), [waiting()])
    assert found.jobs == {("gpu", "node_failure", "requeued"): 1}


def test_before_the_nodes_are_seen_nothing_is_counted() -> None:
    assert told(GOOD, [running(n1=8)], [waiting()]).jobs == {}


def test_a_node_that_was_bad_before_is_not_the_cause() -> None:
    """An administrator drained the node while the job ran on; later the job was requeued by hand."""
    draining = nodes(n1="draining")
    found = told(draining, [running(n1=8)], [waiting()], draining)
    assert found.jobs == {("gpu", "unknown", "requeued"): 1}
    assert not found.failures


def test_a_draining_node_that_then_fails_is() -> None:
    found = told(nodes(n1="draining"), [running(n1=8)], [waiting()], nodes(n1="down"))
    assert found.jobs == {("gpu", "node_failure", "requeued"): 1}


def test_another_node_s_failure_is_not_the_cause() -> None:
    found = told(GOOD, [running(n1=8)], [waiting()], nodes(n1="mixed", n2="down"))
    assert found.jobs == {("gpu", "unknown", "requeued"): 1}


def test_the_node_fails_while_the_job_still_leaves_it() -> None:
    """The nodes are queried between two queries of the jobs, and the job's end is seen first."""
    leaving = ClusterJob("1", "gpu", {"n1": 8}, ("n1",))
    found = told(GOOD, [running(n1=8)], nodes(n1="down"), [leaving], nodes(n1="down"), [waiting()], nodes(n1="down"))
    assert found.jobs == {("gpu", "node_failure", "requeued"): 1}
    assert found.gpus == {("gpu", "node_failure", "requeued"): 8}


def test_the_first_look_counts_nothing() -> None:
    assert told([waiting(restarts=7)], GOOD).jobs == {}
    assert told([waiting(restarts=7)], GOOD, [waiting(restarts=7)], GOOD).jobs == {}


def test_a_job_that_is_new_with_restarts_counts_none_of_them() -> None:
    assert told([running("1", n1=1)], [running("1", n1=1), waiting("2", restarts=3)], GOOD).jobs == {}


def test_restarted_and_running_again_between_two_looks() -> None:
    found = told(GOOD, [running(n1=8)], [running(restarts=2, n2=8)], nodes(n1="down", n2="mixed"))
    assert found.jobs == {("gpu", "node_failure", "requeued"): 2}
    assert found.gpus == {("gpu", "node_failure", "requeued"): 16}


def test_preempted_where_it_is_said_even_if_nobody_is_seen_to_take_the_place() -> None:
    found = told(GOOD, [running(n1=8)], [waiting(cause="preempted")], [waiting()])
    assert found.jobs == {("gpu", "preempted", "requeued"): 1}
    assert found.preemptions == {("gpu", "", "unknown", ""): 1}
    assert [(each.job_id, each.by_job_id) for each in found.latest] == [("1", "unknown")]
    assert not found.costs


def test_a_job_that_a_failure_ended_for_good_is_counted_once() -> None:
    over = waiting(restarts=0, cause="node_failure", ended=True)
    found = told(GOOD, [running(n1=8)], [over], GOOD, [over], GOOD)
    assert found.jobs == {("gpu", "node_failure", "ended"): 1}


def test_the_node_that_the_scheduler_names_comes_first() -> None:
    over = waiting(restarts=0, cause="node_failure", culprit="n2", ended=True)
    found = told(GOOD, [running(n1=8, n2=8)], [over], nodes(n1="down", n2="mixed"))
    assert [each.node for each in found.failures] == ["n2"]


def test_a_pod_costs_its_own_gpus() -> None:
    found = told(GOOD, [running(n1=8, n2=8)], [running(restarts=1, n1=8)], GOOD)
    assert found.gpus == {("gpu", "unknown", "requeued"): 16}
    pod = ClusterJob("1", "gpu", {"n1": 8}, ("n1",), restarts=1, running=True, each=8)
    assert told(GOOD, [running(n1=8, n2=8)], [pod], GOOD).gpus == {("gpu", "unknown", "requeued"): 8}


def test_partitions_that_come_and_go_do_not_add_series_for_ever() -> None:
    found = Interruptions()
    found.update_jobs([ClusterJob(f"{n}", f"ns-{n}", {"n1": 1}, ("n1",), running=True) for n in range(500)], at=0.0)
    found.update_jobs([ClusterJob(f"{n}", f"ns-{n}", restarts=1) for n in range(500)], at=1.0)
    found.update_nodes(Nodes(tuple(GOOD)))
    assert len(found.jobs) == 200
    assert found.jobs["other", "unknown", "requeued"] == 500 - 199


def test_only_the_latest_failures_are_named() -> None:
    jobs = [str(number) for number in range(MOST_FAILURES + 10)]
    found = told(GOOD, [running(job, n1=1) for job in jobs], [waiting(job) for job in jobs], nodes(n1="down"))
    assert found.jobs == {("gpu", "node_failure", "requeued"): MOST_FAILURES + 10}
    assert [each.job_id for each in found.failures] == jobs[10:]


def run(job_id: str, partition: str = "gpu", *, started: float | None = None, **more: Any) -> ClusterJob:
    """Return a job of eight GPUs that runs on n1, unless said otherwise."""
    gpus = more.pop("gpus", {"n1": 8})
    return ClusterJob(job_id, partition, gpus, tuple(gpus), running=True, started=started, **more)


def requeued(job_id: str = "1", **more: Any) -> ClusterJob:
    return ClusterJob(job_id, "gpu", restarts=1, **more)


def test_a_requeue_is_a_preemption_where_a_job_of_a_higher_tier_takes_the_place() -> None:
    """Slurm says nothing of it once the job waits again."""
    found = told(GOOD, [run("1", started=100)], [requeued(left=160), run("2", "urgent", started=161)], GOOD)
    assert found.jobs == {("gpu", "preempted", "requeued"): 1}
    assert found.preemptions == {("gpu", "", "urgent", ""): 1}
    assert found.gpu_seconds == {("gpu", "preempted", "requeued"): 480}
    assert found.preempted_gpu_seconds == {("gpu", "", "urgent", ""): 480}
    assert [(each.job_id, each.by_job_id, each.at) for each in found.latest] == [("1", "2", 2.0)]
    assert found.costs == {("2", "urgent"): 480}


def test_of_the_same_tier_another_qos_may_preempt() -> None:
    found = told(GOOD, [run("1", qos="free")], [requeued(), run("2", qos="paid")], GOOD)
    assert found.preemptions == {("gpu", "free", "gpu", "paid"): 1}


def test_it_is_none_without_a_job_that_may_preempt_and_took_the_place_meanwhile() -> None:
    victim, there = run("1", gpus={"n1": 4}), run("3", "urgent", gpus={"n1": 4})
    others = {
        "the next in the same queue": run("2"),
        "one that was there before": there,
        "one on another node": run("2", "urgent", gpus={"n2": 8}),
        "one that waits": ClusterJob("2", "urgent"),
    }
    for why, other in others.items():
        found = told(GOOD, [victim, there], [requeued(), other], GOOD)
        assert found.jobs == {("gpu", "unknown", "requeued"): 1}, why
        assert not found.latest, why


def test_jobs_that_cannot_be_preempted_were_not() -> None:
    """Where partitions have tiers for their order alone."""
    found = Interruptions()
    for order in (Partition(1, preemptable=False), Partition(9, preemptable=False)):
        found.update_nodes(Nodes(tuple(GOOD), {"gpu": order, "urgent": TIERS["urgent"]}))
    found.update_jobs([run("1")], at=0.0)
    found.update_jobs([requeued(), run("2", "urgent")], at=60.0)
    found.update_nodes(Nodes(tuple(GOOD), {"gpu": Partition(1, preemptable=False), "urgent": TIERS["urgent"]}))
    assert found.jobs == {("gpu", "unknown", "requeued"): 1}


def test_a_node_that_failed_is_the_cause_whoever_comes_after() -> None:
    victim, after = run("1", gpus={"n1": 8, "n2": 8}), run("2", "urgent")
    found = told(GOOD, [victim], [requeued(), after], nodes(n1="mixed", n2="down"))
    assert found.jobs == {("gpu", "node_failure", "requeued"): 1}
    assert not found.preemptions


def test_who_preempts_a_job_that_still_leaves_starts_a_moment_later() -> None:
    leaving = requeued(cause="preempted", left=150)
    found = told(GOOD, [run("1", started=100)], [leaving], [requeued(left=155), run("2", "urgent", started=155)])
    assert found.preemptions == {("gpu", "", "urgent", ""): 1}
    assert found.gpu_seconds == {("gpu", "preempted", "requeued"): 400}, "until it began to leave"


def test_of_several_the_one_that_started_next_to_the_end_is_it_and_of_these_the_largest() -> None:
    early, late = run("2", "urgent", started=110), run("5", "urgent", started=170, gpus={"n1": 7})
    small, large = (run(name, "urgent", started=151, gpus={"n1": count}) for name, count in (("3", 1), ("4", 6)))
    found = told(GOOD, [run("1", started=100)], [requeued(left=150), early, small, large, late], GOOD)
    assert [each.by_job_id for each in found.latest] == ["4"]


def test_what_a_preempted_job_then_costs_others_is_the_first_one_s_doing() -> None:
    first, second = run("1", "urgent", started=160), run("2", started=300, restarts=1, gpus={"n2": 8}, qos="paid")
    before = [run("2", started=100, qos="paid"), run("3", started=100, gpus={"n2": 4}, qos="free")]
    third = run("3", started=100, gpus={"n2": 4}, qos="free")
    found = told(
        GOOD, before, [first, requeued("2", left=160, qos="paid"), third], GOOD,
        [first, second, requeued("3", left=300, qos="free")], GOOD,
    )  # fmt: skip
    assert [(each.job_id, each.by_job_id) for each in found.latest] == [("2", "1"), ("3", "2")]
    assert found.costs == {("1", "urgent"): 8 * 60 + 4 * 200}
    assert found.preempted_gpu_seconds == {("gpu", "paid", "urgent", ""): 480, ("gpu", "free", "gpu", "paid"): 800}


def test_a_requeue_for_another_reason_ends_the_chain() -> None:
    steps: list[list[ClusterJob] | list[ClusterNode]] = [
        GOOD,
        [run("2", started=100, qos="paid"), run("3", started=100, qos="free", gpus={"n2": 8})],
        [run("1", "urgent", started=160), requeued("2", left=160), run("3", started=100, qos="free", gpus={"n2": 8})],
        GOOD,
        [run("2", started=300, restarts=1, qos="paid"), run("3", started=100, qos="free", gpus={"n2": 8})],
        [ClusterJob("2", "gpu", restarts=2, left=400), run("3", started=100, qos="free", gpus={"n2": 8})],
        GOOD,
        [run("2", started=500, restarts=2, qos="paid", gpus={"n2": 8}), requeued("3", left=500)],
        GOOD,
    ]
    found = told(*steps)
    assert found.jobs == {("gpu", "preempted", "requeued"): 2, ("gpu", "unknown", "requeued"): 1}
    assert found.costs == {("1", "urgent"): 480, ("2", "gpu"): 3200}


def test_after_a_grace_time_no_restart_is_counted_and_it_is_a_preemption_all_the_same() -> None:
    """Of a job that is seen in its grace time it is known; of another it follows from who took its place."""
    again = ClusterJob("1", "gpu", left=160)
    for warned, partition in ((True, "gpu"), (False, "urgent")):
        seen = run("1", started=100, in_grace=warned, left=90)
        found = told(GOOD, [run("1", started=100, left=90)], [seen], [again, run("2", partition)], [again], GOOD)
        assert found.jobs == {("gpu", "preempted", "requeued"): 1}
        assert found.gpu_seconds == {("gpu", "preempted", "requeued"): 480}


def test_a_run_that_goes_on_or_ends_by_itself_is_none() -> None:
    going = run("1", started=100, left=90)
    over = ClusterJob("1", "gpu", left=90)
    assert told(GOOD, [going], [going], [over], [over], GOOD).jobs == {}


def test_what_a_run_of_unknown_start_lost_is_unknown() -> None:
    found = told(GOOD, [run("1")], [requeued(left=160)], GOOD)
    assert found.jobs == {("gpu", "unknown", "requeued"): 1}
    assert found.gpu_seconds == {("gpu", "unknown", "requeued"): 0}


def test_without_an_end_it_is_the_moment_of_the_answer() -> None:
    found = told(GOOD, [run("1", started=0)], [requeued()], GOOD)
    assert found.gpu_seconds == {("gpu", "unknown", "requeued"): 16}


def test_jobs_without_gpus_are_no_one_s_cost() -> None:
    found = told(GOOD, [ClusterJob("1", "gpu", {}, ("n1",), running=True)], [requeued(), run("2", "urgent")], GOOD)
    assert found.jobs == {("gpu", "preempted", "requeued"): 1}
    assert not found.preemptions


def test_a_pod_gives_way_to_one_of_higher_priority_on_its_node() -> None:
    before = ClusterJob("a", "ml", {"n1": 8}, ("n1",), running=True, started=100)
    after = ClusterJob("a", "ml", {"n1": 4}, ("n1",), running=True, restarts=1, each=4, cause="preempted", left=200)
    high, low = (ClusterJob(name, "ml", {"n1": 4}, ("n1",), running=True, priority=n) for n, name in enumerate("cb"))
    found = Interruptions()
    found.update_jobs([before], at=150.0)
    found.update_jobs([after, high, low], at=210.0)
    assert [each.by_job_id for each in found.latest] == ["b"]
    assert found.gpu_seconds == {("ml", "preempted", "requeued"): 400}
    found.update_jobs([after, high, low], at=270.0)
    assert found.jobs == {("ml", "preempted", "requeued"): 1}


def test_a_job_whose_pods_are_replaced_one_by_one_took_only_the_node_that_is_new() -> None:
    """A pod of the urgent job moves from n2 to n3; on n1 it was before, so who preempted there is unknown."""

    def urgent(*nodes: str, restarts: int = 0) -> ClusterJob:
        gpus = dict.fromkeys(nodes, 4)
        return ClusterJob("a", "ml", gpus, nodes, running=True, started=100, priority=1, restarts=restarts)

    victim = ClusterJob("b", "ml", {"n1": 4}, ("n1",), running=True, started=100)
    evicted = ClusterJob("b", "ml", restarts=1, cause="preempted", left=200)
    found = Interruptions()
    for at, jobs in enumerate(([urgent("n1", "n2"), victim], *[[urgent("n1", "n3", restarts=1), evicted]] * 2)):
        found.update_jobs(jobs, at=150.0 + 60 * at)
    assert found.jobs == {("ml", "preempted", "requeued"): 1}
    assert [each.by_job_id for each in found.latest] == ["unknown"]


def test_combinations_that_come_and_go_do_not_add_series_for_ever() -> None:
    found = Interruptions()
    found.update_nodes(Nodes(tuple(GOOD), TIERS))
    number = MOST_PREEMPTION_KINDS + 10
    found.update_jobs([run(f"{n}", qos=f"q{n}") for n in range(number)], at=0.0)
    found.update_jobs([*(requeued(f"{n}") for n in range(number)), run("x", "urgent")], at=60.0)
    found.update_nodes(Nodes(tuple(GOOD), TIERS))
    assert len(found.preemptions) == MOST_PREEMPTION_KINDS + 1
    assert found.preemptions["other", "other", "other", "other"] == 10
    assert len(found.latest) == MOST_FAILURES


def test_only_the_latest_that_cost_others_are_named() -> None:
    number = MOST_FAILURES + 10
    found = Interruptions()
    found.update_nodes(Nodes(tuple(GOOD), TIERS))
    found.update_jobs([run(f"{n}", started=0, gpus={f"m{n}": 1}) for n in range(number)], at=0.0)
    winners = [run(f"w{n}", "urgent", gpus={f"m{n}": 1}) for n in range(number)]
    found.update_jobs([*(requeued(f"{n}", left=10) for n in range(number)), *winners], at=60.0)
    found.update_nodes(Nodes(tuple(GOOD), TIERS))
    assert [job_id for job_id, _ in found.costs] == [f"w{n}" for n in range(10, number)]
