"""Generic resources of a real Slurm that are not whole GPUs of one type: shards, and types with dots in their names."""

from collections.abc import Iterator
from decimal import Decimal

import pytest
from msgspec.structs import replace

from exporter.cluster.slurm import SINFO, parse_nodes
from tests.e2e.running import Page
from tests.slurm.observer import Observer, observed
from tests.slurm.plan import Plan
from tests.slurm.rig import SlurmRig
from tests.slurm.sites import root_of

pytestmark = pytest.mark.e2e
PLAN = Plan(
    nodes=1,
    gres="gpu:h100:4,gpu:h100_1g.10gb:4,shard:16",
    gres_lines=(
        "Name=gpu Type=h100 File=DIR/dev/nvidia[0-3]",
        "Name=gpu Type=h100_1g.10gb File=DIR/dev/nvidia[4-7]",
        "Name=shard Count=16",
    ),
    mapping=True,
)


@pytest.fixture(name="rig", scope="module", params=["22.05", "24.11", "26.05"])
def _rig(request: pytest.FixtureRequest) -> Iterator[SlurmRig]:
    with SlurmRig(replace(PLAN, root=root_of(request.param))) as rig:
        yield rig


@pytest.fixture(name="observer", scope="module")
def _observer(rig: SlurmRig, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Observer]:
    (node,) = rig.nodes
    # A question without an answer is put again, which a starved machine must not look like.
    settings = {"SLURM_MAPPING_DIR": f"{rig.mapping(node)}", "SLURM_TIMEOUT_SECONDS": "60"}
    with observed(rig, node, tmp_path_factory.mktemp("daemon"), settings=settings) as made:
        yield made


def test_shards_share_a_gpu_and_its_seconds_and_a_type_keeps_its_dots(rig: SlurmRig, observer: Observer) -> None:
    typed, whole = rig.submit("--gres=gpu:h100_1g.10gb:2"), rig.submit("--gpus=h100:1")
    sharing = [rig.submit("--gres=shard:1") for _ in range(2)]
    truth = {rig.wait(job, "RUNNING"): set(rig.given(job)) for job in (typed, whole, *sharing)}
    assert truth[sharing[0]] == truth[sharing[1]]
    assert truth[typed] < {"4", "5", "6", "7"}
    before = observer.until(lambda held: held == truth, f"as given: {truth}")
    after = observer.served.after(4)
    (shared,) = truth[sharing[0]]
    listed = parse_nodes(rig.run("sinfo", *SINFO))
    assert (listed.refused, [node.gpus for node in listed.nodes]) == (0, [{"h100": 4, "h100_1g.10gb": 4}])
    # Slurm itself counts 1 and 2: the GPU of the shards is another one, and no job can have it as a whole.
    parts = {"h100": int(shared in "0123"), "h100_1g.10gb": int(shared in "4567")}
    assert listed.nodes[0].used == {"h100": 1 + parts["h100"], "h100_1g.10gb": 2 + parts["h100_1g.10gb"]}
    board = grown(before, after, "paid_seconds_total", gpu=shared)
    assert [grown(before, after, "job_paid_seconds_total", job_id=job) for job in sharing] == [board / 2] * 2
    assert grown(before, after, "job_paid_seconds_total", job_id=typed) == 2 * board > 0
    for job in sharing:
        observer.job(job)
        asked = [line for line in rig.asked(rig.nodes[0]) if f"show job {job}" in line]
        assert len(asked) == 1, "that both have the GPU is what shards are for"


def grown(before: Page, after: Page, name: str, **labels: str) -> Decimal:
    return after.total(name, **labels) - before.total(name, **labels)
