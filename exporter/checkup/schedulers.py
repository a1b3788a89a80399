"""Checks each scheduler that the configuration allows, and what it needs on this node.

Distinguishes an absent scheduler from a broken one.
"""

import os
import re
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

from exporter.checkup.base import (
    INFO,
    OK,
    WARN,
    CheckContext,
    Finding,
    Findings,
    failed,
    findings_of,
    read_text,
    split_advice,
)
from exporter.checkup.machine import rights
from exporter.config import Config
from exporter.files import may_exist
from exporter.registry import SCHEDULERS, section_of
from exporter.schedulers.base import SchedulerError, open_scheduler
from exporter.schedulers.slurm.client import (
    CommandClient,
    Commands,
    MissingCommandError,
    SlurmClient,
    SlurmUnavailableError,
)
from exporter.schedulers.slurm.local_node import find_conf, parse_slots, read_conf
from exporter.schedulers.slurm.slurmd import list_gpus

JOBS = "jobs"
_HOST_PIDS = 0xEFFFFFFC
"""Inode of /proc/PID/ns/pid in the host's own pid namespace (PROC_PID_INIT_INO, Linux' include/linux/proc_ns.h)."""
_HIDEPID = re.compile(r"hidepid=(\w+)")


def requires_scheduler(name: str) -> Callable[[Config], bool]:
    """Whether the configuration names that scheduler."""
    return lambda config: config.scheduler == name


def _tries_scheduler(context: CheckContext, name: str) -> bool:
    return context.config.scheduler in ("auto", name)


def _refused(context: CheckContext, name: str, err: Exception, *, absent: bool = False) -> Finding:
    text = str(err).removeprefix(f"scheduler {name}: ")
    message, do = split_advice(text, f"set [{section_of(name)}] to what this node has")
    return failed(JOBS, name, message, do, needed=context.config.scheduler == name, absent=absent)


def check_slurm(context: CheckContext, _: Findings) -> Iterator[Finding]:
    """Check slurm.conf, the node's name, the two directories, slurmd's list of GPUs, and the controller."""
    if not _tries_scheduler(context, "slurm"):
        return
    slurm = context.config.slurm
    has_slurm = bool(find_conf(slurm.conf, context.environ) or slurm.spool_dir or slurm.mapping_dir)
    try:
        scheduler = open_scheduler("slurm", context.config)
    except SchedulerError as err:
        yield _refused(context, "slurm", err, absent=not has_slurm)
        return
    scheduler.close()
    yield Finding(JOBS, "slurm", OK, f"available: this is node {scheduler.node}")
    yield from _directories(context, scheduler.node)
    yield _gpu_list(context, scheduler.node)
    yield _controller(context, scheduler.node)


def _directories(context: CheckContext, node: str) -> Iterator[Finding]:
    slurm = context.config.slurm
    path = find_conf(slurm.conf, context.environ)
    spool = Path(slurm.spool_dir) if slurm.spool_dir else read_conf(path).spool_dir(node) if path else None
    if spool is not None and (may_exist(spool) or not slurm.mapping_dir):
        yield _readable(context, "slurm spool", spool, "SlurmdSpoolDir", _SPOOL_ADVICE)
    if slurm.mapping_dir:
        yield _readable(context, "slurm mapping", Path(slurm.mapping_dir), "the prolog's directory", _PROLOG_ADVICE)


_PROLOG_ADVICE = "install slurm-prolog.sh and slurm-epilog.sh and have slurm.conf name them; see docs/bare-metal.md"
_SPOOL_ADVICE = (
    "let this user read it (its group, an ACL, CAP_DAC_READ_SEARCH), or use slurm.mapping_dir and the prolog"
)


def _readable(context: CheckContext, check: str, folder: Path, what: str, do: str) -> Finding:
    try:
        entries = len(os.listdir(folder))  # noqa: PTH208  its error names the folder, and only a count is wanted
    except OSError as err:
        message = f"{what} {folder} cannot be read: {err.strerror or err}"
        return failed(JOBS, check, message, do, needed=context.config.scheduler == "slurm")
    return Finding(JOBS, check, OK, f"{what} {folder} can be read, {entries} entries")


