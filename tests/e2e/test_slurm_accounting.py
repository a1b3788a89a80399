"""Slurm's real accounting, slurmdbd above MariaDB: which nodes ran a user's jobs, and the gateway that asks it.

sacct is run by an unprivileged user, as the gateway's unit does. slurmctld's own metrics, which count GPUs only where
there is accounting, are scraped as docs/schedulers.md says.
"""

import os
import pwd
import re
import shlex
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from socket import gethostname
from tempfile import TemporaryDirectory

import httpx
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from exporter.core.job_record import JobRecordQuery
from exporter.schedulers.slurm.accounting import nodes_of_jobs
from exporter.schedulers.slurm.client import Commands, SlurmUnavailableError
from tests.e2e.databases import asked, one, started
from tests.e2e.login_node import report, serving
from tests.e2e.running import ROOT, command
from tests.slurm.observer import REST, Observer, observed
from tests.slurm.plan import USER, Plan
from tests.slurm.rig import SlurmRig
from tests.slurm.sites import ONE_OR_MORE, root_of
from tests.slurm.unprivileged import Unprivileged
from tests.waiting import wait_for

pytestmark = pytest.mark.e2e
in_all_versions = pytest.mark.parametrize("cluster", ["22.05", "24.11", "26.05"], indirect=True, scope="module")
in_one_version = pytest.mark.parametrize("cluster", ONE_OR_MORE, indirect=True, scope="module")
with_metrics = pytest.mark.parametrize("cluster", ["26.05"], indirect=True, scope="module")
METRICS = ("MetricsType=metrics/openmetrics", "AccountingStorageTRES=gres/gpu")
ASKER, OTHER, THIRD = "lp", "bin", "daemon"
"""Who asks for all users, and other users with jobs. Not nobody: slurmdbd 26.05 lets him be no operator."""
Around = Callable[[list[str], Path], list[str]]


class Cluster:
    """A cluster with accounting, and sacct as the gateway's user runs it."""

    def __init__(self, rig: SlurmRig, folder: Path) -> None:
        self.rig = rig
        words = shlex.join(rig.inside.words(rig.inside.path("sacct"), user=f"{ASKER}:nogroup"))
        (folder / "sacct").write_text(f'#!/bin/sh\nexec {words} "$@"\n')
        (folder / "sacct").chmod(0o755)
        self._commands = Commands(bin_dir=f"{folder}", conf=rig.env["SLURM_CONF"])

    def nodes(self, job: str = "", *, user: str = USER, array: str = "", since: float = 0.0) -> tuple[str, ...]:
        return nodes_of_jobs(self._commands, user, JobRecordQuery(job_id=job, array_id=array, since=since))

    def until_on(self, job: str, *nodes: str) -> None:
        """Wait until the job is found on these nodes alone; slurmctld tells slurmdbd of it some time later."""
        wait_for(lambda: self.nodes(job) == nodes, f"job {job} is on {nodes}")

    def recorded(self, job: str, field: str) -> str:
        """A field of the job's record, as it is."""
        return self.rig.run("sacct", "-X", "-n", "-P", "-j", job, f"--format={field}").strip()

    def job_of(self, user: str, *options: str, script: str) -> str:
        words = ("--parsable", "--chdir=/tmp", "--output=/dev/null", "--mem=100", *options, f"--wrap={script}")
        return self.rig.run("sbatch", *words, user=user).strip()


