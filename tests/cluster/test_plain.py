"""The command's web app, over real HTTP."""

import gzip
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import httpx
import uvicorn

from exporter.web.metrics_app import create_metrics_app
from exporter.web.server import listen, uvicorn_config

PAGE = "".join(f'gpu_efficiency_cluster_node_state{{node="n{number}",state="idle"}} 1\n' for number in range(100))


@contextmanager
def served(problem: str = "") -> Iterator[httpx.Client]:
    def page(openmetrics: bool) -> bytes:
        return (f"# openmetrics {openmetrics}\n" + PAGE).encode()

    app = create_metrics_app("a cluster", page=page, problem=lambda: problem)
    server = uvicorn.Server(uvicorn_config(app))
    with listen("127.0.0.1", 0) as sock:
        thread = threading.Thread(target=server.run, kwargs={"sockets": [sock]})
        thread.start()
        try:
            url = f"http://127.0.0.1:{sock.getsockname()[1]}"
            with httpx.Client(base_url=url, trust_env=False, timeout=30) as client:
                yield client
        finally:
            server.should_exit = True
            thread.join()


def test_the_page_comes_in_the_form_that_is_wanted() -> None:
    with served() as client:
        plain = client.get("/metrics", headers={"Accept-Encoding": "identity"})
        wanted = client.get("/metrics", headers={"Accept": "application/openmetrics-text; version=1.0.0"})
    assert plain.status_code == 200
    assert plain.headers["content-type"].startswith("text/plain; version=0.0.4")
    assert "# openmetrics False" in plain.text
    assert PAGE in plain.text
    assert "process_resident_memory_bytes" in plain.text
    assert wanted.headers["content-type"].startswith("application/openmetrics-text")
    assert "# openmetrics True" in wanted.text
    assert wanted.text.endswith("# EOF\n")


def test_it_is_compressed_for_whom_can_read_that() -> None:
    with served() as client, client.stream("GET", "/metrics", headers={"Accept-Encoding": "gzip"}) as answer:
        assert answer.headers["content-encoding"] == "gzip"
        assert PAGE.encode() in gzip.decompress(b"".join(answer.iter_raw()))


def test_readiness_says_why_not_and_the_page_stays() -> None:
    with served("slurmctld is silent") as broken:
        assert (broken.get("/readyz").status_code, broken.get("/readyz").text) == (503, "slurmctld is silent\n")
        assert broken.get("/metrics").status_code == 200
        assert broken.get("/healthz").status_code == 200
    with served() as client:
        assert client.get("/readyz").status_code == 200


def test_other_paths() -> None:
    with served() as client:
        assert client.head("/metrics").status_code == 200
        assert "/metrics" in client.get("/").text
        assert client.get("/docs").status_code == 404
        assert client.post("/metrics").status_code == 405