def _gpu_list(context: CheckContext, node: str) -> Finding:
    """Have slurmd list the GPUs: without that, which GPU an index names is unknown."""
    try:
        slots = parse_slots(list_gpus(_commands(context), node, proc=Path(context.config.host.proc)))
    except MissingCommandError as err:
        message = f"{split_advice(str(err))[0]}: gres index N is taken for /dev/nvidiaN"
        return Finding(JOBS, "slurm gpus", WARN, message, _NO_SLURMD_ADVICE)
    except (SlurmUnavailableError, ValueError) as err:
        message, do = split_advice(str(err), _LIST_ADVICE)
        return failed(JOBS, "slurm gpus", message, do, needed=context.config.scheduler == "slurm")
    counts = ", ".join(f"gres/{name}: {len(each)}" for name, each in sorted(slots.items()) if each)
    return Finding(JOBS, "slurm gpus", OK, f"`slurmd -G` lists them ({counts})")


_NO_SLURMD_ADVICE = (
    "set slurm.bin_dir; where there is no slurmd (a container), look whether gres.conf has the GPUs in the order of"
    " /dev/nvidiaN"
)
_LIST_ADVICE = (
    "run `slurmd -N NODE -G` as this user: slurm.conf must have the node with Gres= (slurm.node_name names it), and"
    " gres.conf its devices"
)


def _controller(context: CheckContext, node: str) -> Finding:
    """Query this node from the controller, by the same client as jobs."""
    try:
        with closing(_controller_client(context)) as client:
            state = client.node(node)
    except (SlurmUnavailableError, ValueError) as err:
        message, do = split_advice(str(err), "is slurmctld up and reachable from here? `scontrol ping`")
        return failed(JOBS, "slurm controller", message, do, needed=context.config.scheduler == "slurm")
    return Finding(JOBS, "slurm controller", OK, f"answers; it knows {node}{_node_state_text(state.condition)}")


def _controller_client(context: CheckContext) -> SlurmClient:
    slurm = context.config.slurm
    if slurm.restd_url:
        from exporter.schedulers.slurm.restd import RestClient  # noqa: PLC0415  an HTTP client is 13 MiB

        return RestClient(slurm.restd_url, token_file=slurm.restd_token_file, timeout=slurm.timeout_seconds)
    return CommandClient(_commands(context))


def _commands(context: CheckContext) -> Commands:
    slurm = context.config.slurm
    conf = find_conf(slurm.conf, context.environ)
    return Commands(bin_dir=slurm.bin_dir, conf=conf, timeout=slurm.timeout_seconds)


def _node_state_text(condition: str) -> str:
    return f", which takes no new work: {condition}" if condition else ", which takes work"


def check_kubernetes(context: CheckContext, _: Findings) -> Iterator[Finding]:
    """Check the kubelet's socket, and the service account's permissions at the API server."""
    if not _tries_scheduler(context, "kubernetes"):
        return
    settings = context.config.kubernetes
    absent = not may_exist(Path(settings.pod_resources_socket))
    if absent and context.config.scheduler != "kubernetes":
        message = f"no kubelet at {settings.pod_resources_socket}"
        yield Finding(JOBS, "kubernetes", INFO, message, "mount the host's /var/lib/kubelet/pod-resources, the folder")
        return
    try:
        open_scheduler("kubernetes", context.config).close()
        from exporter.schedulers.kubernetes.kubelet import try_kubelet  # noqa: PLC0415  grpc is 20 MiB

        pods, devices = try_kubelet(settings.pod_resources_socket)
    except SchedulerError as err:
        yield _refused(context, "kubernetes", err)
    else:
        message = f"the kubelet answers: allocated devices: {devices}, pods: {pods}"
        yield Finding(JOBS, "kubernetes", OK, message)
    yield from _api(context)


