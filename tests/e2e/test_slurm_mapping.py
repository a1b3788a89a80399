"""The project's prolog and epilog on a real Slurm: whoever has GPUs and no process there is seen all the same.

Slurm's environment of these scripts differs between versions: 26.05 has SLURM_JOB_SLUID too, which they need not.
"""

from collections.abc import Iterator

import pytest

from tests.slurm.observer import REST, Observer, observed
from tests.slurm.plan import Plan
from tests.slurm.rig import SlurmRig
from tests.slurm.sites import root_of
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


@pytest.mark.parametrize("version", VERSIONS)
def test_a_node_without_a_script_is_drained_until_slurm_conf_names_no_folder(version: str) -> None:
    """As docs/bare-metal.md has it: with its scripts alone, and when they are uninstalled."""
    with SlurmRig(Plan(nodes=1, mapping=True, root=root_of(version))) as rig:
        folders = [rig.directory / f"etc/{name}.d" for name in ("prolog", "epilog")]
        for folder in folders:
            (folder / "10-note.sh").unlink()
        _runs(rig)
        for folder in folders:
            (folder / "50-gpu-efficiency.sh").unlink()
        job = rig.submit("--gpus=1")
        wait_for(lambda: "drain" in _node_state(rig), "the node is drained")
        rig.cancel(job)
        lines = rig.conf.read_text().splitlines(keepends=True)
        rig.conf.write_text("".join(line for line in lines if not line.startswith(("Prolog=", "Epilog="))))
        rig.run("scontrol", "reconfigure")
        wait_for(lambda: _resumed(rig), "the node is resumed, once slurmctld and slurmd are configured anew")
        _runs(rig)


def _runs(rig: SlurmRig) -> None:
    """A job runs to its end, and the node takes the next one."""
    rig.wait(rig.submit("--gpus=1", script="true"), "COMPLETED")
    wait_for(lambda: _node_state(rig) == "idle", "the node is idle")


def _resumed(rig: SlurmRig) -> bool:
    rig.run("scontrol", "update", f"NodeName={rig.nodes[0]}", "State=RESUME", check=False)
    return _node_state(rig) == "idle"


def _node_state(rig: SlurmRig) -> str:
    return rig.run("sinfo", "-h", "-N", "-o", "%T").strip()
