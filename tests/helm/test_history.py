"""Where the store is, whose it is, and what a receipt's place opens."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from exporter.config import load
from tests.helm.pod_security import baseline, restricted
from tests.helm.rendering import (
    IMAGE,
    NAMESPACE,
    RELEASE,
    Manifest,
    container,
    environ,
    environment,
    manifests,
    notes,
    of_kind,
    pod,
    the,
)
from tests.kubernetes import schemas

BARE = {"source": "nvml", "scheduler": "processes", "pausePath": ""}
PLACE = "/var/lib/gpu-efficiency"


def _volume(found: list[Manifest] | tuple[Manifest, ...]) -> dict[str, Any] | None:
    """The store's, where the chart gives one; it is then mounted, for writing."""
    volumes = [v for v in pod(found)["spec"].get("volumes", []) if v["name"] == "history"]
    mounts = [m for m in container(found).get("volumeMounts", []) if m["name"] == "history"]
    assert len(volumes) == len(mounts) <= 1
    assert mounts in ([], [{"name": "history", "mountPath": PLACE}])
    return volumes[0] if volumes else None


HOST = {"name": "history", "hostPath": {"path": PLACE, "type": "DirectoryOrCreate"}}
WITHIN = {"name": "history", "emptyDir": {"sizeLimit": "512Mi"}}


@pytest.mark.parametrize(
    ("given", "volume"),
    [
        ({}, HOST),
        (BARE, WITHIN),
        (BARE | {"podSecurityContext": {"runAsUser": 0}}, HOST),
        ({"podSecurityContext": {"runAsUser": 1000}}, WITHIN),
        ({"securityContext": {"runAsUser": 1000}}, WITHIN),
        (BARE | {"podSecurityContext": {"runAsUser": ""}}, WITHIN),
        (
            {"history": {"volume": "emptyDir", "sizeLimit": "2Gi"}},
            {"name": "history", "emptyDir": {"sizeLimit": "2Gi"}},
        ),
        ({"history": {"path": "/srv/a"}}, {"name": "history", "hostPath": HOST["hostPath"] | {"path": "/srv/a"}}),  # type: ignore[operator]
        ({"history": {"volume": "none"}}, None),
    ],
)
def test_the_store_is_on_the_node_where_the_pod_is_root_anyway(given: dict[str, Any], volume: Any) -> None:
    found = manifests(IMAGE | given)
    assert _volume(found) == volume
    assert "initContainers" not in pod(found)["spec"]


@pytest.mark.parametrize(("given", "file"), [({}, f"{PLACE}/history.db"), ({"history": {"volume": "none"}}, "")])
def test_the_daemon_is_told_where(given: dict[str, Any], file: str) -> None:
    told = environ(manifests(IMAGE | given))["GPU_EFFICIENCY_HISTORY_FILE"]
    assert told == file
    assert load(None, environ={"GPU_EFFICIENCY_HISTORY_FILE": told}).history.file == file


def test_who_is_not_root_has_the_nodes_folder_given_to_him() -> None:
    """By a container that can do nothing else; Pod Security "baseline" minds the folder alone."""
    found = environment("node-store")
    spec = pod(found)["spec"]
    (prepare,) = spec["initContainers"]
    assert prepare["command"][:3] == ["python", "-I", "-c"]
    assert prepare["image"] == container(found)["image"]
    assert prepare["securityContext"]["capabilities"] == {"add": ["CHOWN"], "drop": ["ALL"]}
    assert prepare["volumeMounts"] == [{"name": "history", "mountPath": PLACE}]
    assert baseline(spec) == ["hostPath /srv/gpu-efficiency"]
    alone = pod(manifests(IMAGE | BARE | {"history": {"volume": "hostPath", "prepare": False}}))["spec"]
    assert restricted(alone) == [f"hostPath {PLACE}", "volume history"]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
@pytest.mark.parametrize(("owner", "mode"), [(0, 0o755), (65532, 0o700), (1234, 0o700)])
def test_the_files_of_an_earlier_user_are_given_with_the_folder(tmp_path: Path, owner: int, mode: int) -> None:
    """A pod that was root, or another user, leaves its store; the container has CHOWN alone."""
    (prepare,) = pod(environment("node-store"))["spec"]["initContainers"]
    store, elsewhere = tmp_path / "store", tmp_path / "elsewhere"
    store.mkdir(mode=mode)
    files = [store / name for name in ("history.db", "history.db-wal", "history.db-shm", "history.db-lock")]
    for path in (*files, elsewhere):
        path.write_text("")
    (store / "link").symlink_to(elsewhere)
    for path in (*files, store):
        os.chown(path, owner, owner)
    script = prepare["command"][3].replace(PLACE, str(store))
    confined = ("setpriv", "--bounding-set=-all,+chown", "--inh-caps=-all,+chown", "--no-new-privs")
    for _ in range(2):  # the next pod of the same user finds what is its own
        subprocess.run((*confined, sys.executable, "-I", "-c", script), check=True)
        assert {(path.stat().st_uid, path.stat().st_gid) for path in (*files, store)} == {(65532, 65532)}
    assert elsewhere.stat().st_uid == 0, "what a link points to is not its user's to give"


