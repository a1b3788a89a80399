"""What may not leave the node: secrets always, names of people and jobs where that is asked for.

Owns the finding of both in texts. A secret is known by its place (the files and variables that hold one) or by its
look (a key, a token, a password after its name); what is known is taken out wherever it stands. Refuses to promise
more: a person is asked to read the bundle before sending it.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from hashlib import blake2b
from pathlib import Path
from typing import Any

import msgspec

from exporter.config import Config
from exporter.core.model import Observation
from exporter.wording import HIDDEN, without_secrets

_LOOKS = (
    re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)", re.DOTALL),
    re.compile(r"\beyJ[\w-]{8,}\.[\w-]{4,}\.[\w-]*"),  # a JWT: Slurm's, a service account's
    re.compile(r"\$2[abxy]\$\d\d\$[./A-Za-z0-9]{20,}"),  # bcrypt
)
_NAMED = re.compile(
    r"(?i)((?<![a-z])[\w.-]{0,40}(?:password|passwd|passphrase|secret|token(?!s)|api[_-]?key|credential|private[_-]?key|jwt)"
    r"[\w.-]{0,40}[\"']?\s{0,4}[=:]\s{0,4})(\"[^\"\n]*\"|'[^'\n]*'|[^\s,;&}\"']+)"
)
"""A name that says secret, and its value: password=..., "token": "..."."""
_NO_SECRET = re.compile(r"(?i)(?:file|path|dir|url)[\"']?\s*[=:]\s*$")
"""Names of places, which are told."""
_SHORTEST = 6
"""Characters of a secret known by its place that is looked for elsewhere: shorter ones stand in every text."""
_FILE_BYTES = 1 << 20
_SECRET_VARIABLES = re.compile(r"(?i)token|secret|password|passwd|jwt|credential|api_?key")


def known_secrets(config: Config, environ: Mapping[str, str]) -> tuple[str, ...]:
    """Secrets of this node that the configuration and the environment lead to."""
    found: set[str] = set()
    for path in _secret_files(config):
        found |= set(_contents(path))
    for name, value in environ.items():
        if _SECRET_VARIABLES.search(name) and not name.lower().endswith(("_file", "_url")):
            found.add(value)
    return tuple(sorted((one for one in found if len(one) >= _SHORTEST), key=len, reverse=True))


def _secret_files(config: Config) -> Iterator[Path]:
    named = (config.privacy.key_file, config.slurm.restd_token_file, config.kubernetes.token_file)
    yield from (Path(name) for name in named if name)
    if config.web.config_file:
        web = Path(config.web.config_file)
        yield web
        keys = re.findall(r"^\s*key_file:\s*[\"']?([^\"'\s#]+)", _text(web), re.MULTILINE)
        yield from (web.parent / key for key in keys)


def _contents(path: Path) -> Iterator[str]:
    """The whole, and each of its lines: of a key that is folded, a line is enough to look for."""
    text = _text(path).strip()
    yield text
    lines = [line.strip() for line in text.splitlines()]
    if path.suffix not in (".yml", ".yaml"):
        yield from (line for line in lines if not line.startswith("-----"))
        return
    yield from (line.partition(":")[2].strip(" \"'") for line in lines if "$2" in line)


def _text(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return file.read(_FILE_BYTES).decode(errors="replace")
    except OSError:
        return ""


class Redaction:
    """Takes secrets out of texts, and where there is a `key`, the names that it has met."""

    def __init__(self, secrets: Iterable[str] = (), *, key: bytes = b"") -> None:
        self._secrets, self._key = tuple(secrets), key
        self._names: dict[str, str] = {}
        self._pattern: re.Pattern[str] | None = None

    def meet(self, kind: str, *names: str) -> None:
        """Know these names: from now on each is told as its kind and a hash. Without a key they stay."""
        for name in names:
            if self._key and len(name) > 1 and name not in _NOBODY and name not in self._names:
                digest = blake2b(name.encode(errors="replace"), key=self._key, digest_size=4).hexdigest()
                self._names[name] = f"{kind}-{digest}"
                self._pattern = None

    def name(self, text: str) -> str:
        """A name as it is told."""
        return self._names.get(text, text)

    def secrets(self, text: str) -> str:
        """A text without secrets."""
        for secret in self._secrets:
            text = text.replace(secret, HIDDEN)
        for look in _LOOKS:
            text = look.sub(HIDDEN, text)
        text = _NAMED.sub(_hidden, text)
        return "\n".join(map(without_secrets, text.split("\n")))

    def text(self, text: str) -> str:
        """A text without secrets and without the names met."""
        text = self.secrets(text)
        if self._names:
            self._pattern = self._pattern or _any_of(self._names)
            text = self._pattern.sub(lambda found: self._names[found[0]], text)
        return text

    def tree(self, tree: Any) -> Any:
        """The same for every string value of a JSON tree; keys stay."""
        if isinstance(tree, dict):
            return {key: self.tree(value) for key, value in tree.items()}
        if isinstance(tree, list | tuple):
            return [self.tree(value) for value in tree]
        return self.text(tree) if isinstance(tree, str) else tree


def _hidden(found: re.Match[str]) -> str:
    if _NO_SECRET.search(found[1]):
        return found[0]
    quote = found[2][0] if found[2][0] in "\"'" else ""
    return f"{found[1]}{quote}{HIDDEN}{quote}"


def _any_of(names: Iterable[str]) -> re.Pattern[str]:
    each = "|".join(re.escape(name) for name in sorted(names, key=len, reverse=True))
    return re.compile(rf"(?<![0-9A-Za-z])(?:{each})(?![0-9A-Za-z])")


_NOBODY = ("root", "nobody", "unknown", "")
_OF_OWNER = {
    "user": "user", "account": "account", "name": "name", "namespace": "namespace", "pod": "pod", "team": "team",
    "comment": "comment", "job_id": "job", "array_id": "job", "run": "run",
}  # fmt: skip
"""Fields of whatever names a job, and what kind of name each is."""
_OF_LABELS = _OF_OWNER | {"workload_namespace": "namespace", "workload_pod": "pod", "node": "host"}
_NUMBER = re.compile(r"[\d_+.\[\]-]*")
"""Job ids of Slurm: they say nothing of anybody."""
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


def met_in(redaction: Redaction, observations: Iterable[Observation]) -> None:
    """Have all names known that stand in a trace: of jobs and their owners, wherever somebody speaks of one."""
    for observation in observations:
        _meet(redaction, msgspec.to_builtins(observation))


def _meet(redaction: Redaction, tree: Any) -> None:
    if isinstance(tree, list | tuple):
        for value in tree:
            _meet(redaction, value)
    elif isinstance(tree, dict):
        for value in tree.values():
            _meet(redaction, value)
        for field, kind in _of(tree).items():
            value = tree.get(field, "")
            if isinstance(value, str) and not _NUMBER.fullmatch(value):
                redaction.meet(kind, value)


def _of(tree: dict[str, Any]) -> Mapping[str, str]:
    """Fields of this part of a trace that name somebody."""
    if "pid" in tree:
        return {"job_id": "job"}
    return _OF_OWNER if "job_id" in tree else {}


def met_on(redaction: Redaction, page: str) -> None:
    """Have all names known that stand on a page of metrics."""
    for label, value in _LABEL.findall(page):
        if label in _OF_LABELS and not _NUMBER.fullmatch(value):
            redaction.meet(_OF_LABELS[label], value)


def redacted(observation: Observation, redaction: Redaction, *, anonymous: bool) -> Observation:
    """The observation without secrets, and without names where it is to be anonymous."""
    tree = msgspec.to_builtins(observation)
    return msgspec.convert(_walk(tree, redaction, anonymous=anonymous), Observation)


def _walk(tree: Any, redaction: Redaction, *, anonymous: bool) -> Any:
    """Names are told field by field: a job called like a word of ours must not take that word with it."""
    if isinstance(tree, list | tuple):
        return [_walk(value, redaction, anonymous=anonymous) for value in tree]
    if not isinstance(tree, dict):
        return redaction.secrets(tree) if isinstance(tree, str) else tree
    walked = {key: _walk(value, redaction, anonymous=anonymous) for key, value in tree.items()}
    return walked | _named(tree, redaction) if anonymous else walked


def _named(tree: dict[str, Any], redaction: Redaction) -> dict[str, Any]:
    """Fields that name somebody, told otherwise."""
    told: dict[str, Any] = {}
    if "message" in tree:
        told["message"] = redaction.text(tree["message"])
    given = {key: tree[key] for key in _of(tree) if isinstance(tree.get(key), str)}
    told |= {key: redaction.secrets(redaction.name(value)) for key, value in given.items()}
    if "pid" in tree:  # a program's path, often below somebody's home
        told["name"] = ""
    return told


def redacted_page(page: str, redaction: Redaction) -> str:
    """A page of metrics, label by label; help texts are ours."""
    lines = (
        line if line.startswith("#") else _LABEL.sub(lambda f: _label(f, redaction), line) for line in page.split("\n")
    )
    return "\n".join(lines)


def _label(found: re.Match[str], redaction: Redaction) -> str:
    name, value = found[1], found[2]
    told = redaction.secrets(redaction.name(value) if name in _OF_LABELS else value)
    return f'{name}="{told}"'
