"""The unit under a real systemd: installed by the commands of docs/bare-metal.md, one after the other, and taken away.

systemd is pid 1 of namespaces of its own (tests/systemd/machine.py). What stands in: NVML, whose library is the tests'
own; an index of packages, for the wheel's dependencies are those of the tests; limits of memory and CPU where the
machine has no such controller in its unified hierarchy, which then are not kept.
"""

import json
from collections.abc import Iterator

import pytest

from tests.e2e.running import Page
from tests.systemd.bounds import CHANGES, GRANTED, REFUSED
from tests.systemd.installed import CLUSTER, CONFIG, GATEWAY, UNIT, Node, blocks, wheel
from tests.systemd.machine import started
from tests.waiting import wait_for

pytestmark = pytest.mark.e2e
FREE = "/usr/bin/sleep 600"
PRIVILEGES = {"CapPrm": 0, "CapEff": 0, "CapBnd": 0, "CapAmb": 0}
JOBS = 1 << 19 | 1 << 2
"""CAP_SYS_PTRACE and CAP_DAC_READ_SEARCH, include/uapi/linux/capability.h."""


@pytest.fixture(name="fresh", scope="module")
def _fresh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    folder = tmp_path_factory.mktemp("machine")
    with started(folder) as machine:
        yield Node(machine, wheel(folder))


@pytest.fixture(name="node")
def _node(fresh: Node) -> Node:
    fresh.reset()
    return fresh


def test_the_quick_start_gives_a_daemon_without_any_privilege_that_answers(node: Node) -> None:
    page = node.until(lambda page: page.total("seconds_total", leak="useful"), "useful time")
    assert page.by("source", "source_info") == {"nvml": 1}
    assert len(page.states()) == 8
    assert {name: int(node.status(name), 16) for name in PRIVILEGES} == PRIVILEGES
    assert (node.status("NoNewPrivs"), node.status("Seccomp")) == ("1", "2")
    user = node.machine.run("id", "-u", "gpu-efficiency").strip()
    assert set(node.status("Uid").split()) == {user} != {"0"}
    assert node.machine.run("id", "-Gn", "gpu-efficiency").split() == ["gpu-efficiency"]
    assert int(node.status("Threads")) < int(node.machine.show(UNIT, "TasksMax")) / 4
    bare = ("su", "--login", "--shell=/bin/sh", "games", "--command=gpu-efficiency --version")
    assert node.machine.run(*bare).startswith("gpu-efficiency ")
    assert {"gpus.json", "history.db"} <= set(node.machine.run("ls", "/var/lib/gpu-efficiency").split())
    assert "history is kept in /var/lib/gpu-efficiency/history.db" in node.said()
    assert "Traceback" not in node.said()


@pytest.fixture(name="tempted")
def _tempted(fresh: Node) -> Node:
    """There is something to be had where the daemon has no business."""
    places = (
        "/run/gpu-efficiency/jobs/0",
        "/run/gpu-efficiency/pause",
        "/tmp/of-another",  # noqa: S108
        "/home/job/log",
        "/home/job/open",
    )
    for place in (*places, "/var/lib/kubelet/pod-resources/kubelet.sock"):
        path = fresh.machine.path(place)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("something\n")
    fresh.machine.run("install", "-d", "-m", "1777", "/run/open")
    fresh.machine.run("chown", "-R", "nobody", "/home/job")
    fresh.machine.run("chmod", "0600", "/home/job/log", "/var/lib/kubelet/pod-resources/kubelet.sock")
    return fresh


@pytest.mark.parametrize("drop_in", ["", *CHANGES])
def test_the_sandbox_leaves_what_the_daemon_needs_and_nothing_else(tempted: Node, drop_in: str) -> None:
    with tempted.process(FREE) as other:
        shipped = REFUSED | dict.fromkeys(GRANTED, "")
        assert tempted.probe(other, *filter(None, [drop_in])) == shipped | CHANGES.get(drop_in, {})


def test_another_users_process_has_its_gpu_and_reports(node: Node) -> None:
    """Across the sandbox: /proc of other users, and the credentials that the kernel gives of who connects."""
    line = "import json, socket, time; s = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)"
    line += "; s.connect('/run/gpu-efficiency/report.sock')"
    line += "\nwhile True: s.send(json.dumps({'v': 1, 'phase': 'restore'}).encode()); time.sleep(0.5)"
    node.machine.path("/srv/job.py").write_text(line)
    with node.process("/usr/bin/python3 /srv/job.py") as pid:
        node.world("gpu * idle", f"gpu 2 process {pid} 1000000")
        node.until(lambda page: page.total("workload_messages_total", outcome="taken"), "its reports are taken")
        node.until(
            lambda page: holders(page) == {("2", "games/of-another.service")}, "it has that GPU, and nobody else"
        )


