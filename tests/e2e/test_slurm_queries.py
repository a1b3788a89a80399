"""What a real Slurm answers a daemon's user, who may see less and send less than root and SlurmUser."""

import shlex
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
from msgspec.structs import replace

from exporter.cluster.slurm import SINFO, parse_nodes
from exporter.schedulers.slurm.client import CommandClient, Commands, SlurmUnavailableError
from exporter.schedulers.slurm.notation import Gres
from exporter.schedulers.slurm.restd import RestClient
from tests.slurm.observer import REST, observed
from tests.slurm.plan import USER, Plan
from tests.slurm.rig import SlurmRig
from tests.slurm.sites import root_of
from tests.waiting import wait_for

pytestmark = pytest.mark.e2e
BUCKET = 12
PLAN = Plan(
    nodes=1,
    gres="gpu:8",
    gres_lines=("Name=gpu File=DIR/dev/nvidia[0-3] Cores=0-31", "Name=gpu File=DIR/dev/nvidia[4-7] Cores=32-63"),
    partition="Hidden=YES",
    settings=(f"SlurmctldParameters=rl_enable,rl_bucket_size={BUCKET},rl_refill_period=3600",),
)
"""slurmctld limits each user: so each test queries as another one."""
NEWEST = {"22.05": "v0.0.38", "24.11": "v0.0.42", "26.05": "v0.0.45"}
"""Of slurmrestd's interface, by Slurm's version."""


@pytest.fixture(name="rig", scope="module", params=NEWEST)
def _rig(request: pytest.FixtureRequest) -> Iterator[SlurmRig]:
    with SlurmRig(replace(PLAN, root=root_of(request.param))) as rig:
        yield rig


@contextmanager
def commands_of(user: str, rig: SlurmRig, folder: Path, *, timeout: float = 60.0) -> Iterator[Commands]:
    """Slurm's commands, run as that user."""
    for name in ("scontrol", "sinfo"):
        words = rig.inside.words(rig.inside.path(name), user=f"{user}:nogroup")
        (folder / name).write_text(f'#!/bin/sh\nexec {shlex.join(words)} "$@"\n')
        (folder / name).chmod(0o755)
    with closing(Commands(bin_dir=f"{folder}", conf=f"{rig.conf}", timeout=timeout)) as commands:
        yield commands


def test_the_state_of_a_node_of_hidden_partitions_is_known(rig: SlurmRig, tmp_path: Path) -> None:
    (node,) = rig.nodes
    rig.drain(node, reason="bad\nfan")
    with commands_of("nobody", rig, tmp_path) as commands:
        assert commands.output("sinfo", "-h", "-N", "-n", node, "-O", "NodeList") == "", "nobody may not see it"
        assert CommandClient(commands).node(node).condition == "drained"
    rig.undrain(node)


def test_untyped_gpus_that_are_bound_to_cores(rig: SlurmRig, tmp_path: Path) -> None:
    job = rig.started("--gpus=3")
    with commands_of("daemon", rig, tmp_path) as commands:
        (node,) = parse_nodes(commands.output("sinfo", *SINFO)).nodes
        assert (node.gpus, node.used) == ({"": 8}, {"": 3})
        found = CommandClient(commands).detail(job)
        assert found is not None
        assert found.given == {rig.nodes[0]: (Gres("gpu", "", 3, tuple(map(int, rig.given(job)))),)}
    rig.cancel(job)


def test_slurms_rate_limit_is_named(rig: SlurmRig, tmp_path: Path) -> None:
    job = rig.started("--gpus=1")
    with commands_of("mail", rig, tmp_path, timeout=3.0) as commands:
        client = CommandClient(commands)
        if rig.plan.root == Path("/"):
            assert [client.job(job).job_id for _ in range(BUCKET + 1)] == [job] * (BUCKET + 1), "22.05 has none"
        else:
            with pytest.raises(SlurmUnavailableError, match=r"is this user's rate limited \(rl_enable\)"):
                [client.job(job) for _ in range(BUCKET + 1)]
            assert "RPC rate limit exceeded by uid" in (rig.directory / "log/slurmctld.log").read_text()
    rig.cancel(job)


@contextmanager
def slurmrestd(rig: SlurmRig, user: str) -> Iterator[str]:
    """Run it as that user, for it will not be root or SlurmUser; give its address.

    By default 22.05 and 24.11 also load what needs slurmdbd, and without that end at once.
    """
    path = rig.directory / "out/restd.sock"
    served = NEWEST["22.05"] if rig.plan.root == Path("/") else "slurmctld"
    words = ("-s", served, "-a", "rest_auth/local", f"unix:{rig.inside.seen(path)}")
    program = rig.inside.start(rig.inside.path("slurmrestd"), *words, user=f"{user}:{user}", env=rig.env)
    try:
        wait_for(lambda: program.poll() is not None or path.is_socket(), "slurmrestd listens")
        assert program.poll() is None, program.stdout and program.stdout.read()
        yield f"unix:{path}"
    finally:
        program.kill()
        program.communicate()


def test_a_daemon_asks_slurmrestd_instead_of_running_commands(
    rig: SlurmRig, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    (node,) = rig.nodes
    job = rig.started("--gpus=3", "--account=physics", "--job-name=by-rest")
    rig.drain(node)
    with (
        slurmrestd(rig, "lp") as url,
        observed(rig, node, tmp_path, boards=REST, settings={"SLURM_RESTD_URL": url}) as observer,
    ):
        given = set(rig.given(job))
        observer.until(lambda held: held == {job: given}, f"{job} has {given}")
        known = {"account": "physics", "name": "by-rest", "partition": "gpu", "user": USER}
        assert observer.job(job).items() >= known.items()
        free = observer.page().states().keys() - given
        draining = {("unavailable", "draining")}
        observer.watch(lambda page: {page.states()[gpu] for gpu in free} == draining, "the node is drained")
        assert {line.split()[0] for line in rig.asked(node)} == {"slurmd"}
        with closing(RestClient(url)) as client:
            assert client.job(job).job_id == job
            assert client._version == NEWEST[request.node.callspec.params["rig"]]
    rig.undrain(node)
    rig.cancel(job)
