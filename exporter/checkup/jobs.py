"""Who holds the GPUs: each scheduler that the configuration allows, as far as it is here.

Owns the difference between a scheduler that is absent and one that is broken, and what each needs of this node. Refuses
to hold a job against anybody: who has which GPU is what the sample shows.
"""

import os
import re
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

from exporter.checkup import FAIL, INFO, OK, WARN, Finding, Findings, Here, Verdict, named, said_and_do
from exporter.checkup.machine import rights
from exporter.config import Config
from exporter.schedulers import SCHEDULERS, SchedulerError, open_scheduler
from exporter.schedulers.slurm.asking import Asker, ByCommands
from exporter.schedulers.slurm.commands import Commands, SilentError
from exporter.schedulers.slurm.conf import find_conf, read_conf

JOBS = "jobs"
_HOST_PIDS = 0xEFFFFFFC
"""Inode of /proc/PID/ns/pid in the host's own pid namespace (PROC_PID_INIT_INO, Linux' include/linux/proc_ns.h)."""
_HIDEPID = re.compile(r"hidepid=(\w+)")


def needs(name: str) -> Callable[[Config], bool]:
    """Whether the configuration names that scheduler."""
    return lambda config: config.scheduler == name


def _wants(here: Here, name: str) -> bool:
    return here.config.scheduler in ("auto", name)


def _refused(here: Here, name: str, err: Exception, *, absent: bool = False) -> Finding:
    verdict: Verdict = FAIL if needs(name)(here.config) else INFO if absent else WARN
    words = str(err).removeprefix(f"scheduler {name}: ")
    return Finding(JOBS, name, verdict, *said_and_do(words, f"set [{name.replace('-', '_')}] to what is here"))


def look_at_slurm(here: Here, _: Findings) -> Iterator[Finding]:
    """slurm.conf, the node's name, the spool directory, the prolog's directory, and the controller."""
    if not _wants(here, "slurm"):
        return
    slurm = here.config.slurm
    there = bool(find_conf(slurm.conf, here.environ) or slurm.spool_dir or slurm.mapping_dir)
    try:
        scheduler = open_scheduler("slurm", here.config)
    except SchedulerError as err:
        yield _refused(here, "slurm", err, absent=not there)
        return
    scheduler.close()
    yield Finding(JOBS, "slurm", OK, f"at home here: this is node {scheduler.node}")
    yield from _directories(here, scheduler.node)
    yield _controller(here, scheduler.node)


def _directories(here: Here, node: str) -> Iterator[Finding]:
    slurm = here.config.slurm
    path = find_conf(slurm.conf, here.environ)
    spool = Path(slurm.spool_dir) if slurm.spool_dir else read_conf(path).spool_dir(node) if path else None
    if spool is not None and (spool.is_dir() or not slurm.mapping_dir):
        yield _readable(here, "slurm spool", spool, "SlurmdSpoolDir", _SPOOL)
    if slurm.mapping_dir:
        yield _readable(here, "slurm mapping", Path(slurm.mapping_dir), "the prolog's directory", _PROLOG)


_PROLOG = "install slurm-prolog.sh and slurm-epilog.sh and have slurm.conf name them; see docs/bare-metal.md"
_SPOOL = "let this user read it (its group, an ACL, CAP_DAC_READ_SEARCH), or use slurm.mapping_dir and the prolog"


def _readable(here: Here, check: str, folder: Path, what: str, do: str) -> Finding:
    try:
        entries = len(os.listdir(folder))  # noqa: PTH208  its error names the folder, and only a count is wanted
    except OSError as err:
        verdict: Verdict = FAIL if needs("slurm")(here.config) else WARN
        return Finding(JOBS, check, verdict, f"{what} {folder} cannot be read: {err.strerror or err}", do)
    return Finding(JOBS, check, OK, f"{what} {folder} can be read, {entries} entries")


def _controller(here: Here, node: str) -> Finding:
    """One question about this node, in the way that questions about jobs go."""
    try:
        with closing(_asker(here)) as asker:
            state = asker.node(node)
    except (SilentError, ValueError) as err:
        said, do = said_and_do(str(err), "is slurmctld up and reachable from here? `scontrol ping`")
        return Finding(JOBS, "slurm controller", FAIL if needs("slurm")(here.config) else WARN, said, do)
    return Finding(JOBS, "slurm controller", OK, f"answers; it knows {node}{_in(state.condition)}")


def _asker(here: Here) -> Asker:
    slurm = here.config.slurm
    if slurm.restd_url:
        from exporter.schedulers.slurm.restd import Restd  # noqa: PLC0415  an HTTP client is 13 MiB

        return Restd(slurm.restd_url, token_file=slurm.restd_token_file, timeout=slurm.timeout_seconds)
    conf = find_conf(slurm.conf, here.environ)
    return ByCommands(Commands(bin_dir=slurm.bin_dir, conf=conf, timeout=slurm.timeout_seconds))


def _in(condition: str) -> str:
    return f", which takes no new work: {condition}" if condition else ", which takes work"


def look_at_kubernetes(here: Here, _: Findings) -> Iterator[Finding]:
    """The kubelet's socket, and what the API server lets this service account ask."""
    if not _wants(here, "kubernetes"):
        return
    settings = here.config.kubernetes
    absent = not _there(Path(settings.pod_resources_socket))
    if absent and not needs("kubernetes")(here.config):
        said = f"no kubelet at {settings.pod_resources_socket}"
        yield Finding(JOBS, "kubernetes", INFO, said, "mount the host's /var/lib/kubelet/pod-resources, the folder")
        return
    try:
        open_scheduler("kubernetes", here.config).close()
        from exporter.schedulers.kubernetes.trying import try_kubelet  # noqa: PLC0415  grpc is 20 MiB

        pods, devices = try_kubelet(settings.pod_resources_socket)
    except SchedulerError as err:
        yield _refused(here, "kubernetes", err)
    else:
        said = f"the kubelet answers: {pods} pods, which hold {devices} devices"
        yield Finding(JOBS, "kubernetes", OK, said)
    yield from _api(here)