def holders(page: Page) -> set[tuple[str, str]]:
    """GPU and job."""
    return {(labels["gpu"], labels["job_id"]) for labels, _ in page.rows("allocation_info")}


def test_a_pause_and_the_prologs_files_outlive_a_restart(node: Node) -> None:
    for block in blocks("Slurm: prolog and epilog"):
        node.follow(block)
    job = {"SLURM_JOB_ID": "4711", "SLURM_JOB_GPUS": "0,3"}
    node.machine.run("/etc/slurm/prolog.d/50-gpu-efficiency.sh", **job)
    node.machine.run("/opt/gpu-efficiency/bin/gpu-efficiency", "pause", "--for", "5m")
    node.configure('scheduler = "mapping-dir"')
    node.restart()
    assert "paused: nothing is read until" in node.said().split("serving http")[-1]
    node.machine.run("/opt/gpu-efficiency/bin/gpu-efficiency", "resume")
    node.until(lambda page: holders(page) == {("0", "4711"), ("3", "4711")}, "who holds the GPUs")
    node.machine.run("/etc/slurm/epilog.d/50-gpu-efficiency.sh", **job)
    node.until(lambda page: not holders(page), "nobody holds a GPU")


SLURM = {
    "slurm.conf": (
        "ClusterName=c\nSlurmctldHost=localhost\nAuthType=auth/munge\nProctrackType=proctrack/cgroup\nGresTypes=gpu\n"
        "TaskPlugin=task/cgroup\nSelectType=select/cons_tres\nSlurmdSpoolDir=/var/spool/of-slurmd\n"
        "NodeName=here NodeHostname={host} CPUs=1 Gres=gpu:2 State=UNKNOWN\nPartitionName=all Nodes=here\n"
    ),
    "gres.conf": "Name=gpu File=/dev/nvidia3\nName=gpu File=/dev/nvidia0\n",
    "cgroup.conf": "CgroupPlugin=cgroup/v2\n",
}
"""A node whose second GPU is Slurm's first."""


@pytest.fixture(name="slurm")
def _slurm(node: Node) -> Iterator[Node]:
    machine = node.machine
    host = machine.run("hostname", "-s").strip()
    machine.run("install", "-d", "/etc/slurm", "/var/spool/of-slurmd")
    machine.run("install", "-d", "-o", "munge", "/run/munge")
    for name, text in SLURM.items():
        machine.path(f"/etc/slurm/{name}").write_text(text.format(host=host))
    machine.run("mknod", "-m", "666", "/dev/nvidia3", "c", "195", "3")
    machine.run("setpriv", "--reuid=munge", "--regid=munge", "--clear-groups", "munged", "--force")
    yield node
    machine.run("rm", "-r", "/dev/nvidia3", "/var/spool/of-slurmd", *(f"/etc/slurm/{name}" for name in SLURM))
    machine.run("kill", machine.path("/run/munge/munged.pid").read_text().strip())


def test_slurmd_lists_the_gpus_to_the_daemon_in_its_sandbox(slurm: Node) -> None:
    """The prolog's file has Slurm's index."""
    for block in blocks("Slurm: prolog and epilog"):
        slurm.follow(block)
    slurm.machine.run("/etc/slurm/prolog.d/50-gpu-efficiency.sh", SLURM_JOB_ID="4711", SLURM_JOB_GPUS="0")
    slurm.configure('scheduler = "slurm"\n[slurm]\nmapping_dir = "/run/gpu-efficiency/jobs"\n')
    slurm.restart()
    page = slurm.until(lambda page: holders(page) == {("3", "4711")}, "the job holds the GPU that is Slurm's first")
    assert page.total("faults_total", kind="scheduler_refused") == 0


def test_what_is_stopped_leaves_the_folder_and_takes_its_socket(node: Node) -> None:
    listing = node.machine.path("/run/gpu-efficiency")
    assert {path.name for path in listing.iterdir()} == {"report.sock"}
    listing.joinpath("pause").touch()
    node.machine.run("systemctl", "stop", UNIT)
    assert node.state() == ("inactive", "dead")
    assert node.machine.show(UNIT, "ExecMainStatus") == "0"
    assert {path.name for path in listing.iterdir()} == {"pause"}
    listing.joinpath("pause").unlink()


