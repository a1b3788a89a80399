"""Listing and watching with an API server that fails in every way."""

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec import structs

from exporter.core.model import SECOND, UNKNOWN_JOB
from exporter.schedulers.kubernetes.scheduler import WatchIntervals
from tests.kubernetes.api import PATHS, certificate
from tests.kubernetes.cluster import (
    GPUS,
    NODE,
    PACE,
    Node,
    gpu_uuid,
    holds,
    kept_by,
    node,
    node_object,
    offered,
    pod_object,
    slice_object,
    wait_for,
)
from tests.kubernetes.kubelet import claim, container, pod

PODS, NODES = "/api/v1/pods", "/api/v1/nodes"
SLICES = "/apis/resource.k8s.io/v1/resourceslices"
QUICK = WatchIntervals(refresh=0.1, sync=0.3, grace=0.3, settle=0.0, retry=0.05, publish=0.01, restart_grace=1.0)


@pytest.fixture(name="here")
def _here() -> Iterator[Node]:
    """A node with one pod on it, a Job's."""
    with node() as made:
        made.api.has(job_pod())
        made.kubelet.gives("train-0", gpu_uuid(0))
        yield made


def job_pod(name: str = "train-0", job: str = "train", **more: Any) -> dict[str, Any]:
    return pod_object(name, ownerReferences=kept_by("Job", job), **more)


def watches(here: Node, path: str = PODS) -> list[dict[str, str]]:
    return here.api.asked(path, watch=True)


def lists(here: Node, path: str = PODS) -> list[dict[str, str]]:
    return here.api.asked(path, watch=False)


def ready(here: Node) -> None:
    here.held((0, "ml/job/train"))
    wait_for(lambda: watches(here) and watches(here, NODES), "both watches")


@pytest.mark.slow
def test_a_node_asks_for_its_own_objects_once_and_watches_them(here: Node) -> None:
    ready(here)
    here.kubelet.gives("train-1", gpu_uuid(1))
    here.api.has(job_pod("train-1"))
    here.held((0, "ml/job/train"), (1, "ml/job/train"))
    assert lists(here) == [{"fieldSelector": f"spec.nodeName={NODE}", "resourceVersion": "0"}]
    assert lists(here, NODES) == [{"fieldSelector": f"metadata.name={NODE}", "resourceVersion": "0"}]
    (watch,) = watches(here)
    assert (watch["watch"], watch["allowWatchBookmarks"]) == ("1", "true")
    assert 300 <= int(watch["timeoutSeconds"]) <= 600
    assert {path for path, _ in here.api.requests} == {PODS, NODES}


@pytest.mark.slow
def test_a_watch_that_ended_goes_on_where_it_was(here: Node) -> None:
    ready(here)
    changed = job_pod()
    once = {"name": "main", "restartCount": 2, "ready": True, "image": "i", "imageID": "i"}
    changed["status"]["containerStatuses"] = [once]
    here.api.has(changed)
    here.until(lambda state: state.allocations[0].restarts == 2, "the change")
    newest = here.api.objects[PODS][changed["metadata"]["uid"]]["metadata"]["resourceVersion"]
    here.api.end_watches()
    wait_for(lambda: len(watches(here)) > 1, "another watch")
    assert watches(here)[-1]["resourceVersion"] == newest
    assert len(lists(here)) == 1
    assert here.faults == set()


@pytest.mark.slow
def test_bookmarks_move_the_version_on_and_nothing_else(here: Node) -> None:
    ready(here)
    here.api.bookmark()
    here.api.has(node_object(unschedulable=True))
    here.until(lambda state: state.condition == "cordoned", "the node's watch is past its bookmark")
    version = here.api._version
    here.api.bookmark()
    before = len(watches(here))
    here.api.end_watches()
    wait_for(lambda: len(watches(here)) > before, "another watch")
    assert int(watches(here)[-1]["resourceVersion"]) >= version - len(PATHS)
    here.held((0, "ml/job/train"))
    assert len(lists(here)) == 1


