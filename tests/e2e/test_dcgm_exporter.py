"""The whole daemon beside a dcgm-exporter: real pages of real nodes, then time passing on them, then its death."""

import re
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

from tests.e2e.running import Daemon, Page, Site, daemon, site
from tests.waiting import wait_for

SAMPLES = Path(__file__).parents[2] / "../shared/samples/dcgm-exporter"
FACTS = {
    "l4-x2-idle-kops": ("NVIDIA L4", 16.365, 31.0),
    "l40s-idle-upcloud": ("NVIDIA L40S", 35.686, 32.0),
    "t4-idle-rafay": ("Tesla T4", 14.512, 24.0),
}
"""What each page says of its GPU 0: model, watts, degrees."""
PLAIN = "text/plain; version=0.0.4; charset=utf-8"
OPENMETRICS = "application/openmetrics-text;version=1.0.0"
WORKING = {
    "DCGM_FI_PROF_GR_ENGINE_ACTIVE": "0.900000",
    "DCGM_FI_PROF_PIPE_TENSOR_ACTIVE": "0.400000",
    "DCGM_FI_PROF_DRAM_ACTIVE": "0.300000",
    "DCGM_FI_DEV_GPU_UTIL": "97",
    "DCGM_FI_DEV_POWER_USAGE": "300.000000",
    "DCGM_FI_DEV_SM_CLOCK": "2520",
}
pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(not SAMPLES.exists(), reason="needs ../shared"),
]
Serve = Callable[..., Daemon]


def recorded(name: str) -> bytes:
    return (SAMPLES / f"{name}.prom").read_bytes()


def rewritten(text: str, values: dict[str, str]) -> str:
    for field, value in values.items():
        text, changed = re.subn(rf"^({field}\{{.*\}}) \S+$", rf"\g<1> {value}", text, flags=re.MULTILINE)
        assert changed, field
    return text


class Worked:
    """An idle L40S's real page on which a job now computes at 300 W since this was made."""

    def __init__(self) -> None:
        self.text = recorded("l40s-idle-upcloud").decode()
        self.began = time.monotonic()
        self.joules = 0.0

    def __call__(self) -> tuple[bytes, str]:
        self.joules = 300 * (time.monotonic() - self.began)
        energy = {"DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION": f"{5551899580 + round(1000 * self.joules)}"}
        return rewritten(self.text, WORKING | energy).encode(), PLAIN


@pytest.fixture(name="serve")
def _serve(tmp_path: Path) -> Iterator[Serve]:
    """Start the daemon on a site, five samples a second."""
    with ExitStack() as stack:

        def start(exporter: Site, **env: str) -> Daemon:
            url = f"http://127.0.0.1:{exporter.port}/metrics"
            words = ("serve", "--source", "dcgm-exporter", "--dcgm-exporter-url", url)
            pace = ("--sampling.interval-seconds", "0.2")
            return stack.enter_context(daemon(tmp_path, *words, *pace, **env))

        yield start


@pytest.fixture(name="exporter_of")
def _exporter_of() -> Iterator[Callable[[Callable[[], tuple[bytes, str]]], Site]]:
    with ExitStack() as stack:
        yield lambda page: stack.enter_context(site(page))


@pytest.mark.parametrize("name", FACTS)
def test_a_real_idle_page_is_passed_on_and_nothing_is_made_up(
    name: str, serve: Serve, exporter_of: Callable[..., Site]
) -> None:
    served = serve(exporter_of(lambda: (recorded(name), PLAIN)))
    page = served.until(lambda page: page.rows("power_watts"), "a reading")
    model, watts, degrees = FACTS[name]
    assert [labels["model"] for labels, _ in page.rows("gpu_info")] == [model]
    assert float(page.total("power_watts", gpu="0")) == watts
    assert float(page.total("temperature_celsius", gpu="0")) == degrees
    assert page.total("memory_used_bytes", gpu="0") == 0
    page = served.after(3)
    # dcgm-exporter lists no process and no scheduler was asked: who holds a resting GPU cannot be known.
    assert page.states() == {"0": ("unobserved", "owner_unknown")}
    assert page.rows("allocation_info") == page.rows("job_info") == page.rows("node_gau_ratio") == []
    assert page.total("seconds_total", leak="unobserved") == page.total("paid_seconds_total") > 0
    assert page.total("simulated") == 0
    assert page.by("source", "source_info") == {"dcgm-exporter": 1}


def test_both_formats_say_the_same_and_promtool_finds_no_fault(serve: Serve, exporter_of: Callable[..., Site]) -> None:
    served = serve(exporter_of(Worked()))
    served.until(lambda page: page.total("seconds_total", leak="useful") > 0, "useful time")
    text, openmetrics = wait_for(lambda: of_one_tick(served), "two scrapes of one tick")
    assert samples(parse_text(text)) == samples(parse_openmetrics(openmetrics))  # type: ignore[no-untyped-call]
    checked = subprocess.run(
        ["promtool", "check", "metrics"], input=text, capture_output=True, text=True, timeout=60, check=False
    )
    assert (checked.returncode, checked.stdout, checked.stderr) == (0, "", "")


def of_one_tick(served: Daemon) -> tuple[str, str] | None:
    """The same snapshot in both formats; None when a tick fell between the two."""
    text = served.get("/metrics").text
    openmetrics = served.get("/metrics", accept=OPENMETRICS).text
    assert openmetrics.endswith("# EOF\n")
    again = served.get("/metrics").text
    ticks = {re.search(r"^gpu_efficiency_ticks_total (\S+)$", body, re.MULTILINE)[1] for body in (text, again)}  # type: ignore[index]
    return (text, openmetrics) if len(ticks) == 1 else None


