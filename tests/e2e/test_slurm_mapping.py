"""The project's prolog and epilog on a real Slurm: whoever has GPUs and no process there is seen all the same.

Slurm's environment of these scripts differs between versions: 26.05 has SLURM_JOB_SLUID too, which they need not.
"""

import re
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from operator import eq
from pathlib import Path

import pytest

from tests.slurm.observer import REST, Observer, observed
from tests.slurm.plan import Plan
from tests.slurm.rig import SlurmRig
from tests.slurm.sites import ONE_OR_MORE, root_of
from tests.slurm.unprivileged import Unprivileged
from tests.waiting import wait_for

pytestmark = pytest.mark.e2e
VERSIONS = ["22.05", "24.11", "26.05"]


@pytest.fixture(name="rig", scope="module", params=VERSIONS)
def _rig(request: pytest.FixtureRequest) -> Iterator[SlurmRig]:
    with SlurmRig(Plan(nodes=1, mapping=True, root=root_of(request.param))) as rig:
        yield rig


@pytest.fixture(name="served", scope="module", params=["slurm", "mapping-dir"])
def _served(
    request: pytest.FixtureRequest, rig: SlurmRig, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Observer]:
    folder, mapping = tmp_path_factory.mktemp("daemon"), f"{rig.mapping(rig.nodes[0])}"
    settings = {"SLURM_MAPPING_DIR": mapping, "MAPPING_DIR_PATH": mapping}
    with observed(rig, rig.nodes[0], folder, boards=REST, scheduler=request.param, settings=settings) as observer:
        yield observer


def test_an_allocation_without_any_process_is_held_and_stalled_until_it_ends(rig: SlurmRig, served: Observer) -> None:
    job = rig.allocate("--gpus=3", "--account=physics")
    given = set(rig.given(job))
    page = served.until(lambda held: held == {job: given}, f"{job} holds {given}")
    page = served.served.after(3)
    assert served.held(page) == {job: given}
    assert {page.states()[index] for index in given} == {("stalled", "no_process")}
    rig.cancel(job)
    page = served.until(lambda held: not held, "nothing is held")
    assert set(page.states().values()) == {("unallocated", "free")}


def test_the_files_are_as_dcgm_exporter_reads_them_and_gone_with_the_job(rig: SlurmRig) -> None:
    folder = rig.mapping(rig.nodes[0])
    first, second = rig.allocate("--gpus=2"), rig.started("--gpus=1")
    wanted = {index: f"{job}\n" for job in (first, second) for index in rig.given(job)}
    wait_for(lambda: {file.name: file.read_text() for file in folder.iterdir()} == wanted, "one file a GPU")
    rig.cancel(first, second)
    wait_for(lambda: not list(folder.iterdir()), "no file is left")


@pytest.mark.parametrize("version", ONE_OR_MORE)
def test_what_docs_bare_metal_has_first_can_drain_no_node(version: str, tmp_path: Path) -> None:
    """Two nodes, one where the scripts never were: it is drained where slurm.conf names their folder, and only there.

    PrologFlags=Contain needs no script, and as nobody the daemons of both nodes know who has GPUs and no process.
    """
    with SlurmRig(Plan(nodes=2, mapping=True, bare_nodes=1, root=root_of(version))) as rig, ExitStack() as stack:
        for name in ("prolog", "epilog"):
            (rig.directory / f"etc/{name}.d/10-note.sh").unlink()
        scripted, bare = rig.nodes
        _runs(rig, scripted)
        job = rig.submit("--gpus=1", f"--nodelist={bare}")
        wait_for(lambda: "drain" in _state(rig, bare), "the node without a script is drained")
        rig.cancel(job)
        _configure(rig, "PrologFlags=Contain")
        wait_for(lambda: _resumed(rig, bare), "it is resumed, once slurmctld and slurmd are configured anew")
        nobody = Unprivileged(rig, "scontrol", "sinfo", "slurmd")
        for node in rig.nodes:
            _runs(rig, node)
            settings = nobody.settings(node) | {"SLURM_MAPPING_DIR": ""}
            daemon = observed(rig, node, tmp_path / node, boards=REST, settings=settings, around=nobody)
            observer = stack.enter_context(daemon)
            job = rig.allocate("--gpus=3", f"--nodelist={node}", "--account=physics")
            (first, last) = re.findall(r"IDX:(\d)-(\d)", rig.run("scontrol", "show", "job", "-d", job))[0]
            given = {f"{index}" for index in range(int(first), int(last) + 1)}
            page = observer.until(partial(eq, {job: given}), f"{job} has {given}")
            assert {page.states()[index] for index in given} == {("stalled", "no_process")}
            assert observer.job(job)["account"] == "physics"
            rig.cancel(job)
            observer.until(lambda held: not held, "nobody has a GPU")
            assert observer.page().total("faults_total") == 0
        assert not [node for node in rig.nodes if "drain" in _state(rig, node)]


def _configure(rig: SlurmRig, flags: str) -> None:
    """Have these PrologFlags, and neither Prolog nor Epilog."""
    lines = [line for line in rig.conf.read_text().splitlines() if not line.startswith(("Prolog", "Epilog"))]
    rig.conf.write_text("\n".join((*lines, flags, "")))
    rig.run("scontrol", "reconfigure")


def _runs(rig: SlurmRig, node: str) -> None:
    """A job runs to its end, and the node takes the next one."""
    rig.wait(rig.submit("--gpus=1", f"--nodelist={node}", script="true"), "COMPLETED")
    wait_for(lambda: _state(rig, node) == "idle", "the node is idle")


def _resumed(rig: SlurmRig, node: str) -> bool:
    rig.run("scontrol", "update", f"NodeName={node}", "State=RESUME", check=False)
    return _state(rig, node) == "idle"


def _state(rig: SlurmRig, node: str) -> str:
    return rig.run("sinfo", "-h", "-N", "-n", node, "-o", "%T").strip()
