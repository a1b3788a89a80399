"""Requeues, preemptions and node failures, step by step."""

from exporter.cluster.analysis import MOST_FAILURES, InterruptionCounter
from exporter.cluster.model import ClusterJob, ClusterNode


def running(job_id: str = "1", restarts: int = 0, **gpus: int) -> ClusterJob:
    return ClusterJob(job_id, "gpu", gpus, tuple(gpus), restarts=restarts, running=True)


def waiting(job_id: str = "1", restarts: int = 1, **more: object) -> ClusterJob:
    return ClusterJob(job_id, "gpu", restarts=restarts, **more)  # type: ignore[arg-type]


def nodes(**states: str) -> list[ClusterNode]:
    return [ClusterNode(name, {"h100": 8}, state=state) for name, state in states.items()]


def told(*steps: list[ClusterJob] | list[ClusterNode]) -> InterruptionCounter:
    """Apply each in turn."""
    found = InterruptionCounter()
    for at, step in enumerate(steps):
        if step and isinstance(step[0], ClusterNode):
            found.update_nodes([each for each in step if isinstance(each, ClusterNode)])
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


def test_preempted_only_where_it_is_said() -> None:
    found = told(GOOD, [running(n1=8)], [waiting(cause="preempted")], nodes(n1="mixed"))
    assert found.jobs == {("gpu", "preempted", "requeued"): 1}


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
    found = InterruptionCounter()
    found.update_jobs([ClusterJob(f"{n}", f"ns-{n}", {"n1": 1}, ("n1",), running=True) for n in range(500)], at=0.0)
    found.update_jobs([ClusterJob(f"{n}", f"ns-{n}", restarts=1) for n in range(500)], at=1.0)
    found.update_nodes(GOOD)
    assert len(found.jobs) == 200
    assert found.jobs["other", "unknown", "requeued"] == 500 - 199


def test_only_the_latest_failures_are_named() -> None:
    jobs = [str(number) for number in range(MOST_FAILURES + 10)]
    found = told(GOOD, [running(job, n1=1) for job in jobs], [waiting(job) for job in jobs], nodes(n1="down"))
    assert found.jobs == {("gpu", "node_failure", "requeued"): MOST_FAILURES + 10}
    assert [each.job_id for each in found.failures] == jobs[10:]
