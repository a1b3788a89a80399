"""The node under attack: one daemon with everything switched on, on a stand-in for NVML and one for Slurm.

Owns the daemon's process, its folder, its memory limit and its processor. The daemon runs as on a node with the
drop-ins for jobs and logs: as root where the runner is root, so that files which users cannot read could be read by
mistake.
"""

import json
import os
import re
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

from tests.fuzz.redteam.attacks.logs import line
from tests.fuzz.redteam.cgroups import MemoryGroup, of_jobs, weight
from tests.fuzz.redteam.logins import hashed, person, seconds_of_check
from tests.fuzz.redteam.target import FORGED_STEP, JOBS, SERVING, USER, Job, Target
from tests.nvml_stub.build import build
from tests.ports import free_ports

LIMIT = 512 << 20
"""MemoryMax of the unit."""
FILES = 8192
"""LimitNOFILE of the unit."""
_GPUS = 6
_ENGINES = 8
"""Ports in the configuration; as many again are found by discovery."""
_PATIENCE = 60.0
_ROOT = Path(__file__).resolve().parents[3]
_SERVING = re.compile(rb"serving https://[^ ]*:(\d+)/")
_PASSWORD = "correct horse battery staple"  # noqa: S105  of this daemon only
_CONFIG = """
source = "nvml"
scheduler = "slurm"
[web]
listen_address = "127.0.0.1:0"
config_file = "{folder}/web.yml"
[sampling]
pause_file = "{folder}/pause"
[slurm]
node_name = "redteam"
mapping_dir = "{folder}/mapping"
spool_dir = "{folder}/spool"
conf = "{folder}/slurm.conf"
bin_dir = "{folder}/bin"
[reports]
socket = "{folder}/run/report.sock"
http = "127.0.0.1:{door}"
[history]
file = "{folder}/state/history.db"
[[follow]]
path = "{folder}/logs/{{job_id}}/*.log"
[[follow]]
[[workload.rules]]
workload_class = "serving"
partition = "serve"
[engines]
interval_seconds = 1
ports = {ports}
"""
_ENDPOINT = """[[engines.endpoints]]
url = "http://127.0.0.1:{port}/metrics"
job_id = "{job}"
"""
_COMMAND = """#!/bin/sh
# What the daemon asks of Slurm: the JSON of one job, of the node; {folder}
echo "$0 $*" >> "{folder}/asked"
case "$0" in
*/slurmd) cat "{folder}/gres" >&2; exit 0 ;;
*/sinfo) echo "redteam|allocated|none|"; exit 0 ;;
esac
for word; do
    case "$word" in
    -V | --version) echo "slurm 23.11.4"; exit 0 ;;
    node | nodes) exec cat "{folder}/node.json" ;;
    [0-9]*) [ -e "{folder}/job-$word.json" ] && exec cat "{folder}/job-$word.json" ;;
    esac
done
exit 1
"""


class Node:
    """The daemon and what is around it."""

    def __init__(
        self, process: subprocess.Popen[bytes], target: Target, memory: MemoryGroup, core: int, *, check_seconds: float
    ) -> None:
        """`check_seconds`: processor time of one check of a password."""
        self.process, self.target, self.memory, self.core = process, target, memory, core
        self.check_seconds = check_seconds
        self._processes: dict[int, int] = {}
        self._listed = ""

    @property
    def log(self) -> Path:
        return self.target.folder / "daemon.log"

    def alive(self) -> bool:
        """Whether the process that was started still runs: nothing would restart it."""
        return self.process.poll() is None

    def list_processes(self, own: Mapping[int, int] | None = None) -> None:
        """Let the driver list these processes by GPU, and those that attackers asked for."""
        if own is not None:
            self._processes = dict(own)
        lines = [f"count {_GPUS}"]
        for gpu in range(_GPUS):
            pids = (self._processes.get(gpu, 0), _guest(self.target.folder / "guests" / str(gpu)))
            lines.append(f"gpu {gpu} idle")
            lines += [f"gpu {gpu} process {pid} 1000000000" for pid in pids if pid]
        if (text := "\n".join([*lines, ""])) != self._listed:
            self._listed = text
            _replace(self.target.folder / "boards", text)


def _guest(path: Path) -> int:
    """Return the process for which `Target.show_on_gpu` asked, 0 if it has ended: its pid may be another's by now."""
    if not path.exists():
        return 0
    pid, uid = path.read_text(encoding="ascii").split()
    try:
        owner = Path(f"/proc/{pid}").stat().st_uid
    except OSError:
        return 0
    return int(pid) if owner == int(uid) or os.getuid() != 0 else 0