@pytest.mark.slow
def test_a_version_too_old_is_answered_with_a_list_that_need_not_be_read_from_etcd(here: Node) -> None:
    """All nodes list at once when the API server is replaced: from its memory, and from nothing older than known."""
    ready(here)
    here.api.objects[PODS].clear()  # these changes are in no history
    here.api.forgets()
    here.api.has(job_pod("train-1", "later"))
    here.kubelet.holds()
    here.kubelet.gives("train-1", gpu_uuid(1))
    here.held((1, "ml/job/later"))
    assert [each["resourceVersion"] for each in lists(here)] == ["0", watches(here)[0]["resourceVersion"]]
    assert here.faults == set()


@pytest.mark.slow
def test_a_watch_refused_as_too_old_is_answered_with_a_new_list(here: Node) -> None:
    ready(here)
    here.api.stop()
    here.api.forgets()
    here.api.start()
    wait_for(lambda: len(lists(here)) > 1, "another list")
    here.held((0, "ml/job/train"))


@pytest.mark.slow
def test_a_server_that_knows_only_older_versions_is_asked_for_its_newest(here: Node) -> None:
    """As after etcd was restored from a copy; the next list may come from the server's memory again."""
    ready(here)
    here.api.has(*(job_pod(f"done-{n}", phase="Succeeded") for n in range(20)))
    newest = job_pod()
    newest["status"]["containerStatuses"] = [
        {"name": "main", "restartCount": 2, "ready": True, "image": "i", "imageID": "i"}
    ]
    here.api.has(newest)
    here.until(lambda state: state.allocations[0].restarts == 2, "the newest version")
    known = here.api.version
    here.api.stop()
    here.api.restores()
    here.api.has(node_object(), job_pod("train-0", "restored"))
    here.token.write_text("a wrong one")
    here.api.start()
    here.until(lambda state: "401" in str(state.faults), "an answer that is not to be continued from")
    here.token.write_text(here.api.token)
    here.held((0, "ml/job/restored"))
    versions = [each["resourceVersion"] for each in lists(here)]
    assert versions[0] == "0"
    assert versions[-1] == ""
    assert {int(version) for version in versions[1:-1]} == {known}
    here.api.forgets()
    wait_for(lambda: len(lists(here)) > len(versions), "another list")
    assert int(lists(here)[-1]["resourceVersion"]) > 0


@pytest.mark.slow
def test_an_error_event_ends_the_watch_and_is_told(here: Node) -> None:
    ready(here)
    status = {"kind": "Status", "code": 500, "message": "etcd is ill"}
    here.api.says(PODS, json.dumps({"type": "ERROR", "object": status}))
    wait_for(lambda: len(lists(here)) > 1, "another list")
    assert lists(here)[-1]["resourceVersion"] not in ("", "0"), "that is not what the next list is for"
    here.until(lambda state: not state.faults, "well again")
    here.held((0, "ml/job/train"))


def test_however_the_stream_is_cut_its_events_are_whole(here: Node) -> None:
    ready(here)
    here.api.piece = 7
    here.kubelet.gives("train-1", gpu_uuid(1))
    # U+2028 and U+0085 end a line for str.splitlines, not for JSON.
    here.api.has(job_pod("train-1", annotations={"note": "a\u2028b\u0085c\x1c é"}))
    here.held((0, "ml/job/train"), (1, "ml/job/train"))
    assert len(lists(here)) == 1


@pytest.mark.slow
def test_a_line_that_is_no_event_is_answered_with_a_new_list(here: Node) -> None:
    ready(here)
    here.api.says(PODS, '{"type": "ADDED", "object": {"metadata"')
    wait_for(lambda: len(lists(here)) > 1, "another list")
    here.held((0, "ml/job/train"))


