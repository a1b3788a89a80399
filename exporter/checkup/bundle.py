"""Builds the archive for a bug report: redacts texts, runs journalctl and nvidia-smi, writes it atomically.

Secrets are identified by their place (files and variables) or by their form (keys, tokens, password=...); with a key,
names of people and jobs become hashes. Runs no other program (docs/adr/packaging.md) and overwrites nothing without
--force.
Redaction may miss a secret, so the user is asked to check the archive before sending it.
"""

import gzip
import io
import os
import re
import shutil
import subprocess  # only programs in root's folders, see _run  # nosec B404
import tarfile
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import IO, Any

import msgspec
from msgspec import Struct

from exporter.config import Config
from exporter.core.model import Observation
from exporter.redact import HIDDEN, redact_secrets

_SECRET_PATTERNS = (
    re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)", re.DOTALL),
    re.compile(r"\beyJ[\w-]{8,}\.[\w-]{4,}\.[\w-]*"),  # a JWT: Slurm's, a service account's
    re.compile(r"\$2[abxy]\$\d\d\$[./A-Za-z0-9]{20,}"),  # bcrypt
)
_NAMED_SECRET = re.compile(
    r"(?i)((?<![a-z])[\w.-]{0,40}(?:password|passwd|passphrase|secret|token(?!s)|api[_-]?key|credential|private[_-]?key|jwt)"
    r"[\w.-]{0,40}[\"']?\s{0,4}[=:]\s{0,4})(\"[^\"\n]*\"|'[^'\n]*'|[^\s,;&}\"']+)"
)
"""A name that indicates a secret, and its value: password=..., "token": "..."."""
_PATH_SETTING = re.compile(r"(?i)(?:file|path|dir|url)[\"']?\s*[=:]\s*$")
"""Names of paths and addresses, whose values are not redacted."""
_SHORTEST = 6
"""Fewest characters of a secret from a file or variable that is redacted elsewhere: shorter ones match by chance."""
_FILE_BYTES = 1 << 20
_SECRET_VARIABLES = re.compile(r"(?i)token|secret|password|passwd|jwt|credential|api_?key")


def known_secrets(config: Config, environ: Mapping[str, str]) -> tuple[str, ...]:
    """Secrets in the environment and in files that the configuration names."""
    found: set[str] = set()
    for path in _secret_files(config):
        found |= set(_contents(path))
    for name, value in environ.items():
        if _SECRET_VARIABLES.search(name) and not name.lower().endswith(("_file", "_url")):
            found.add(value)
    return tuple(sorted((secret for secret in found if len(secret) >= _SHORTEST), key=len, reverse=True))


def _secret_files(config: Config) -> Iterator[Path]:
    named = (config.privacy.key_file, config.slurm.restd_token_file, config.kubernetes.token_file)
    yield from (Path(name) for name in named if name)
    if config.web.config_file:
        web = Path(config.web.config_file)
        yield web
        keys = re.findall(r"^\s*key_file:\s*[\"']?([^\"'\s#]+)", _read_text(web), re.MULTILINE)
        yield from (web.parent / key for key in keys)


def _contents(path: Path) -> Iterator[str]:
    """Yield the content and each of its lines, so that a wrapped key is recognised by one line."""
    text = _read_text(path).strip()
    yield text
    lines = [line.strip() for line in text.splitlines()]
    if path.suffix not in (".yml", ".yaml"):
        yield from (line for line in lines if not line.startswith("-----"))
        return
    yield from (line.partition(":")[2].strip(" \"'") for line in lines if "$2" in line)


