"""`helm upgrade --reuse-values` from the version before: its values, without any key that is new, and these templates.

Helm then takes the older chart's defaults under what the user gave as the new chart's whole values
(pkg/action/upgrade.go, reuseValues). The fixtures are the whole charts of the versions before, as they were; of 0.2.0
without the alerts and boards, which were the project's own.
"""

import copy
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from helm_python.chart import Chart, package, values_from_yaml

from tests.archives import unpack
from tests.helm.rendering import CHART, IMAGE, Manifest, container, environ, manifests, of_kind, pod, texts, the

FIXTURES = Path(__file__).parent / "fixtures"
OLDER = FIXTURES / "gpu-efficiency-0.1.0"
LATEST = FIXTURES / "gpu-efficiency-0.2.0"
BEFORE = values_from_yaml((OLDER / "values.yaml").read_text())
JUST_BEFORE = values_from_yaml((LATEST / "values.yaml").read_text())
USERS: dict[str, dict[str, Any]] = {
    "image": {},
    "exporter": {"source": "dcgm-exporter", "dcgmExporterUrl": "http://$(NODE_IP):9400/metrics"},
    "everything": {
        "kubernetes": {"hostProcesses": True},
        "workloads": {"reportsPath": "/run/reports", "engines": True},
        "runtimeClassName": "nvidia",
        "cluster": {"enabled": True},
        "podMonitor": {"enabled": True, "interval": "15s", "labels": {"release": "a"}},
    },
    "processes": {"scheduler": "processes", "pausePath": ""},
    "elsewhere": {"nodeSelector": {"gpu": "yes"}, "tolerations": [], "kubernetes": {"api": False}},
}
TAKEN_AWAY = ("nodeSelector", "tolerations", "resources")
"""Defaults of that version that a user may have set to null: their keys are then gone as if they were new."""

OTHER_NOW = {"resources": BEFORE["resources"]}
"""Defaults that have changed: who reuses values keeps the older ones."""