def test_an_object_that_cannot_be_read_is_refused_and_the_others_are_taken(here: Node) -> None:
    ready(here)
    bad = {"metadata": {"name": 7}}
    here.api.says(PODS, json.dumps({"type": "ADDED", "object": bad}))
    here.kubelet.gives("train-1", gpu_uuid(1))
    here.api.has(job_pod("train-1"))
    here.held((0, "ml/job/train"), (1, "ml/job/train"))
    assert {kind for kind, _ in here.faults} == {"scheduler_refused"}
    assert any("an object of /api/v1/pods was refused" in message for _, message in here.faults)
    assert len(lists(here)) == 1


@pytest.mark.slow
def test_while_the_server_is_gone_what_is_known_carries_on_and_the_age_is_told(here: Node) -> None:
    ready(here)
    before = here.clock.now()
    here.api.stop()
    both = (f"{here.api.url}{PODS}", f"{here.api.url}{NODES}")
    state = here.until(lambda state: state.faults and all(url in state.faults[0].message for url in both), "silence")
    assert before <= (state.unanswered_since or 0) <= here.clock.now()
    assert holds(state) == {(gpu_uuid(0), "ml/job/train")}
    assert [fault.kind for fault in state.faults] == ["controller_silent"]
    here.kubelet.gives("new", gpu_uuid(1))
    later = here.held((0, "ml/job/train"), (1, "ml/pod/new"))
    assert later.unanswered_since == state.unanswered_since
    here.api.start()
    here.until(lambda state: state.unanswered_since is None and not state.faults, "answers again")


@pytest.mark.slow
def test_a_server_that_was_gone_from_the_start_delays_by_seconds_only(here: Node) -> None:
    here.api.stop()
    here.opens(QUICK)
    here.held((0, "ml/pod/train-0"))
    here.api.start()
    here.held((0, "ml/job/train"))


@pytest.mark.slow
def test_a_server_that_takes_questions_and_never_answers_is_silent(here: Node) -> None:
    here.api.deaf = True
    here.opens(QUICK)
    state = here.until(lambda state: state.unanswered_since is not None, "silence")
    assert holds(state) == {(gpu_uuid(0), "ml/pod/train-0")}
    assert "ReadTimeout" in state.faults[0].message
    # Counted from the request, not from its timeout.
    assert here.clock.now() - (state.unanswered_since or 0) >= PACE.response * SECOND


@pytest.mark.slow
def test_a_terminal_phase_counts_only_for_the_pod_that_had_it(here: Node) -> None:
    ready(here)
    here.api.has(job_pod(phase="Failed"))
    here.held()
    here.api.stop()
    here.until(lambda state: state.unanswered_since is not None, "silence")
    here.kubelet.drops("train-0")
    listed = here.kubelet.lists
    wait_for(lambda: here.kubelet.lists > listed + 1, "a list without it")
    here.kubelet.gives("train-0", gpu_uuid(4))
    here.held((4, "ml/pod/train-0"))


@pytest.mark.slow
def test_a_token_is_read_anew_for_each_question(here: Node) -> None:
    ready(here)
    here.api.token = f"another than {here.api.token}"
    here.token.write_text(f"{here.api.token}\n")
    here.api.end_watches()
    wait_for(lambda: len(watches(here)) > 1, "another watch")
    here.kubelet.gives("train-1", gpu_uuid(1))
    here.api.has(job_pod("train-1"))
    here.held((0, "ml/job/train"), (1, "ml/job/train"))
    assert here.faults == set()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("break_it", "said"),
    [
        (lambda here: here.token.write_text("wrong"), "401 Unauthorized: the token is not accepted"),
        (lambda here: here.token.unlink(), "token cannot be read"),
        (lambda here: here.api.forbidden.add(PODS), "403 .*cannot list /api/v1/pods: .*grant it list and watch"),
        (lambda here: here.api.missing.add(PODS), "404 the server could not find"),
        (lambda here: here.api.ca.write_text("nonsense"), "cannot be used as the API server's CA"),
        (lambda here: here.api.ca.unlink(), "cannot be used as the API server's CA"),
    ],
)
def test_why_the_server_refuses_is_told_with_what_to_do(here: Node, break_it: Any, said: str) -> None:
    break_it(here)
    here.opens(QUICK)
    state = here.until(lambda state: state.faults, "a fault")
    with pytest.raises(AssertionError, match=said):
        raise AssertionError(state.faults[0].message)
    assert holds(state) == {(gpu_uuid(0), "ml/pod/train-0")}
    assert state.unanswered_since is not None


