"""Queries slurmrestd instead of running commands: one GET per query.

Detects the API version at the first query, and again after an upgrade of slurmrestd; never writes and never lists jobs.
Imported only when configured, because of its HTTP client's memory. Source: Slurm's rest_api.html and jwt.html. The JSON
is the same as scontrol's.
"""

import contextlib
from http import HTTPStatus
from pathlib import Path

import httpx

from exporter.redact import redact_secrets
from exporter.schedulers.slurm.client import SlurmUnavailableError, UnknownJobError, job_in, node_in
from exporter.schedulers.slurm.parsing import NodeState, SlurmJob, parse_node_json

VERSIONS = tuple(f"v0.0.{number}" for number in range(45, 37, -1))
"""Of 26.05 down to 22.05; each release supports three."""
_INVALID_JOB, _INVALID_NODE = "Invalid job id", "Invalid node name"
_NODE_FAILURE = "Failure to query node"
"""Description of any failure of a query for one node in 24.11 and 26.05: that the node does not exist among others."""
_TOKEN_BYTES = 16 * 1024


class RestClient:
    """The `SlurmClient` over HTTP."""

    def __init__(self, url: str, *, token_file: str = "", timeout: float = 5.0) -> None:
        """`url` is http(s)://host:port or unix:/path. Raises ValueError for any other."""
        path = url.removeprefix("unix:")
        if not url.startswith(("http://", "https://", "unix:/")):
            raise ValueError(f"slurm.restd_url: {redact_secrets(url)!r} is neither http://host:port nor unix:/path")
        unix = httpx.HTTPTransport(uds=path) if url.startswith("unix:") else None
        self._base = "http://localhost" if unix else url.rstrip("/")
        self._label, self._token_file = redact_secrets(url), token_file
        self._client = httpx.Client(transport=unix, timeout=timeout, trust_env=False)
        self._version = ""

    def job(self, job_id: str) -> SlurmJob:
        """See SlurmClient."""
        return job_in(self._get(f"job/{job_id}"), job_id)

    def detail(self, _job_id: str) -> SlurmJob | None:
        """See SlurmClient: `job` returns all there is."""
        return None

    def node(self, name: str) -> NodeState:
        """See SlurmClient."""
        return node_in(parse_node_json(self._get(f"node/{name}")), name, source="slurmrestd")

    def close(self) -> None:
        """See SlurmClient."""
        with contextlib.suppress(Exception):
            self._client.close()

    def _get(self, resource: str) -> bytes:
        for version in sorted(VERSIONS, key=lambda each: each != self._version):  # the last one that worked comes first
            response = self._fetch(f"/slurm/{version}/{resource}")
            if _INVALID_JOB in response.text and not response.is_success:
                self._version = version
                raise UnknownJobError(resource)
            if response.is_success:
                self._version = version
                return response.content
            if _INVALID_NODE in response.text:
                raise ValueError(f"slurmrestd does not know {resource}: set slurm.node_name")
            if response.status_code != HTTPStatus.NOT_FOUND:
                hint = ". If there is no such node, set slurm.node_name" if _NODE_FAILURE in response.text else ""
                raise SlurmUnavailableError(
                    f"{self._label}: HTTP {response.status_code} for {resource}: {response.text[:200]!r}{hint}"
                )
        raise SlurmUnavailableError(
            f"{self._label}: supports none of {VERSIONS[-1]} to {VERSIONS[0]}: is it slurmrestd?"
        )

    def _fetch(self, path: str) -> httpx.Response:
        try:
            return self._client.get(self._base + path, headers=self._headers())
        except (httpx.HTTPError, httpx.InvalidURL, RuntimeError) as err:
            raise SlurmUnavailableError(
                f"{self._label}: {redact_secrets(str(err)) or type(err).__name__}: is slurmrestd up?"
            ) from err

    def _headers(self) -> dict[str, str]:
        """Return the token's header; read each time, because tokens are renewed."""
        if not self._token_file:
            return {}
        try:
            with Path(self._token_file).open(encoding="ascii") as file:
                return {"X-SLURM-USER-TOKEN": file.read(_TOKEN_BYTES).strip()}
        except (OSError, UnicodeDecodeError) as err:
            raise SlurmUnavailableError(f"slurm.restd_token_file: {self._token_file}: cannot be read: {err}") from err