def _over(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    """Values as Helm coalesces them."""
    whole = copy.deepcopy(below)
    for key, value in above.items():
        both = isinstance(value, dict) and isinstance(whole.get(key), dict)
        whole[key] = _over(whole[key], value) if both else value
    return {key: value for key, value in whole.items() if value is not None}


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """This version, as installed from its archive."""
    folder = tmp_path_factory.mktemp("chart")
    unpack(Path(package(CHART, destination=folder)), folder)
    return folder / "gpu-efficiency"


@pytest.fixture
def reused(unpacked: Path, request: pytest.FixtureRequest) -> Iterator[Chart]:
    """This version's chart with the older release's values in the place of its own, as Helm renders it."""
    kept = (unpacked / "values.yaml").read_text()
    (unpacked / "values.yaml").write_text(yaml.safe_dump(_over(_over(BEFORE, IMAGE), request.param)))
    with Chart.load(unpacked) as chart:
        (unpacked / "values.yaml").write_text(kept)
        yield chart


@pytest.mark.slow
@pytest.mark.parametrize(("reused", "user"), [(u, u) for u in USERS.values()], indirect=["reused"], ids=list(USERS))
def test_what_is_new_has_its_default(reused: Chart, user: dict[str, Any]) -> None:
    assert "networkPolicy" not in reused.values, "else this would prove nothing"
    assert "basicAuth" not in reused.values["podMonitor"]
    assert manifests({}, of=reused) == manifests(_over(OTHER_NOW | IMAGE, user))
    assert texts({}, of=reused)["NOTES.txt"] == texts(_over(OTHER_NOW | IMAGE, user))["NOTES.txt"]


@pytest.mark.slow
@pytest.mark.parametrize("reused", [USERS["everything"]], indirect=True)
def test_what_is_new_can_be_switched_on(reused: Chart) -> None:
    """--reuse-values with --set: a new section of which the older values know nothing, or a part."""
    given = {
        "rules": {"enabled": True, "alerts": {"GPUEfficiencyGPULost": {"for": "1m"}}},
        "dashboards": {"enabled": True},
        "networkPolicy": {"enabled": True},
        "cluster": {"extraArgs": ["--log.level", "debug"]},
        "config": {"prices": [{"per_gpu_hour": 2}]},
    }
    assert manifests(given, of=reused) == manifests(_over(_over(OTHER_NOW | IMAGE, USERS["everything"]), given))


@pytest.mark.slow
@pytest.mark.parametrize("user", USERS.values(), ids=list(USERS))
def test_after_the_latest_version_too_what_is_new_has_its_default(unpacked: Path, user: dict[str, Any]) -> None:
    kept = (unpacked / "values.yaml").read_text()
    (unpacked / "values.yaml").write_text(yaml.safe_dump(_over(_over(JUST_BEFORE, IMAGE), user)))
    with Chart.load(unpacked) as chart:
        (unpacked / "values.yaml").write_text(kept)
        assert not {"history", "receipts"} & set(chart.values), "else this would prove nothing"
        assert manifests({}, of=chart) == manifests(_over(IMAGE, user))
        given = {"history": {"volume": "none"}, "rbac": {"create": False}}
        assert manifests(given, of=chart) == manifests(_over(_over(IMAGE, user), given))


@pytest.mark.parametrize("reused", [dict.fromkeys(TAKEN_AWAY)], indirect=True)
def test_what_the_user_took_away_stays_away(reused: Chart) -> None:
    spec = pod(manifests({}, of=reused))["spec"]
    assert not {"nodeSelector", "tolerations"} & set(spec)
    assert "resources" not in spec["containers"][0]


@pytest.mark.parametrize("name", TAKEN_AWAY)
def test_null_takes_a_default_away(name: str) -> None:
    found = manifests(IMAGE | {name: None})
    assert name not in pod(found)["spec"]
    assert name not in container(found)


@pytest.mark.parametrize("name", ["dcgm", "web", "rules", "podMonitor", "networkPolicy", "livenessProbe", "cluster"])
def test_null_for_a_section_is_its_default(name: str) -> None:
    assert manifests(IMAGE | {name: None}) == manifests(IMAGE)


def _identities(found: list[Manifest]) -> dict[tuple[str, str], Any]:
    """What Kubernetes never lets change: names and selectors."""
    return {
        (m["kind"], m["metadata"]["name"]): m["spec"].get("selector")
        for m in of_kind(found, "DaemonSet", "Deployment", "Service")
    }


@pytest.mark.slow
@pytest.mark.parametrize("chart", [OLDER, LATEST], ids=lambda chart: chart.name)
@pytest.mark.parametrize("name", ["gpu-efficiency", "r"])
@pytest.mark.parametrize("user", USERS.values(), ids=list(USERS))
def test_names_and_selectors_are_those_of_the_version_before(user: dict[str, Any], name: str, chart: Path) -> None:
    """Else the upgrade would be refused (a DaemonSet's selector is immutable) or make everything anew."""
    values = _over(IMAGE, user)
    with Chart.load(chart) as older:
        before = _identities(manifests(values, of=older, name=name))
    now = _identities(manifests(values, name=name))
    assert before.items() <= now.items()
    assert {kind for kind, _ in now.keys() - before.keys()} <= {"Service"}, "the cluster's, for ServiceMonitors"


@pytest.mark.parametrize("chart", [OLDER, LATEST], ids=lambda chart: chart.name)
@pytest.mark.parametrize("user", USERS.values(), ids=list(USERS))
def test_the_daemon_is_told_the_same_as_by_the_version_before(user: dict[str, Any], chart: Path) -> None:
    values = _over(IMAGE, user)
    with Chart.load(chart) as older:
        before = environ(manifests(values, of=older))
    now = environ(manifests(values))
    assert {name: now.get(name) for name in before if name not in GIVEN_ANEW} == {
        name: value for name, value in before.items() if name not in GIVEN_ANEW
    }


GIVEN_ANEW = {"NVIDIA_VISIBLE_DEVICES"}
"""Where processes are asked for, 0.1.0 took the GPUs away all the same."""


def test_the_fixtures_are_of_the_older_versions() -> None:
    versions = [yaml.safe_load((chart / "Chart.yaml").read_text())["version"] for chart in (OLDER, LATEST, CHART)]
    assert versions == ["0.1.0", "0.2.0", "0.3.0"], "a new version: keep the chart of this one as a fixture too"
    here = yaml.safe_load((CHART / "values.yaml").read_text())
    assert set(BEFORE) < set(JUST_BEFORE) < set(here), "a key that was there is still understood"


@pytest.mark.parametrize("section", [name for name, value in JUST_BEFORE.items() if isinstance(value, dict)])
def test_every_older_key_is_still_understood(section: str) -> None:
    here = yaml.safe_load((CHART / "values.yaml").read_text())
    assert set(BEFORE.get(section, ())) | set(JUST_BEFORE[section]) <= set(here[section])


def test_who_had_a_volume_of_his_own_in_the_stores_place_keeps_it() -> None:
    """0.2.0's way to remember GPUs: a second mount at one place would be refused by the API server."""
    own = {
        "extraVolumes": [{"name": "state", "hostPath": {"path": "/srv/state", "type": "DirectoryOrCreate"}}],
        "extraVolumeMounts": [{"name": "state", "mountPath": "/var/lib/gpu-efficiency/"}],
    }
    with Chart.load(LATEST) as latest:
        assert manifests(IMAGE | own, of=latest)
    found = manifests(IMAGE | own)
    assert [m["name"] for m in container(found)["volumeMounts"] if "lib/gpu-efficiency" in m["mountPath"]] == ["state"]
    assert environ(found)["GPU_EFFICIENCY_HISTORY_FILE"] == "/var/lib/gpu-efficiency/history.db"


def test_rendering_twice_is_the_same() -> None:
    """Values are filled in where they are; nothing of that outlives the rendering."""
    first, other = manifests(IMAGE), manifests(IMAGE | {"port": 1})
    assert (first, other) == (manifests(IMAGE), manifests(IMAGE | {"port": 1}))
    assert environ(other)["GPU_EFFICIENCY_WEB_LISTEN_ADDRESS"] == ":1"
    assert the(first, "Service")["spec"]["ports"][0]["port"] == 19400


def test_it_works_below_another_chart(unpacked: Path, tmp_path: Path) -> None:
    """As a dependency: its values lie under its name, and `global` comes with them."""
    (tmp_path / "Chart.yaml").write_text("apiVersion: v2\nname: platform\nversion: 1.0.0\n")
    shutil.copytree(unpacked, tmp_path / "charts" / "gpu-efficiency")
    given = {"global": {"region": "x"}, "gpu-efficiency": IMAGE | {"rules": {"enabled": True}}}
    with Chart.load(tmp_path) as platform:
        assert manifests(given, of=platform) == manifests(IMAGE | {"rules": {"enabled": True}})