def test_killed_it_comes_back_and_makes_its_socket_anew(node: Node) -> None:
    node.drop_in("soon", "[Service]\nRestartSec=100ms\n")
    node.machine.run("systemctl", "daemon-reload")
    before = node.pid()
    node.machine.run("kill", "-KILL", f"{before}")
    wait_for(lambda: node.pid() not in {0, before}, "systemd starts it again")
    node.until(lambda page: page.total("ticks_total"), "it samples again")
    assert "cannot be made" not in node.said().split("serving")[-1]
    assert node.machine.tried("ss", "-xl").stdout.count("/run/gpu-efficiency/report.sock") == 1


@pytest.mark.parametrize("program", ["", "/usr/bin/sleep 600"])
def test_reloaded_before_it_can_handle_that_it_comes_back(node: Node, program: str) -> None:
    """The second program never can."""
    start = f"ExecStart=\nExecStart={program}\n" if program else ""
    node.drop_in("soon", f"[Service]\nRestartSec=100ms\n{start}")
    node.machine.run("systemctl", "daemon-reload")
    node.machine.run("systemctl", "restart", UNIT)
    before = node.pid()
    node.machine.run("systemctl", "reload", UNIT)
    if program:
        wait_for(lambda: node.pid() not in {0, before}, "systemd starts it again")
    else:
        node.until(lambda page: page.total("ticks_total"), "it samples")
    node.machine.run("systemctl", "stop", UNIT)
    assert node.state() == ("inactive", "dead")


def test_a_configuration_that_cannot_be_used_is_not_tried_again(node: Node) -> None:
    node.machine.path(CONFIG).write_text("sauce = 'nvml'\n")
    node.machine.tried("systemctl", "restart", UNIT)
    wait_for(lambda: node.state() == ("failed", "failed"), "it is given up")
    assert node.machine.show(UNIT, "ExecMainStatus") == "2"
    assert "sauce" in node.said()


def test_without_its_folder_it_says_so_by_the_number_on_the_page(node: Node) -> None:
    node.machine.run("systemctl", "stop", UNIT)
    node.machine.run("rm", "-r", "/run/gpu-efficiency")
    node.machine.tried("systemctl", "start", UNIT)
    wait_for(lambda: node.state() == ("activating", "auto-restart"), "it could not start")
    assert node.machine.show(UNIT, "ExecMainStatus") == "226"
    node.machine.run("systemd-tmpfiles", "--create", "gpu-efficiency.conf")
    node.restart()


def test_without_telemetry_it_is_tried_again(node: Node) -> None:
    """A driver, or a dcgm-exporter, may come later."""
    node.configure('source = "dcgm-exporter"')
    node.machine.tried("systemctl", "restart", UNIT)
    wait_for(lambda: node.state() == ("activating", "auto-restart"), "systemd waits to start it again")
    assert node.machine.show(UNIT, "ExecMainStatus") == "3"
    assert "tried dcgm-exporter" in node.said()


def test_a_drop_in_gives_its_capabilities_and_no_other(node: Node) -> None:
    for block in blocks("What needs which privilege"):
        node.follow(block)
    node.until(lambda page: page.total("ticks_total"), "it samples")
    assert {name: int(node.status(name), 16) for name in PRIVILEGES} == dict.fromkeys(PRIVILEGES, JOBS)
    assert node.status("Uid").split()[0] != "0"


def test_a_reload_keeps_the_process(node: Node) -> None:
    before = node.pid()
    node.configure("[policy]\nhang_seconds = 299.0")
    node.machine.run("systemctl", "reload", UNIT)
    node.until(lambda page: page.total("config_last_reload_successful"), "the reload is told")
    assert node.pid() == before


def test_a_key_that_its_group_may_read_is_served_with(node: Node) -> None:
    """By the example as it is: TLS without users."""
    node.follow(
        "cd /etc/gpu-efficiency\n"
        "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 1 -subj /CN=localhost"
        " -addext subjectAltName=DNS:localhost -keyout server.key -out server.crt 2>&1\n"
        "install -m 0640 -g gpu-efficiency -t . /opt/gpu-efficiency/share/gpu-efficiency/examples/web.yaml\n"
        "chown root:gpu-efficiency server.key server.crt\n"
        "chmod 0640 server.key server.crt\n"
    )
    node.configure('[web]\nconfig_file = "/etc/gpu-efficiency/web.yaml"')
    node.machine.run("systemctl", "restart", UNIT)
    words = (
        "curl",
        "--silent",
        "--fail",
        "--cacert",
        "/etc/gpu-efficiency/server.crt",
        "https://localhost:19400/metrics",
    )
    wait_for(lambda: node.machine.tried(*words).stdout.count("gpu_efficiency_build_info{"), "it answers over TLS")
    assert node.page() is None