@contextmanager
def running(core: int, intensity: float, *, people: int, cost: int) -> Iterator[Node]:
    """Start the daemon on that processor, with so many users beside the scraper, whose hashes cost that."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="redteam-")))
        folder.chmod(0o755)
        cgroups = stack.enter_context(of_jobs())
        memory = MemoryGroup(LIMIT)
        stack.callback(memory.remove)
        weighted = stack.enter_context(weight())
        ports = free_ports(2 * _ENGINES + 1)
        check_seconds = _files(folder, ports, people, cost)
        process = subprocess.Popen(
            [sys.executable, "-m", "exporter", "serve", "--config", str(folder / "config.toml")],
            cwd=_ROOT,
            env={**os.environ, "NVML_STUB_SCRIPT": str(folder / "boards"), "LD_LIBRARY_PATH": str(build())},
            stderr=(folder / "daemon.log").open("wb"),
            stdout=subprocess.DEVNULL,
            preexec_fn=lambda: _confine(memory, core, weighted),  # noqa: PLW1509  # the runner has one thread
        )
        stack.callback(_end, process)
        port = _port(process, folder / "daemon.log")
        target = Target(
            port=port,
            password=_PASSWORD,
            socket=folder / "run" / "report.sock",
            door=ports[-1],
            folder=folder,
            engine_ports=ports[:-1],
            pid=process.pid,
            intensity=intensity,
            cgroups=cgroups,
        )
        yield Node(process, target, memory, core, check_seconds=check_seconds)


def _confine(memory: MemoryGroup, core: int, weighted: Path | None) -> None:
    memory.join()
    if weighted is not None and (weighted / "cpu.shares").exists():  # in v2 it is in one group only: the memory's
        (weighted / "cgroup.procs").write_text(str(os.getpid()))
    os.sched_setaffinity(0, {core})
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(FILES, hard), min(FILES, hard)))
    os.umask(0o022)


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(20)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGKILL)
        process.wait()


def _port(process: subprocess.Popen[bytes], log: Path) -> int:
    until = time.monotonic() + _PATIENCE
    while time.monotonic() < until and process.poll() is None:
        if found := _SERVING.search(log.read_bytes()):
            return int(found[1])
        time.sleep(0.05)
    raise RuntimeError(f"the daemon does not listen (exit status {process.poll()}). Its log:\n{log.read_text()}")


def _files(folder: Path, ports: tuple[int, ...], people: int, cost: int) -> float:
    """Write all files; return the processor time of one check of a password."""
    for name in ("run", "mapping", "spool", "bin", "state", "guests", "logs"):
        (folder / name).mkdir(mode=0o755)
    (folder / "state").chmod(0o750)
    check_seconds = _web(folder, people, cost)
    _slurm(folder)
    for job in JOBS:
        logs = folder / "logs" / str(job.id)
        logs.mkdir()
        if os.getuid() == 0:
            os.chown(logs, job.uid, job.uid)
    if os.getuid() == 0:
        (folder / "logs").chmod(0o777)  # so that a user can put a link where his folder was
    secret = folder / "secret.log"
    secret.write_text("".join(line(FORGED_STEP - n) for n in range(9, -1, -1)), encoding="utf-8")
    secret.chmod(0o600)
    endpoints = "".join(_ENDPOINT.format(port=port, job=SERVING.id) for port in ports[:_ENGINES])
    config = _CONFIG.format(folder=folder, door=ports[-1], ports=list(ports[_ENGINES:-1]))
    (folder / "config.toml").write_text(config + endpoints, encoding="utf-8")
    _replace(folder / "boards", f"count {_GPUS}\ngpu * idle\n")
    return check_seconds


def _web(folder: Path, people: int, cost: int) -> float:
    words = "req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=localhost -addext subjectAltName=IP:127.0.0.1"
    paths = ("-keyout", str(folder / "tls.key"), "-out", str(folder / "tls.crt"))
    subprocess.run(["openssl", *words.split(), *paths], check=True, capture_output=True)
    digest = hashed(_PASSWORD, cost)
    names = (USER, *(person(number) for number in range(people)))
    users = "basic_auth_users:\n" + "".join(f"  {each}: '{digest}'\n" for each in names)
    (folder / "web.yml").write_text(f"tls_server_config: {{cert_file: tls.crt, key_file: tls.key}}\n{users}")
    (folder / "tls.key").chmod(0o600)
    return seconds_of_check(digest)


def _slurm(folder: Path) -> None:
    (folder / "slurm.conf").write_text(f"ClusterName=redteam\nSlurmdSpoolDir={folder}/spool\n", encoding="utf-8")
    for name in ("scontrol", "sinfo", "slurmd"):
        path = folder / "bin" / name
        path.write_text(_COMMAND.format(folder=folder), encoding="utf-8")
        path.chmod(0o755)
    gres = "slurmd: Gres Name=gpu Type=h100 Count=1 Index={gpu} ID=7696487 File=/dev/nvidia{gpu} Links=(null)\n"
    (folder / "gres").write_text("".join(gres.format(gpu=gpu) for gpu in range(_GPUS)), encoding="utf-8")
    for job in JOBS:
        (folder / "mapping" / str(job.gpu)).write_text(f"{job.id}\n", encoding="utf-8")
        (folder / f"job-{job.id}.json").write_text(json.dumps({"jobs": [_record(job)], "errors": []}))
    node = {"name": "redteam", "state": ["ALLOCATED"], "gres": f"gpu:{_GPUS}"}
    (folder / "node.json").write_text(json.dumps({"nodes": [node], "errors": []}), encoding="utf-8")


def _record(job: Job) -> dict[str, object]:
    def number(value: int) -> dict[str, object]:
        return {"set": True, "infinite": False, "number": value}

    uid = job.uid if os.getuid() == 0 else os.getuid()
    return {
        "job_id": job.id, "name": f"job{job.id}", "user_id": uid, "user_name": f"user{uid}", "group_id": uid,
        "account": "redteam", "partition": job.partition, "qos": "normal", "job_state": ["RUNNING"],
        "state_reason": "None", "nodes": "redteam", "node_count": number(1), "time_limit": number(600),
        "start_time": number(int(time.time())), "submit_time": number(int(time.time())),
        "end_time": number(int(time.time()) + 36_000), "batch_flag": True, "batch_host": "redteam",
        "array_job_id": number(0), "array_task_id": {"set": False, "infinite": False, "number": 0},
        "gres_detail": [f"gpu:1(IDX:{job.gpu})"], "tres_alloc_str": "cpu=1,gres/gpu=1",
        "command": "/bin/train", "comment": "", "het_job_id": number(0),
    }  # fmt: skip


def _replace(path: Path, text: str) -> None:
    draft = path.with_suffix(".draft")
    draft.write_text(text, encoding="utf-8")
    draft.replace(path)