def _api(context: CheckContext) -> Iterator[Finding]:
    try:
        from exporter.schedulers.kubernetes.api import (  # noqa: PLC0415
            ApiTimeouts,
            find_api_server,
            try_api,
        )
    except ImportError:
        return
    settings = context.config.kubernetes
    found = find_api_server(settings, context.environ, ApiTimeouts(response=3.0))
    if found is None:
        message = "the API server is not queried: jobs, labels, users and a cordon of the node are unknown"
        do = "run in a pod with a service account, or set kubernetes.api_url"
        yield Finding(JOBS, "kubernetes api", INFO, message, do)
        return
    node = settings.node_name or context.environ.get("NODE_NAME") or context.host
    errors = try_api(found, node)
    wrong = {name: text for name, text in errors.items() if text}
    if not wrong:
        message = f"{found.url} lets this service account list its node {node} and the pods on it"
        yield Finding(JOBS, "kubernetes api", OK, message)
        return
    name, text = next(iter(wrong.items()))
    message, do = split_advice(f"{found.url}: {name and f'{name}: '}{text}", "look at the API server and at the token")
    yield Finding(JOBS, "kubernetes api", WARN, message, do)


def check_mapping_dir(context: CheckContext, _: Findings) -> Iterator[Finding]:
    """Check the directory of the scheduler mapping-dir."""
    if not _tries_scheduler(context, "mapping-dir"):
        return
    path = Path(context.config.mapping_dir.path)
    try:
        open_scheduler("mapping-dir", context.config).close()
    except SchedulerError as err:
        yield _refused(context, "mapping-dir", err, absent=not may_exist(path))
        return
    yield Finding(JOBS, "mapping-dir", OK, f"{path} can be read")


def check_processes(context: CheckContext, _: Findings) -> Iterator[Finding]:
    """Check that other users' processes are visible: needed for ranks, and without a scheduler for everything."""
    proc = Path(context.config.host.proc)
    others = [folder for folder in proc.glob("[0-9]*") if _owner(folder) not in (None, os.geteuid())]
    needed = context.config.scheduler == "processes"
    hidden = _hidden(context)
    if hidden:
        message = f"{proc} is mounted with hidepid={hidden}, which hides other users' processes"
        do = "give the daemon's user the gid= of that mount, CAP_SYS_PTRACE, or mount the host's /proc without hidepid"
        if not rights(context.proc).has("SYS_PTRACE"):
            yield failed(JOBS, "processes", message, do, needed=needed)
            return
    if not _host_pids(context):
        message = f"{proc} shows only this container's processes: the driver's pids are not theirs"
        yield failed(JOBS, "processes", message, "in a pod set hostPID: true", needed=needed, absent=True)
        return
    closed = [folder for folder in others if not _environ(folder)]
    if others and len(closed) == len(others):
        message = f"other users' processes are visible ({len(others)}), their environments may not be read: no ranks"
        yield Finding(JOBS, "processes", INFO, message, "run as root, or with CAP_SYS_PTRACE and CAP_DAC_READ_SEARCH")
        return
    yield Finding(JOBS, "processes", OK, f"{len(others)} processes of other users are visible, with their environments")


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


def _hidden(context: CheckContext) -> str:
    """Value of hidepid= of the mount of the host's /proc; empty: no process is hidden."""
    lines = read_text(context.proc / "self/mountinfo").splitlines()
    mine = [line for line in lines if line.split()[4] == context.config.host.proc]
    found = _HIDEPID.search(mine[-1]) if mine else None
    return "" if found is None or found[1] in ("0", "off") else found[1]


def _host_pids(context: CheckContext) -> bool:
    """Whether the host's processes are visible: in its pid namespace, or through its /proc mounted elsewhere."""
    if context.config.host.proc != f"{context.proc}":
        return True
    try:
        return (context.proc / "self/ns/pid").stat().st_ino == _HOST_PIDS
    except OSError:
        return True


def check_scheduler_choice(context: CheckContext, before: Findings) -> Iterator[Finding]:
    """Report the scheduler that the daemon will use."""
    names = [name for name in SCHEDULERS if name != "processes"]
    works = [finding.check for finding in findings_of(before, *names) if finding.verdict is OK]
    if context.config.scheduler in ("auto", "processes"):
        chosen = works[0] if works and context.config.scheduler == "auto" else "processes"
        more = "" if chosen != "processes" else ": each GPU is allocated to the owners of its processes"
        yield Finding(JOBS, "scheduler", OK, f"the daemon will use {chosen}{more}")
    elif works:
        yield Finding(JOBS, "scheduler", OK, f"the daemon will use {works[0]}, as configured")
    else:
        message = f"the daemon will not start: {context.config.scheduler} is configured and does not work"
        yield failed(JOBS, "scheduler", message, "see above, or set scheduler to another, or to auto", needed=True)