@pytest.mark.slow
def test_a_certificate_of_another_ca_is_not_believed(here: Node, tmp_path: Path) -> None:
    other, _ = certificate(tmp_path)
    here.api.ca.write_text(other.read_text())
    here.opens(QUICK)
    state = here.until(lambda state: state.faults, "a fault")
    assert "CERTIFICATE_VERIFY_FAILED" in state.faults[0].message
    assert here.api.requests == [], "the token was shown to nobody"


@pytest.mark.slow
def test_older_versions_of_slices_are_asked_where_the_newest_is_not_there(here: Node) -> None:
    here.api.missing.add(SLICES)
    here.api.has(pod_object("dra"))
    here.kubelet.holds(pod("dra", container(claims=[claim(driver="gpu.nvidia.com", pool=NODE, device="gpu-0")])))
    state = here.until(lambda state: "resourceslices: 404" in str(state.faults), "all versions tried")
    asked = [path for path, _ in here.api.requests if path.endswith("slices")]
    assert asked[:3] == [f"/apis/resource.k8s.io/{version}/resourceslices" for version in ("v1", "v1beta2", "v1beta1")]
    assert holds(state) == {(device.uuid, UNKNOWN_JOB) for device in GPUS}


@pytest.mark.slow
def test_slices_follow_their_watch(here: Node) -> None:
    here.api.has(pod_object("dra"), slice_object(offered("gpu-0", uuid=gpu_uuid(5))))
    here.kubelet.holds(pod("dra", container(claims=[claim(driver="gpu.nvidia.com", pool=NODE, device="gpu-0")])))
    here.held((5, "ml/pod/dra"))
    here.api.has(slice_object(offered("gpu-0", uuid=gpu_uuid(6)), generation=2))
    here.held((6, "ml/pod/dra"))


@pytest.mark.slow
def test_a_server_that_ends_each_watch_at_once_is_not_asked_without_end(here: Node) -> None:
    here.api.fleeting = True
    began = time.monotonic()
    here.opens(pace=structs.replace(PACE, first=1.0, most=1.0))
    wait_for(lambda: len(watches(here)) > 3, "four watches")
    assert time.monotonic() - began > 1.5, "between two watches is a pause of half a second at least"
    assert len(lists(here)) == 1


LINES = st.one_of(
    st.text(alphabet=st.characters(blacklist_characters="\n"), max_size=40),
    st.builds(
        lambda kind, thing: json.dumps({"type": kind, "object": thing}),
        st.sampled_from(["ADDED", "MODIFIED", "DELETED", "BOOKMARK", "ERROR", "WHAT"]),
        st.recursive(
            st.none() | st.integers() | st.text(max_size=5),
            lambda inner: st.dictionaries(st.sampled_from(["metadata", "uid", "name", "status", "code"]), inner),
            max_leaves=6,
        ),
    ),
)


@pytest.mark.slow
@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(lines=st.lists(LINES, max_size=6))
def test_whatever_a_watch_says_the_thread_lives_and_holders_stay(here: Node, lines: list[str]) -> None:
    if here.scheduler is None:
        ready(here)
    for line in lines:
        here.api.says(PODS, line)
    here.api.has(job_pod())
    here.held((0, "ml/job/train"))