@pytest.fixture(name="cluster", scope="module")
def _cluster(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    settings = METRICS if request.param == "26.05" else ()
    with SlurmRig(Plan(accounting=True, root=root_of(request.param), settings=settings)) as rig:
        yield Cluster(rig, tmp_path_factory.mktemp("bin"))


@pytest.fixture(autouse=True)
def _no_job_is_left(cluster: Cluster) -> Iterator[None]:
    yield
    cluster.rig.cancel_all()


@in_all_versions
def test_a_job_is_found_from_its_start_on_and_after_its_end(cluster: Cluster) -> None:
    job = cluster.rig.started("--nodes=2", "--gpus-per-node=1")
    cluster.until_on(job, *cluster.rig.nodes)
    cluster.rig.cancel(job)
    wait_for(lambda: cluster.recorded(job, "State").startswith("CANCELLED"), "its end is recorded")
    assert cluster.nodes(job) == cluster.rig.nodes


@in_all_versions
def test_a_job_that_waits_has_no_node(cluster: Cluster) -> None:
    job = cluster.rig.submit("--hold")
    wait_for(lambda: cluster.recorded(job, "NodeList") == "None assigned", "it is recorded")
    assert cluster.nodes(job) == ()


@in_all_versions
def test_a_task_of_an_array_is_found_by_either_name(cluster: Cluster) -> None:
    first, second = cluster.rig.nodes
    blocker = cluster.rig.started(f"--nodelist={first}", "--exclusive")
    array = cluster.rig.submit("--array=1-2", "--exclusive")
    cluster.until_on(f"{array}_1", second)
    cluster.rig.cancel(blocker)
    cluster.until_on(f"{array}_2", first)
    raw = cluster.recorded(f"{array}_1", "JobIDRaw")
    assert raw != array
    assert cluster.nodes(raw) == (second,)
    assert set(cluster.nodes(array=array)) == {first, second}
    assert cluster.nodes(f"{array}_3") == ()


@in_all_versions
def test_a_component_of_a_heterogeneous_job_is_found_by_either_name(cluster: Cluster) -> None:
    leader = cluster.rig.submit_het(*((f"--nodelist={node}",) for node in cluster.rig.nodes))
    for number, node in enumerate(cluster.rig.nodes):
        cluster.until_on(f"{leader}+{number}", node)
    assert cluster.nodes(cluster.recorded(f"{leader}+1", "JobIDRaw")) == (cluster.rig.nodes[1],)
    assert cluster.nodes(array=leader) == cluster.rig.nodes


@in_all_versions
def test_a_job_that_was_requeued_is_found_where_it_ran_before(cluster: Cluster) -> None:
    node = cluster.rig.nodes[1]
    job = cluster.rig.started(f"--nodelist={node}")
    cluster.until_on(job, node)
    cluster.rig.requeue(job)
    wait_for(lambda: cluster.recorded(job, "State") == "PENDING", "its next run is recorded")
    assert cluster.nodes(job) == (node,)


@in_all_versions
def test_of_all_jobs_those_that_ended_before_are_left_out_and_anothers_are_never_found(cluster: Cluster) -> None:
    began = time.time()
    mine = cluster.rig.started(f"--nodelist={cluster.rig.nodes[0]}")
    cluster.until_on(mine, cluster.rig.nodes[0])
    assert cluster.rig.nodes[0] in cluster.nodes(since=time.time()), "it still runs"
    job = cluster.job_of(OTHER, f"--nodelist={cluster.rig.nodes[1]}", script="true")
    wait_for(lambda: cluster.recorded(job, "State") == "COMPLETED", "its end is recorded")
    wait_for(lambda: cluster.nodes(user=OTHER) == (cluster.rig.nodes[1],), "it did not begin in this very second")
    assert cluster.nodes(user=OTHER, since=began) == (cluster.rig.nodes[1],)
    wait_for(lambda: cluster.nodes(user=OTHER, since=time.time()) == (), "it is of the past")
    assert cluster.nodes(mine, user=OTHER) == cluster.nodes(job) == ()


@in_one_version
def test_where_jobs_are_private_only_an_operator_finds_them(cluster: Cluster) -> None:
    """To others sacct says nothing, not even why: see docs/job-reports.md."""
    node = cluster.rig.nodes[0]
    job = cluster.rig.started(f"--nodelist={node}")
    cluster.until_on(job, node)
    with _configured(cluster.rig, "PrivateData=jobs"):
        assert cluster.nodes(job) == cluster.nodes() == ()
        cluster.rig.run("sacctmgr", "-i", "add", "user", ASKER, "account=root", "adminlevel=operator")
        assert cluster.nodes(job) == (node,)
        assert node in cluster.nodes()


@contextmanager
def _configured(rig: SlurmRig, line: str) -> Iterator[None]:
    """Run slurmdbd with one more line in its configuration."""
    conf = rig.directory / "etc/slurmdbd.conf"
    was = conf.read_text()
    _restart(rig, conf, f"{was}{line}\n")
    try:
        yield
    finally:
        _restart(rig, conf, was)


def _restart(rig: SlurmRig, conf: Path, text: str) -> None:
    rig.stop_accounting()
    conf.write_text(text)
    rig.start_accounting()


# -- slurmctld's own metrics --


_OF_A_NODE = {
    "slurm_node_cpus", "slurm_node_cpus_alloc", "slurm_node_cpus_effective", "slurm_node_cpus_idle", "slurm_node_gpus",
    "slurm_node_gpus_alloc", "slurm_node_memory_alloc_bytes", "slurm_node_memory_effective_bytes",
    "slurm_node_memory_free_bytes", "slurm_node_memory_bytes",
}  # fmt: skip
_OF_GPUS = {
    "slurm_node_gpus", "slurm_node_gpus_alloc", "slurm_partition_gpus", "slurm_partition_jobs_gpus_alloc",
    "slurm_jobs_gpus_alloc", "slurm_user_jobs_gpus_alloc", "slurm_account_jobs_gpus_alloc",
}  # fmt: skip
_PAGES = ("jobs", "nodes", "partitions", "scheduler", "jobs-users-accts")


@with_metrics
def test_slurmctld_s_metrics_lack_most_of_what_cluster_exports(cluster: Cluster) -> None:
    """If this fails with a newer Slurm, read the decision in docs/adr/schedulers.md again."""
    rig = cluster.rig
    first, second = rig.nodes
    rig.started("--gres=gpu:3", f"--nodelist={first}")
    rig.submit("--gres=gpu:8", "--nodes=2")
    rig.drain(second)
    try:
        rig.forget_rpcs()
        found = [sample for page in _PAGES for sample in _samples(rig, page)]
        assert rig.rpcs().keys().isdisjoint({"REQUEST_JOB_INFO", "REQUEST_NODE_INFO", "REQUEST_PARTITION_INFO"})
    finally:
        rig.undrain(second)
    assert {name for name, labels in found if dict(labels).keys() == {"node"}} == _OF_A_NODE, "and no state"
    assert {name for name, _ in found if "gpu" in name} == _OF_GPUS, "and none that pending jobs want"
    labels = {frozenset(dict(labels)) for _, labels in found}
    assert labels <= {frozenset(each) for each in ((), ("node",), ("partition",), ("username",), ("account",))}


def _samples(rig: SlurmRig, page: str) -> list[tuple[str, frozenset[tuple[str, str]]]]:
    """Names and labels of a page."""
    response = httpx.get(f"http://127.0.0.1:{rig.controller_port}/metrics/{page}", trust_env=False)
    families = text_string_to_metric_families(response.raise_for_status().text)
    return [(each.name, frozenset(each.labels.items())) for family in families for each in family.samples]


@with_metrics
def test_prometheus_scrapes_them_as_the_example_does(cluster: Cluster, tmp_path: Path) -> None:
    rig = cluster.rig
    rig.started("--gres=gpu:3", f"--nodelist={rig.nodes[0]}")
    example = (ROOT / "examples/prometheus/slurmctld.yaml").read_text(encoding="utf-8")
    example = example.replace("head.example:6817", f"127.0.0.1:{rig.controller_port}").replace(": 60s", ": 1s")
    page = (ROOT / "docs/schedulers.md").read_text(encoding="utf-8")
    (missing,) = re.findall(r"# nodes with GPUs for which no daemon answers.*\n(.+)", page)
    with started(tmp_path, yaml.safe_load(example)) as client:
        wait_for(lambda: len(asked(client, "up == 1")) == 4, "each page has been scraped")
        wait_for(lambda: one(client, f'slurm_node_gpus_alloc{{node="{rig.nodes[0]}"}}') == 3, "the job is seen")
        assert asked(client, missing) == {frozenset({"cluster": "alps", "node": name}.items()): 8 for name in rig.nodes}
        assert one(client, "slurm_partition_jobs_gpus_alloc") == 3
        for name in ("slurm_account_jobs_gpus_alloc", "slurm_bf_queue_len", "slurm_bf_last_depth"):
            assert one(client, name) is not None, name
        assert asked(client, '{__name__=~"slurm_user_.+|slurm_node_(cpus|mem).*"}') == {}


# -- the gateway --


_WITH_HOSTS = """
mount --bind "$1" /etc/hosts
shift
exec "$@"
"""


@pytest.fixture(name="named", scope="module")
def _named(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Around:
    """What runs a command line where the nodes' names are known; as on a node, the host's own name is one of them."""
    hosts = tmp_path_factory.mktemp("hosts") / "hosts"
    hosts.write_text(" ".join(("127.0.0.1", gethostname(), *cluster.rig.nodes, "\n")))
    around = ["unshare", "--mount", "--propagation", "private", "sh", "-c", _WITH_HOSTS, "sh", f"{hosts}"]
    return lambda words, _folder: [*around, *words]


@pytest.fixture(name="node", scope="module")
def _node(cluster: Cluster, named: Around, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Observer]:
    """The daemon of the first node."""
    folder = tmp_path_factory.mktemp("node")
    with observed(cluster.rig, cluster.rig.nodes[0], folder, boards=REST, around=named) as observer:
        yield observer


@pytest.fixture(name="gateway", scope="module")
def _gateway(
    cluster: Cluster, node: Observer, named: Around, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Path]:
    """A gateway's socket; nodes are asked at the port of the first's daemon."""
    folder = tmp_path_factory.mktemp("gateway")
    nobody = Unprivileged(cluster.rig, "sacct")
    with TemporaryDirectory(dir=cluster.rig.directory) as open_to_all:
        Path(open_to_all).chmod(0o755)
        os.chown(open_to_all, pwd.getpwnam("nobody").pw_uid, -1)
        path = Path(open_to_all) / "gateway.sock"
        (folder / "config.toml").write_text(
            f'[gateway]\nsocket = "{cluster.rig.inside.seen(path)}"\nnodes = ["http://{{node}}:{node.served.port}"]\n'
            f'[slurm]\nconf = "{nobody.conf}"\nbin_dir = "{nobody.bin_dir}"\n'
        )
        words = nobody(command("gateway", "--config", "/mnt/boards/config.toml"), folder)
        with serving(named(words, folder), folder / "log", path):
            yield path


@in_one_version
def test_a_user_of_a_login_node_gets_the_report_of_his_job_from_its_node(
    cluster: Cluster, node: Observer, gateway: Path
) -> None:
    uid = pwd.getpwnam(USER).pw_uid
    job = cluster.rig.started(f"--nodelist={cluster.rig.nodes[0]}", "--gpus=2")
    other = cluster.job_of(THIRD, f"--nodelist={cluster.rig.nodes[0]}", "--gpus=1", script="sleep 1000")
    node.until(lambda held: {job, other} <= held.keys(), "the daemon knows both")
    cluster.until_on(job, cluster.rig.nodes[0])
    done = report(uid, gateway, job)
    assert (done.returncode, done.stdout.startswith(f"Job {job} ")) == (0, True), done.stderr
    wait_for(lambda: cluster.nodes(other, user=THIRD), "another's job is recorded")
    refused = report(uid, gateway, other)
    assert (refused.returncode, refused.stdout) == (1, "")
    assert "tells each user of his own jobs alone" in refused.stderr
    assert report(pwd.getpwnam(THIRD).pw_uid, gateway, other).returncode == 0


@in_one_version
def test_while_slurmdbd_is_down_the_reason_is_that(cluster: Cluster, gateway: Path) -> None:
    cluster.rig.stop_accounting()
    try:
        with pytest.raises(SlurmUnavailableError, match=r"sacct -X.*: exit 1: .*Connection refused"):
            cluster.nodes("1")
        done = report(pwd.getpwnam(USER).pw_uid, gateway, "1")
        assert done.returncode == 1
        assert "HTTP 503: sacct" in done.stderr
        assert "Connection refused" in done.stderr
    finally:
        cluster.rig.start_accounting()