def test_json_lines_come_to_the_journal(node: Node) -> None:
    node.configure('[log]\nformat = "json"')
    node.restart()
    lines = [line for line in node.said().splitlines() if '"serving http' in line]
    assert lines
    assert lines[-1].startswith('{"time": ')


def test_the_gateways_unit_knows_who_asks(node: Node) -> None:
    for block in blocks("Users of a login node"):
        node.follow(block)
    node.configure('[gateway]\nnodes = ["localhost:19400"]\n')
    node.machine.run("systemctl", "start", GATEWAY)
    sock, url = "/run/gpu-efficiency/gateway.sock", "http://localhost/api/v1/receipts"
    wait_for(node.machine.path(sock).is_socket, "it listens")
    words = ("setpriv", "--reuid", "games", "--clear-groups", "curl", "--silent", "--unix-socket", sock, url)
    records = json.loads(node.machine.run(*words))["receipts"]
    assert {each["owner"]["user"] for each in records} <= {"games"}
    node.machine.run("systemctl", "stop", GATEWAY)


def test_a_receipt_is_written_though_the_epilogs_control_group_is_killed(node: Node) -> None:
    """As by a slurmd with PrologFlags=RunInJob, which runs it in the extern step."""
    machine = node.machine
    for block in blocks("Slurm: receipts"):
        node.follow(block)
    machine.path("/srv/slow").write_text("#!/bin/sh\nsleep 2\necho written >/srv/mark\n")
    machine.path("/srv/slow").chmod(0o755)
    machine.path("/etc/gpu-efficiency/receipts.conf").write_text("command=/srv/slow\n")
    job = "/sys/fs/cgroup/system.slice/slurmstepd.scope/job_4711"
    machine.run("mkdir", "-p", f"{job}/step_extern/slurm")
    enter = f"echo $$ >{job}/step_extern/slurm/cgroup.procs; exec /etc/slurm/epilog.d/60-gpu-efficiency-receipt.sh"
    machine.run("sh", "-c", enter, SLURM_JOB_ID="4711", SLURMD_NODENAME="n1")
    machine.path(f"{job}/cgroup.kill").write_text("1")
    wait_for(machine.path("/srv/mark").exists, "it has gone on")
    machine.run("rm", "/etc/gpu-efficiency/receipts.conf", "/srv/mark")


def test_an_upgrade_and_the_way_out_leave_nothing_behind(node: Node) -> None:
    """Last: it takes away what the others need."""
    for block in (*blocks("Slurm: receipts"), *blocks("Once a cluster"), *blocks("Users of a login node")):
        node.follow(block)
    node.machine.run("systemctl", "start", CLUSTER)
    node.machine.run("/etc/slurm/epilog.d/60-gpu-efficiency-receipt.sh", SLURM_JOB_ID="4711")
    locks = node.machine.path("/run/gpu-efficiency-receipts")
    wait_for(locks.is_dir, "it goes on by itself")
    words = ("curl", "--silent", "--fail", "http://localhost:19401/metrics")
    wait_for(lambda: node.machine.tried(*words).stdout.count("gpu_efficiency_cluster_"), "the cluster's daemon answers")
    (installed,) = node.machine.path("/opt/gpu-efficiency/lib").glob("python*/site-packages/exporter/py.typed")
    content = installed.read_text()
    installed.write_text("another build of the same version\n")
    for block in blocks("Upgrade"):
        node.follow(block)
    assert installed.read_text() == content
    node.until(lambda page: page.total("ticks_total"), "the upgraded daemon samples")
    for block in blocks("Uninstall"):
        node.follow(block)
    assert node.machine.tried("id", "gpu-efficiency").returncode != 0
    found = node.machine.run("find", "/etc", "/opt", "/run", "/var", "-xdev", "-name", "*gpu-efficiency*")
    assert found == ""
    assert node.state() == node.state(CLUSTER) == ("inactive", "dead")