def _there(path: Path) -> bool:
    """Also where it may not be looked at: then it is there and broken, not absent."""
    try:
        return path.exists()
    except PermissionError:
        return True


def _api(here: Here) -> Iterator[Finding]:
    try:
        from exporter.schedulers.kubernetes import access  # noqa: PLC0415
        from exporter.schedulers.kubernetes.api import Pace  # noqa: PLC0415
        from exporter.schedulers.kubernetes.trying import try_api  # noqa: PLC0415
    except ImportError:
        return
    settings = here.config.kubernetes
    found = access(settings, here.environ, Pace(answer=3.0))
    if found is None:
        said = "the API server is not asked: jobs, labels, users and a cordon of the node are not known"
        do = "run in a pod with a service account, or set kubernetes.api_url"
        yield Finding(JOBS, "kubernetes api", INFO, said, do)
        return
    node = settings.node_name or here.environ.get("NODE_NAME") or here.host
    told = try_api(found, node)
    wrong = {name: text for name, text in told.items() if text}
    if not wrong:
        said = f"{found.url} lets this service account list its node {node} and the pods on it"
        yield Finding(JOBS, "kubernetes api", OK, said)
        return
    name, text = next(iter(wrong.items()))
    said, do = said_and_do(f"{found.url}: {name and f'{name}: '}{text}", "look at the API server and at the token")
    yield Finding(JOBS, "kubernetes api", WARN, said, do)


def look_at_mapping(here: Here, _: Findings) -> Iterator[Finding]:
    """The directory of the scheduler called mapping-dir."""
    if not _wants(here, "mapping-dir"):
        return
    path = Path(here.config.mapping_dir.path)
    try:
        open_scheduler("mapping-dir", here.config).close()
    except SchedulerError as err:
        yield _refused(here, "mapping-dir", err, absent=not _there(path))
        return
    yield Finding(JOBS, "mapping-dir", OK, f"{path} can be read")


def look_at_processes(here: Here, _: Findings) -> Iterator[Finding]:
    """What of other users' processes can be seen: without a scheduler all rests on it, with one the ranks do."""
    proc = Path(here.config.host.proc)
    others = [folder for folder in proc.glob("[0-9]*") if _owner(folder) not in (None, os.geteuid())]
    bad = FAIL if needs("processes")(here.config) else WARN
    hidden = _hidden(here)
    if hidden:
        said = f"{proc} is mounted with hidepid={hidden}, which hides other users' processes"
        do = "give the daemon's user the gid= of that mount, CAP_SYS_PTRACE, or mount the host's /proc without hidepid"
        if not rights(here.proc).has("SYS_PTRACE"):
            yield Finding(JOBS, "processes", bad, said, do)
            return
    if not _host_pids(here):
        said = f"{proc} shows this container's processes alone: the driver's pids mean nothing here"
        yield Finding(JOBS, "processes", bad if _last(here) else INFO, said, "in a pod set hostPID: true")
        return
    closed = [folder for folder in others if not _environ(folder)]
    if others and len(closed) == len(others):
        said = f"other users' processes are seen ({len(others)}), their environments may not be read: no ranks of jobs"
        yield Finding(JOBS, "processes", INFO, said, "run as root, or with CAP_SYS_PTRACE and CAP_DAC_READ_SEARCH")
        return
    yield Finding(JOBS, "processes", OK, f"{len(others)} processes of other users are seen, with their environments")


def _last(here: Here) -> bool:
    return here.config.scheduler == "processes"


def _owner(folder: Path) -> int | None:
    try:
        return folder.stat().st_uid
    except OSError:
        return None


def _environ(folder: Path) -> bool:
    try:
        with (folder / "environ").open("rb") as file:
            file.read(1)
    except OSError:
        return False
    return True


def _hidden(here: Here) -> str:
    """The value of hidepid= of the mount that shows the host's processes; empty: nothing is hidden."""
    try:
        lines = (here.proc / "self/mountinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    mine = [line for line in lines if line.split()[4] == here.config.host.proc]
    found = _HIDEPID.search(mine[-1]) if mine else None
    return "" if found is None or found[1] in ("0", "off") else found[1]


def _host_pids(here: Here) -> bool:
    """Whether the host's processes are seen: in its pid namespace, or by its /proc mounted elsewhere."""
    if here.config.host.proc != f"{here.proc}":
        return True
    try:
        return (here.proc / "self/ns/pid").stat().st_ino == _HOST_PIDS
    except OSError:
        return True


def look_at_choice(here: Here, before: Findings) -> Iterator[Finding]:
    """Which scheduler the daemon will take."""
    names = [name for name in SCHEDULERS if name != "processes"]
    works = [finding.check for finding in named(before, *names) if finding.verdict is OK]
    if here.config.scheduler in ("auto", "processes"):
        chosen = works[0] if works and here.config.scheduler == "auto" else "processes"
        more = "" if chosen != "processes" else ": whoever has a process on a GPU holds it"
        yield Finding(JOBS, "scheduler", OK, f"the daemon will ask {chosen}{more}")
    elif works:
        yield Finding(JOBS, "scheduler", OK, f"the daemon will ask {works[0]}, as configured")
    else:
        said = f"the daemon will not start: {here.config.scheduler} is configured and does not work"
        yield Finding(JOBS, "scheduler", FAIL, said, "see above, or set scheduler to another, or to auto")