def _read_text(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return file.read(_FILE_BYTES).decode(errors="replace")
    except OSError:
        return ""


class Redaction:
    """Removes secrets from texts and, with a `key`, replaces registered names by hashes."""

    def __init__(self, secrets: Iterable[str] = (), *, key: bytes = b"") -> None:
        self._secrets, self._key = tuple(secrets), key
        self._names: dict[str, str] = {}
        self._pattern: re.Pattern[str] | None = None

    def register(self, kind: str, *names: str) -> None:
        """Replace these names by kind and hash from now on. Does nothing without a key."""
        for name in names:
            if self._key and len(name) > 1 and name not in _GENERIC_NAMES and name not in self._names:
                digest = blake2b(name.encode(errors="replace"), key=self._key, digest_size=4).hexdigest()
                self._names[name] = f"{kind}-{digest}"
                self._pattern = None

    def name(self, text: str) -> str:
        """The replacement of a registered name, else the name."""
        return self._names.get(text, text)

    def secrets(self, text: str) -> str:
        """The text without secrets."""
        for secret in self._secrets:
            text = text.replace(secret, HIDDEN)
        for pattern in _SECRET_PATTERNS:
            text = pattern.sub(HIDDEN, text)
        text = _NAMED_SECRET.sub(_hidden_value, text)
        return "\n".join(map(redact_secrets, text.split("\n")))

    def text(self, text: str) -> str:
        """The text without secrets and registered names."""
        text = self.secrets(text)
        if self._names:
            self._pattern = self._pattern or _any_of(self._names)
            text = self._pattern.sub(lambda found: self._names[found[0]], text)
        return text

    def tree(self, tree: Any) -> Any:
        """Apply `text` to every string value of a JSON tree; keys are kept."""
        if isinstance(tree, dict):
            return {key: self.tree(value) for key, value in tree.items()}
        if isinstance(tree, list | tuple):
            return [self.tree(value) for value in tree]
        return self.text(tree) if isinstance(tree, str) else tree


def _hidden_value(found: re.Match[str]) -> str:
    if _PATH_SETTING.search(found[1]):
        return found[0]
    quote = found[2][0] if found[2][0] in "\"'" else ""
    return f"{found[1]}{quote}{HIDDEN}{quote}"


def _any_of(names: Iterable[str]) -> re.Pattern[str]:
    each = "|".join(re.escape(name) for name in sorted(names, key=len, reverse=True))
    return re.compile(rf"(?<![0-9A-Za-z])(?:{each})(?![0-9A-Za-z])")


_GENERIC_NAMES = ("root", "nobody", "unknown", "")
_OWNER_FIELDS = {
    "user": "user", "account": "account", "name": "name", "namespace": "namespace", "pod": "pod", "team": "team",
    "comment": "comment", "job_id": "job", "array_id": "job",
    "display_id": "job", "run": "run",
}  # fmt: skip
"""Fields of an owner or report that hold names, and the kind of each name."""
_LABEL_KINDS = _OWNER_FIELDS | {"workload_namespace": "namespace", "workload_pod": "pod", "node": "host"}
_NUMBER = re.compile(r"[\d_+.\[\]-]*")
"""Numeric job ids, as of Slurm, which identify nobody."""
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


def register_observations(redaction: Redaction, observations: Iterable[Observation]) -> None:
    """Register all names of jobs and their owners in a trace."""
    for observation in observations:
        _register_tree(redaction, msgspec.to_builtins(observation))


def _register_tree(redaction: Redaction, tree: Any) -> None:
    if isinstance(tree, list | tuple):
        for value in tree:
            _register_tree(redaction, value)
    elif isinstance(tree, dict):
        for value in tree.values():
            _register_tree(redaction, value)
        for field, kind in _name_fields(tree).items():
            value = tree.get(field, "")
            if isinstance(value, str) and not _NUMBER.fullmatch(value):
                redaction.register(kind, value)


def _name_fields(tree: dict[str, Any]) -> Mapping[str, str]:
    """Fields of this object of a trace that hold names."""
    if "pid" in tree:
        return {"job_id": "job"}
    return _OWNER_FIELDS if "job_id" in tree else {}


def register_page(redaction: Redaction, page: str) -> None:
    """Register all names in the labels of a metrics page."""
    for label, value in _LABEL.findall(page):
        if label in _LABEL_KINDS and not _NUMBER.fullmatch(value):
            redaction.register(_LABEL_KINDS[label], value)


def redacted(observation: Observation, redaction: Redaction, *, anonymous: bool) -> Observation:
    """The observation without secrets and, if `anonymous`, without names."""
    tree = msgspec.to_builtins(observation)
    return msgspec.convert(_redacted_tree(tree, redaction, anonymous=anonymous), Observation)


def _redacted_tree(tree: Any, redaction: Redaction, *, anonymous: bool) -> Any:
    """Replace names in their own fields only: a job may have the name of a value elsewhere."""
    if isinstance(tree, list | tuple):
        return [_redacted_tree(value, redaction, anonymous=anonymous) for value in tree]
    if not isinstance(tree, dict):
        return redaction.secrets(tree) if isinstance(tree, str) else tree
    walked = {key: _redacted_tree(value, redaction, anonymous=anonymous) for key, value in tree.items()}
    return walked | _redacted_fields(tree, redaction) if anonymous else walked


def _redacted_fields(tree: dict[str, Any], redaction: Redaction) -> dict[str, Any]:
    """Fields that hold names, with the names replaced."""
    clean: dict[str, Any] = {}
    if "message" in tree:
        clean["message"] = redaction.text(tree["message"])
    given = {key: tree[key] for key in _name_fields(tree) if isinstance(tree.get(key), str)}
    clean |= {key: redaction.secrets(redaction.name(value)) for key, value in given.items()}
    if "pid" in tree:  # a program's path, often in a home directory
        clean["name"] = ""
    return clean


def redacted_page(page: str, redaction: Redaction) -> str:
    """Redact the labels of a metrics page; help texts have no names."""
    lines = (
        line if line.startswith("#") else _LABEL.sub(lambda f: _redacted_label(f, redaction), line)
        for line in page.split("\n")
    )
    return "\n".join(lines)


def _redacted_label(found: re.Match[str], redaction: Redaction) -> str:
    name, value = found[1], found[2]
    clean = redaction.secrets(redaction.name(value) if name in _LABEL_KINDS else value)
    return f'{name}="{clean}"'


_PRIVATE = 0o600
_SERIAL = re.compile(r"^(\s*(?:[\w ]*Serial(?: Number)?|Name)\s*: ).*$", re.MULTILINE)
"""Lines of `nvidia-smi -q` with serial numbers, or with paths of programs, often in a home directory."""


class BundleFile(Struct, frozen=True):
    """One file of the archive."""

    name: str
    purpose: str
    content: bytes


class OmittedFile(Struct, frozen=True):
    """A file that could not be included, and the reason."""

    name: str
    reason: str


class BundleError(Exception):
    """The archive cannot be written; the message has the path, the reason and what to do."""


def text_file(name: str, purpose: str, text: str, redaction: Redaction) -> BundleFile:
    """A file with the redacted text."""
    return BundleFile(name, purpose, redaction.text(text).encode(errors="replace"))


def compressed(content: bytes) -> bytes:
    """Compress with gzip, without a name or a time."""
    return gzip.compress(content, 6, mtime=0)


def without_serials(text: str) -> str:
    """Remove serial numbers and program names from the output of `nvidia-smi -q`; UUIDs stay, as in traces."""
    return _SERIAL.sub(r"\1***", text)


def refuse_to_overwrite(path: Path, *, force: bool) -> None:
    """Raise BundleError if the archive cannot be written, before a minute is spent on a trace."""
    if not os.access(path.absolute().parent, os.W_OK | os.X_OK):
        raise BundleError(f"{path}: this user may not write in {path.absolute().parent}: name another folder")
    if path.exists() and not force:
        raise BundleError(f"{path}: a file of that name exists: name another, or overwrite it with --force")


def write_bundle(
    path: Path, files: Sequence[BundleFile], omitted: Sequence[OmittedFile], *, head: str, force: bool = False
) -> None:
    """Write the archive with these files and a manifest. Raises BundleError."""
    manifest = BundleFile("MANIFEST.txt", "what this archive holds", _manifest(files, omitted, head).encode())
    folder = path.name.split(".", maxsplit=1)[0] or "bundle"
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        handle = os.open(draft, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_NOFOLLOW, _PRIVATE)
        with os.fdopen(handle, "wb") as raw, tarfile.open(fileobj=raw, mode="w:gz") as archive:
            for file in (manifest, *files):
                archive.addfile(_entry(f"{folder}/{file.name}", file), io.BytesIO(file.content))
        if force:
            draft.replace(path)
        else:
            os.link(draft, path)  # unlike a rename, fails if the file exists by now
    except OSError as err:
        raise BundleError(f"{path}: cannot be written: {err.strerror or err}: name another place") from err
    finally:
        draft.unlink(missing_ok=True)


def _entry(name: str, file: BundleFile) -> tarfile.TarInfo:
    """Header of a file without an owner, readable only for the user who unpacks it."""
    entry = tarfile.TarInfo(name)
    entry.size, entry.mode, entry.mtime = len(file.content), _PRIVATE, int(time.time())
    return entry


def _manifest(files: Sequence[BundleFile], omitted: Sequence[OmittedFile], head: str) -> str:
    lines = [head, "", "In this archive:"]
    lines += [f"  {file.name:<22} {len(file.content):>9,} bytes  {file.purpose}" for file in files]
    if omitted:
        lines += ["", "Not in it:"]
        lines += [f"  {file.name:<22} {file.reason}" for file in omitted]
    return "\n".join(lines) + "\n"


def describe_files(files: Sequence[BundleFile], omitted: Sequence[OmittedFile]) -> str:
    """List the content for the user."""
    lines = [f"  {file.name:<22} {file.purpose}" for file in files]
    lines += [f"  {file.name:<22} is not in it: {file.reason}" for file in omitted]
    return "\n".join(lines)


_PROGRAM_SECONDS = 15.0
MAX_LOG_BYTES = 5 << 20
"""Bytes from the end of a log."""
_FOLDERS = "/usr/bin:/bin:/usr/sbin:/usr/local/bin:/usr/local/nvidia/bin"


class ProgramError(Exception):
    """A program is missing or has failed; the message has the reason."""


def journal(unit: str) -> str:
    """The last hour of a unit's log; raises ProgramError."""
    return _output_of("journalctl", "--unit", unit, "--since", "-1h", "--no-pager", "--output", "short-iso", "--quiet")


def nvidia_smi() -> str:
    """`nvidia-smi -q`; raises ProgramError."""
    return _output_of("nvidia-smi", "-q")


def log_tail(path: Path) -> str:
    """The end of a log file; raises OSError."""
    with path.open("rb") as file:
        return _tail(file)


def _tail(file: IO[bytes]) -> str:
    size = file.seek(0, 2)
    file.seek(max(0, size - MAX_LOG_BYTES))
    return file.read(MAX_LOG_BYTES).decode(errors="replace")


def _output_of(name: str, *arguments: str) -> str:
    path = shutil.which(name, path=_FOLDERS)
    if path is None:
        raise ProgramError(f"{name} is not here")
    with tempfile.TemporaryFile() as out:
        status = _run([path, *arguments], out)
        text = _tail(out)
    if status:
        raise ProgramError(f"{name} failed with status {status}: {' '.join(text.split())[-200:] or 'without output'}")
    return text


def _run(command: Sequence[str], out: IO[bytes]) -> int:
    """Run a program from root's folders with fixed arguments, so that nobody else chooses what is run."""
    try:
        environ = {"PATH": _FOLDERS, "LC_ALL": "C", "TZ": "UTC0"}
        done = subprocess.run(  # nosec B603  # noqa: S603
            command, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT, env=environ,
            timeout=_PROGRAM_SECONDS, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired as err:
        raise ProgramError(f"{command[0]} gave no answer within {_PROGRAM_SECONDS:g} s") from err
    except OSError as err:
        raise ProgramError(f"{command[0]} cannot be started: {err.strerror or err}") from err
    return done.returncode
