"""Generic resources of a real Slurm that are not whole GPUs of one type: shards, MPS, types with dots in a name."""

from collections.abc import Iterator
from decimal import Decimal

import pytest
from msgspec.structs import replace

from exporter.clock import SystemClock
from exporter.cluster.metrics import page
from exporter.cluster.slurm import SlurmCluster
from exporter.cluster.watcher import ClusterWatcher
from exporter.schedulers.slurm.client import Commands
from tests.e2e.running import Page
from tests.slurm.observer import Observer, observed
from tests.slurm.plan import Plan
from tests.slurm.rig import SlurmRig
from tests.slurm.sites import ONE_OR_MORE, root_of

pytestmark = pytest.mark.e2e
PLAN = Plan(nodes=1, gres="gpu:h100:4,gpu:h100_1g.10gb:4", mapping=True)
LINES = ("Name=gpu Type=h100 File=DIR/dev/nvidia[0-3]", "Name=gpu Type=h100_1g.10gb File=DIR/dev/nvidia[4-7]")
PARTS = {"shard": (16, 1), "mps": (800, 40)}
"""How many a node has, and a job wants, of a resource that is part of a GPU."""
# One of them in a cluster: of a GPU that a job has as a whole, Slurm with both gives shards to others.


@pytest.fixture(
    name="rig",
    scope="module",
    params=[*(f"{version} shard" for version in ("22.05", "24.11", "26.05")), *(f"{each} mps" for each in ONE_OR_MORE)],
)
def _rig(request: pytest.FixtureRequest) -> Iterator[SlurmRig]:
    version, part = request.param.split()
    has = PARTS[part][0]
    plan = replace(PLAN, gres=f"{PLAN.gres},{part}:{has}", gres_lines=(*LINES, f"Name={part} Count={has}"))
    with SlurmRig(replace(plan, root=root_of(version))) as rig:
        yield rig


@pytest.fixture(name="observer", scope="module")
def _observer(rig: SlurmRig, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Observer]:
    (node,) = rig.nodes
    # A question without an answer is put again, which a starved machine must not look like.
    settings = {"SLURM_MAPPING_DIR": f"{rig.mapping(node)}", "SLURM_TIMEOUT_SECONDS": "60"}
    with observed(rig, node, tmp_path_factory.mktemp("daemon"), settings=settings) as made:
        yield made


def test_parts_share_a_gpu_and_its_seconds_and_a_type_keeps_its_dots(rig: SlurmRig, observer: Observer) -> None:
    """Parts are shards, or percentages of MPS."""
    part = "mps" if "mps" in rig.plan.gres else "shard"
    typed, whole = rig.submit("--gres=gpu:h100_1g.10gb:2"), rig.submit("--gpus=h100:1")
    sharing = [rig.submit(f"--gres={part}:{PARTS[part][1]}") for _ in range(2)]
    truth = {rig.wait(job, "RUNNING"): set(rig.given(job)) for job in (typed, whole, *sharing)}
    assert truth[sharing[0]] == truth[sharing[1]]
    assert truth[typed] < {"4", "5", "6", "7"}
    before = observer.until(lambda held: held == truth, f"as given: {truth}")
    after = observer.served.after(4)
    (shared,) = truth[sharing[0]]
    board = grown(before, after, "paid_seconds_total", gpu=shared)
    assert [grown(before, after, "job_paid_seconds_total", job_id=job) for job in sharing] == [board / 2] * 2
    assert grown(before, after, "job_paid_seconds_total", job_id=typed) == 2 * board > 0
    for job in sharing:
        observer.job(job)
        asked = [line for line in rig.asked(rig.nodes[0]) if f"show job {job}" in line]
        assert len(asked) == 1, "that both have the GPU is what parts are for"
    # Slurm itself counts 1 and 2: the GPU of the parts is another one, and no job can have it as a whole.
    used = {"h100": 1 + (shared in "0123"), "h100_1g.10gb": 2 + (shared in "4567")}
    cluster = SlurmCluster(Commands(bin_dir=f"{rig.commands(rig.nodes[0])}").output, refresh_seconds=60.0)
    watch = ClusterWatcher(cluster, SystemClock(), refresh_seconds=60.0, max_jobs=100)
    watch.turn()
    assert not watch.error
    found = Page(page(watch.view, now=SystemClock().now()).decode())
    assert found.by("gpu_type", "cluster_node_expected_gpus") == {"h100": 4, "h100_1g.10gb": 4}
    assert found.by("gpu_type", "cluster_node_allocated_gpus") == used


def grown(before: Page, after: Page, name: str, **labels: str) -> Decimal:
    return after.total(name, **labels) - before.total(name, **labels)
