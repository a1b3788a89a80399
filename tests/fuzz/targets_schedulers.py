"""What schedulers say: Slurm's commands and files, a prolog's directory, and what /proc holds.

Owns the doors that this input comes in by. Refuses to start a scheduler: the samples are recorded answers of real ones.
"""

from collections.abc import Callable
from pathlib import Path

from exporter.cluster.slurm import parse_jobs, parse_nodes, parse_reservations, parse_topology
from exporter.cluster.watcher import ClusterUnavailableError
from exporter.schedulers.mapping_dir import JobFiles
from exporter.schedulers.procfs import rank_of, read_process
from exporter.schedulers.slurm.local_node import parse_slots, read_conf
from exporter.schedulers.slurm.notation import expand_hostlist, parse_gres, parse_requested_gres, parse_tres
from exporter.schedulers.slurm.parsing import (
    parse_job_columns,
    parse_job_json,
    parse_job_text,
    parse_node_json,
    parse_node_states,
)
from tests.fuzz.folder import in_folder
from tests.fuzz.trying import Feed, Target, promise

TESTS = Path(__file__).resolve().parents[2] / "tests"
RECORDED, QUEUES = TESTS / "schedulers" / "recorded", TESTS / "cluster" / "recorded"
_NUMBERS = ("31", "21", "1", "41")
Parse = Callable[[str], object]


def recorded(folder: Path, *patterns: str, most: int = 20_000) -> list[bytes]:
    """Beginnings of recorded answers; raises LookupError where there are none."""
    found = [path.read_bytes()[:most] for pattern in patterns for path in sorted(folder.rglob(pattern))]
    if not found:
        raise LookupError(f"no recorded answers {patterns} in {folder}")
    return found


def _texts(*parses: Parse) -> Callable[[], Feed]:
    """Each parser gets every input; an input is taken if one of them takes it."""

    def feed(data: bytes) -> None:
        text, refused = data.decode("utf-8", "replace"), list[ValueError]()
        for parse in parses:
            try:
                parse(text)
            except ValueError as error:
                promise(f"{error}".strip(), "a refusal without a reason")
                refused.append(error)
        if len(refused) == len(parses):
            raise refused[0]

    return lambda: feed


def _job(text: str) -> object:
    """As whichever job it says it is."""
    number = text.partition("JobId=")[2].partition(" ")[0][:12] or _NUMBERS[0]
    return parse_job_text(text, number)


def _columns(text: str) -> object:
    return parse_job_columns(text, text.partition("|")[0][:12])


def _named() -> list[bytes]:
    return [
        b"node[01-16,20],login1",
        b"n[1-3]-[a]",
        b"cpu=4,mem=8G,node=1,gres/gpu=2,gres/gpu:h100=2",
        b"gpu:h100:2(IDX:0-1)",
        b"gpu:2",
        b"gres:gpu:h100:4",
        b"gpu(IDX:0,2-3),shard:h100:0/8(0/4,0/4)",
    ]


# -- Slurm's files --

_CONF = b"""ClusterName=c
SlurmdSpoolDir=/var/spool/%n
# nothing
NodeName=node[1-4] NodeHostname=localhost Gres=gpu:8 \\
  CPUs=64
Include other.conf
"""


def _conf(folder: Path) -> Feed:
    def feed(data: bytes) -> None:
        (folder / "slurm.conf").write_bytes(data)
        try:
            read_conf(f"{folder / 'slurm.conf'}", host="node1")
        except OSError as error:
            raise ValueError(f"{error}") from error

    (folder / "other.conf").write_bytes(b"NodeName=x\n")
    return feed


# -- /proc and mapping files --

_PROC = {
    "cgroup": b"0::/system.slice/slurmstepd.scope/job_41/step_0/user/task_0\n",
    "status": b"Name:\tpython\nUid:\t1000\t1000\t1000\t1000\n",
    "environ": b"RANK=3\0SLURM_JOB_ID=41\0CUDA_VISIBLE_DEVICES=0,1\0LOCAL_RANK=3\0",
    "cmdline": b"python\0train.py\0--steps\0100\0",
}


def _process(folder: Path) -> Feed:
    """One input is all four files."""

    def feed(data: bytes) -> None:
        pieces = data.split(b"\x1e")
        for number, name in enumerate(_PROC):
            (folder / name).write_bytes(pieces[number] if number < len(pieces) else b"")
        said = read_process(folder)
        promise(rank_of(said.environ) == "" or rank_of(said.environ).isdigit(), "a rank that is no number")

    return feed


def _mapping(folder: Path) -> Feed:
    files, wall = JobFiles(folder), 1_700_000_000_000_000_000

    def feed(data: bytes) -> None:
        nonlocal wall
        wall += 10**10
        (folder / "0").write_bytes(data)
        (folder / "1").write_bytes(b"42\n")
        said = files.read(wall)
        promise(said["1"].jobs == ("42",), "a bad file spoils a good one")
        if "0" in said and said["0"].problem:
            raise ValueError(said["0"].problem)

    return feed


SCHEDULERS: tuple[Target, ...] = (
    Target(
        name="scontrol show job",
        what="Slurm's text of a job",
        refuses=(ValueError,),
        modules=("exporter.schedulers.slurm.scheduler",),
        samples=lambda: recorded(
            RECORDED, "*running*.txt", "array*.txt", "het*.txt", "mig*.txt", "evil*.txt", "shards*.txt"
        ),
        make=_texts(_job, _columns),
    ),
    Target(
        name="scontrol --json, slurmrestd",
        what="Slurm's JSON of a job and a node",
        refuses=(ValueError,),
        samples=lambda: recorded(RECORDED, "*.json"),
        make=_texts(parse_job_json, parse_node_json),
        modules=("exporter.schedulers.slurm.scheduler",),
    ),
    Target(
        name="sinfo, slurmd -G, GRES, hostlists",
        what="Slurm's shorter words",
        refuses=(ValueError,),
        samples=lambda: recorded(RECORDED, "sinfo*.txt", "slurmd*.txt") + _named(),
        make=_texts(parse_node_states, parse_slots, expand_hostlist, parse_gres, parse_requested_gres, parse_tres),
        modules=("exporter.schedulers.slurm.scheduler",),
    ),
    Target(
        name="slurm.conf",
        what="Slurm's file, with includes",
        refuses=(ValueError,),
        samples=lambda: [_CONF],
        make=in_folder(_conf),
        modules=("exporter.schedulers.slurm.scheduler",),
    ),
    Target(
        name="squeue, sinfo of a cluster",
        what="Slurm's queue, nodes, topology, reservations",
        refuses=(ValueError, ClusterUnavailableError),
        samples=lambda: recorded(QUEUES, "*.txt", "*.json"),
        make=_texts(parse_nodes, parse_reservations, parse_topology, parse_jobs),
        modules=("exporter.cluster",),
    ),
    Target(
        name="/proc of a process",
        what="cgroup, status, environment, command line",
        refuses=(OSError,),
        samples=lambda: [b"\x1e".join(_PROC.values())],
        make=in_folder(_process),
        modules=("exporter.schedulers.procfs",),
    ),
    Target(
        name="job files of a prolog",
        what="the mapping directory",
        refuses=(ValueError,),
        samples=lambda: [b"41\n", b"41 ada\n42 bob\n", b"41\n41\n"],
        make=in_folder(_mapping),
        modules=("exporter.schedulers.mapping_dir",),
    ),
)