def samples(families: Any) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    """What we say; what the process says of itself moves between two scrapes."""
    found = {
        (s.name, frozenset(s.labels.items())): s.value
        for family in families
        for s in family.samples
        if s.name.startswith("gpu_efficiency_")
    }
    assert len(found) > 100
    return found


def test_work_of_an_unknown_owner_is_work_with_the_energy_the_counter_says(
    serve: Serve, exporter_of: Callable[..., Site]
) -> None:
    worked = Worked()
    served = serve(exporter_of(worked), GPU_EFFICIENCY_DCGM_EXPORTER_COLLECT_INTERVAL_SECONDS="1")
    page = served.until(lambda page: page.total("energy_joules_total") > 300, "a second's worth of energy")
    assert page.states() == {"0": ("active", "computing")}
    assert set(page.by("job_id", "allocation_info")) == {"unknown"}
    assert page.total("seconds_total", leak="idle_allocation") == 0
    assert page.total("energy_joules_total") <= worked.joules
    wait, paid = page.total("seconds_total", layer="ectr"), page.total("paid_seconds_total")
    assert float(wait / paid) == pytest.approx(0.1, abs=0.002)
    assert float(page.total("emfu_ratio")) > 0
    later = served.after(3)
    assert later.total("paid_seconds_total") > paid


def test_a_page_that_stands_still_is_not_believed_for_ever(serve: Serve, exporter_of: Callable[..., Site]) -> None:
    worked, frozen = Worked(), list[tuple[bytes, str]]()
    site = exporter_of(lambda: frozen[0] if frozen else worked())
    served = serve(site, GPU_EFFICIENCY_DCGM_EXPORTER_COLLECT_INTERVAL_SECONDS="1")
    served.until(useful, "believed at first")
    frozen.append(worked())
    page = served.until(lambda page: page.states() == {"0": ("unobserved", "stale")}, "no longer believed")
    assert page.rows("power_watts") == []
    assert page.total("unobserved_seconds_total", reason="stale") > 0
    assert page.total("seconds_total", leak="unobserved") < page.total("paid_seconds_total")


def useful(page: Page) -> Any:
    return page.total("seconds_total", leak="useful")


def test_an_exporter_that_dies_and_comes_back_costs_coverage_and_nothing_else(
    serve: Serve, exporter_of: Callable[..., Site]
) -> None:
    exporter = exporter_of(Worked())
    served = serve(exporter)
    before = served.until(useful, "useful time")
    exporter.stop()
    down = served.until(
        lambda page: page.total("unobserved_seconds_total", reason="source_failed") > 1, "a second unobserved"
    )
    assert served.get("/readyz").status_code == 200
    assert down.states() == {"0": ("unobserved", "source_failed")}
    assert down.rows("power_watts") == []
    assert down.total("reading_age_seconds") > 1
    assert down.total("node_coverage_ratio") < 1
    assert down.total("faults_total", kind="source_failed") > 0
    assert "could not be read" in served.program.log()
    later = served.after(3)
    assert later.total("paid_seconds_total") > down.total("paid_seconds_total") > before.total("paid_seconds_total")
    assert useful(later) == useful(down) >= useful(before)
    exporter.start()
    back = served.until(lambda page: useful(page) > useful(later), "useful time again")
    assert back.states() == {"0": ("active", "computing")}
    assert back.total("reading_age_seconds") < later.total("reading_age_seconds")
    assert float(back.total("power_watts")) == 300.0
    assert useful(back) + back.total("seconds_total", leak="unobserved") < back.total("paid_seconds_total")


def test_where_no_scheduler_is_the_pages_pods_own_its_gpus_at_second_hand(
    serve: Serve, exporter_of: Callable[..., Site]
) -> None:
    worked, pod = Worked(), ['pod="train-0",namespace="ml",container="main"']

    def page() -> tuple[bytes, str]:
        text = worked()[0].decode()
        return re.sub(r'(Hostname="[^"]*")', rf"\g<1>,{pod[0]}" if pod[0] else r"\g<1>", text).encode(), PLAIN

    served = serve(exporter_of(page))
    found = served.until(
        lambda page: page.total("job_paid_seconds_total", job_id="ml/pod/train-0") > 1, "paid by a pod"
    )
    assert found.states() == {"0": ("active", "computing")}
    ((info, _),) = found.rows("job_info")
    assert {name: info[name] for name in ("job_id", "workload_pod", "workload_namespace", "scheduler", "user")} == {
        "job_id": "ml/pod/train-0",
        "workload_pod": "train-0",
        "workload_namespace": "ml",
        "scheduler": "dcgm-exporter",
        "user": "",
    }
    assert served.get("/api/v1/jobs").json()["jobs"][0]["owner"]["scheduler"] == "dcgm-exporter"
    assert found.total("faults_total", kind="scheduler_failed") == 0
    pod[0] = 'pod="next-0",namespace="ml",container="main"'
    served.until(lambda page: set(page.by("job_id", "allocation_info")) == {"ml/pod/next-0"}, "its successor")
    pod[0] = ""
    served.until(lambda page: set(page.by("job_id", "allocation_info")) == {"unknown"}, "a page that tells nothing")


def test_where_a_scheduler_is_set_the_pages_labels_are_ignored(serve: Serve, exporter_of: Callable[..., Site]) -> None:
    worked = Worked()
    exporter = exporter_of(
        lambda: (worked()[0].replace(b"modelName", b'pod="train-0",namespace="ml",modelName'), PLAIN)
    )
    served = serve(exporter, GPU_EFFICIENCY_SCHEDULER="processes")
    page = served.until(useful, "useful time")
    assert set(page.by("job_id", "allocation_info")) == {"unknown"}
