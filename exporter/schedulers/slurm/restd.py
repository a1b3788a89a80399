"""The same questions to slurmrestd: one GET each instead of a command.

Owns the connection and the version of its API, found once. Refuses to write, and to list jobs.
Source: Slurm's rest_api.html; tokens per jwt.html. An answer is the same JSON as scontrol's.
"""

import contextlib
from pathlib import Path

import httpx

from exporter.schedulers.slurm.asking import GoneError, job_in
from exporter.schedulers.slurm.commands import SilentError
from exporter.schedulers.slurm.jobs import Job
from exporter.schedulers.slurm.parsing import NodeState
from exporter.schedulers.slurm.parsing_json import parse_node_json
from exporter.wording import without_secrets

VERSIONS = tuple(f"v0.0.{number}" for number in range(44, 37, -1))
"""Of 25.11 down to 22.05; each release speaks three."""
_NOT_FOUND = 404
_UNKNOWN, _NO_NODE = "Invalid job id", "Invalid node name"
_TOKEN_BYTES = 16 * 1024


class Restd:
    """The `Asker` over HTTP."""

    def __init__(self, url: str, *, token_file: str = "", timeout: float = 5.0) -> None:
        """`url` is http(s)://host:port or unix:/path; raises ValueError where it is neither."""
        path = url.removeprefix("unix:")
        if not url.startswith(("http://", "https://", "unix:/")):
            raise ValueError(f"slurm.restd_url: {without_secrets(url)!r} is neither http://host:port nor unix:/path")
        unix = httpx.HTTPTransport(uds=path) if url.startswith("unix:") else None
        self._base = "http://localhost" if unix else url.rstrip("/")
        self._told, self._token_file = without_secrets(url), token_file
        self._client = httpx.Client(transport=unix, timeout=timeout, trust_env=False)
        self._version = ""

    def job(self, job_id: str) -> Job:
        """See Asker."""
        return job_in(self._get(f"job/{job_id}"), job_id)

    def detail(self, _job_id: str) -> Job | None:
        """See Asker: it has told all."""
        return None

    def node(self, name: str) -> NodeState:
        """See Asker."""
        found = [state for state in parse_node_json(self._get(f"node/{name}")) if state.name == name]
        if not found:
            raise ValueError(f"slurmrestd does not know node {name}: set slurm.node_name")
        return found[0]

    def close(self) -> None:
        """See Asker."""
        with contextlib.suppress(Exception):
            self._client.close()

    def _get(self, what: str) -> bytes:
        for version in (self._version,) if self._version else VERSIONS:
            answer = self._fetch(f"/slurm/{version}/{what}")
            if _UNKNOWN in answer.text and not answer.is_success:
                self._version = version
                raise GoneError(what)
            if answer.is_success:
                self._version = version
                return answer.content
            if _NO_NODE in answer.text:
                raise ValueError(f"slurmrestd does not know {what}: set slurm.node_name")
            if answer.status_code != _NOT_FOUND:
                raise SilentError(f"{self._told}: HTTP {answer.status_code} for {what}: {answer.text[:200]!r}")
        raise SilentError(f"{self._told}: speaks none of {VERSIONS[-1]} to {VERSIONS[0]}: is it slurmrestd?")

    def _fetch(self, path: str) -> httpx.Response:
        try:
            return self._client.get(self._base + path, headers=self._headers())
        except (httpx.HTTPError, httpx.InvalidURL, RuntimeError) as err:
            raise SilentError(
                f"{self._told}: {without_secrets(str(err)) or type(err).__name__}: is slurmrestd up?"
            ) from err

    def _headers(self) -> dict[str, str]:
        """Read the token each time: tokens are renewed."""
        if not self._token_file:
            return {}
        try:
            with Path(self._token_file).open(encoding="ascii") as file:
                return {"X-SLURM-USER-TOKEN": file.read(_TOKEN_BYTES).strip()}
        except (OSError, UnicodeDecodeError) as err:
            raise SilentError(f"slurm.restd_token_file: {self._token_file}: cannot be read: {err}") from err