def test_another_user_of_the_operators_choice_is_given_the_folder() -> None:
    given = BARE | {"history": {"volume": "hostPath"}, "podSecurityContext": {"runAsUser": 1234, "runAsGroup": 1234}}
    (prepare,) = pod(manifests(IMAGE | given))["spec"]["initContainers"]
    assert "1234, 1234" in prepare["command"][3]


def test_a_store_in_the_pod_is_within_pod_security_restricted() -> None:
    assert restricted(pod(manifests(IMAGE | BARE))["spec"]) == []


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({}, "keeps its store in /var/lib/gpu-efficiency (history.path)"),
        (BARE, "with the pod go the receipts"),
        ({"history": {"volume": "none"}}, "There is no store"),
    ],
)
def test_the_notes_say_what_becomes_of_the_store(given: dict[str, Any], said: str) -> None:
    assert said in notes(IMAGE | given)


# -- receipts --


def _rules(place: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = the(manifests(IMAGE | {"receipts": {"kubernetes": place}}), "ClusterRole")["rules"]
    return found


def test_a_right_to_write_is_there_only_for_who_asked_for_it() -> None:
    reading = _rules("none")
    assert {verb for rule in reading for verb in rule["verbs"]} == {"list", "watch"}
    assert _rules("event") == [*reading, {"apiGroups": [""], "resources": ["events"], "verbs": ["create"]}]
    assert _rules("annotation") == [*reading, {"apiGroups": [""], "resources": ["pods"], "verbs": ["patch"]}]


@pytest.mark.parametrize("place", ["none", "event", "annotation"])
def test_the_daemon_is_told_what_to_write(place: str) -> None:
    told = environ(manifests(IMAGE | {"receipts": {"kubernetes": place}}))["GPU_EFFICIENCY_RECEIPTS_KUBERNETES"]
    assert load(None, environ={"GPU_EFFICIENCY_RECEIPTS_KUBERNETES": told}).receipts.kubernetes == place


ANNOTATED = IMAGE | {"receipts": {"kubernetes": "annotation"}}


@pytest.mark.parametrize("version", [f"1.{minor}" for minor in range(30, 35)])
def test_the_right_to_patch_comes_with_a_policy(version: str) -> None:
    """Of Kubernetes 1.30. Its expressions (CEL) were read by people alone: nothing here evaluates them."""
    found = of_kind(manifests(ANNOTATED), "ValidatingAdmissionPolicy", "ValidatingAdmissionPolicyBinding")
    assert len(found) == 2
    for one in found:
        schemas.validate(json.loads(json.dumps(one)), version, strict=True)
    policy, binding = found
    assert binding["spec"] == {"policyName": policy["metadata"]["name"], "validationActions": ["Deny"]}
    assert policy["spec"]["failurePolicy"] == "Fail"
    account = f"system:serviceaccount:{NAMESPACE}:{RELEASE}"
    assert policy["spec"]["matchConditions"][0]["expression"] == f"request.userInfo.username == '{account}'"
    said = " ".join(each["expression"] for each in policy["spec"]["validations"])
    for guarded in ("spec", "labels", "finalizers", "ownerReferences", "request.operation == 'UPDATE'"):
        assert guarded in said


def test_a_policy_of_ones_own_is_taken_at_ones_word() -> None:
    given = IMAGE | {"receipts": {"kubernetes": "annotation", "admissionPolicy": False}}
    assert of_kind(manifests(given), "ValidatingAdmissionPolicy") == []
    assert "nothing here forbids them the rest" in notes(given)
    assert "ValidatingAdmissionPolicy sees to" in notes(ANNOTATED)
    assert of_kind(manifests(IMAGE), "ValidatingAdmissionPolicy") == []


def test_the_annotation_of_the_policy_is_the_daemons() -> None:
    from exporter.schedulers.kubernetes.publisher import ANNOTATION  # noqa: PLC0415

    (policy,) = of_kind(manifests(ANNOTATED), "ValidatingAdmissionPolicy")
    assert f"'{ANNOTATION}'" in policy["spec"]["validations"][-1]["expression"]
