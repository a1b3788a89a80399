"""Replaces user names before anything is served, recorded or logged.

Wraps a scheduler so that its allocations and members carry hashed or dropped user names (`privacy.users`), and owns
the key of that hash. Rules and exemptions match the true names. Job names are free text: only the owner's user name
is replaced in them.
"""

import logging
import os
import re
import threading
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from hashlib import blake2b
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from exporter.config import ConfigError, PrivacySettings
from exporter.core.model import Device, Owner, Reading
from exporter.schedulers.base import Member, Scheduler, SchedulerState
from exporter.schedulers.rules import Rules

log = logging.getLogger(__name__)
SHORTEST_KEY, _LONGEST_KEY = 16, 64
"""Bytes. A longer key file is hashed to give the key."""
_FILE_BYTES = 64 * 1024
_DIGEST_BYTES = 6
DROPPED = "user"
"""Replaces a dropped user name in texts."""
_NAMED_AFTER_USERS = ("processes", "kubernetes")
"""Schedulers whose job ids contain a user name; the ids of other schedulers are numbers."""
_USER_UNIT = re.compile(r"(?<=\buser[@-])\d+")
"""The uid in the name of a systemd user unit."""
_MOST_NAMES = 1024
_SYSTEM_USERS = ("root", "nobody")
"""Not replaced in texts, because our own messages contain them; nor are all-digit user names."""


class UserMask:
    """Masks user names: hashes them with a key, or drops them."""

    def __init__(self, key: bytes | None, *, drop: bool = False) -> None:
        """With `drop`, user names become empty; in job ids they are hashed, so that two users' jobs stay distinct.

        Without a key the hashes are those of this process alone.
        """
        self._key, self.has_key, self._drop = key or os.urandom(_LONGEST_KEY), key is not None, drop
        self._names: dict[str, None] = {}
        self._pods: dict[tuple[str, str, str], tuple[str, str]] = {}
        """True namespace and name by what is shown: the job's id, namespace and pod."""
        self._pattern: re.Pattern[str] | None = None
        self._lock = threading.Lock()
        """Of names and pattern: texts of the log are masked on every thread."""
        self._masked_owner = lru_cache(maxsize=_MOST_NAMES)(self._mask_owner)

    def owner(self, owner: Owner) -> Owner:
        """Return the owner with its user name masked."""
        if not owner.user:
            return owner
        self._add_name(owner.user)
        return self._masked_owner(owner)

    def user(self, name: str) -> str:
        """Return the masked user name; empty stays empty."""
        return "" if self._drop or not name else self._hash(name)

    def pod(self, masked: Owner) -> tuple[str, str]:
        """Return the true namespace and name of a masked owner's pod; empty if this process never saw it.

        They are for the address of a request: kept in memory alone, and neither served, recorded nor logged. An owner
        without a user name is not masked, unless a run of the daemon before this one dropped the name.
        """
        known = self._pods.get((masked.job_id, masked.namespace, masked.pod))
        if known is not None:
            return known
        may_be_masked = masked.user or self._drop or _MAYBE_DROPPED.search(f"{masked.namespace}/{masked.pod}")
        return ("", "") if may_be_masked else (masked.namespace, masked.pod)

    def add_pod(self, owner: Owner, masked: Owner) -> None:
        """Remember the pod of a masked owner; beyond _MOST_NAMES the one that held a GPU least recently goes."""
        shown = masked.job_id, masked.namespace, masked.pod
        self._pods.pop(shown, None)
        self._pods[shown] = owner.namespace, owner.pod
        if len(self._pods) > _MOST_NAMES:
            del self._pods[next(iter(self._pods))]

    def text(self, text: str) -> str:
        """Return the text with all user names seen so far masked."""
        with self._lock:
            if not self._names:
                return text
            self._pattern = pattern = self._pattern or _names_pattern(self._names)
        return pattern.sub(self._replacement, text)

    def _replacement(self, found: re.Match[str]) -> str:
        return DROPPED if self._drop else self._hash(found[0])

    def _hash(self, name: str) -> str:
        return blake2b(name.encode(errors="backslashreplace"), key=self._key, digest_size=_DIGEST_BYTES).hexdigest()

    def _mask_owner(self, owner: Owner) -> Owner:
        own = _names_pattern((owner.user,))
        masked: dict[str, Any] = {name: own.sub(self._replacement, getattr(owner, name)) for name in _FREE_TEXT}
        masked["labels"] = tuple((key, own.sub(self._replacement, value)) for key, value in owner.labels)
        if owner.scheduler in _NAMED_AFTER_USERS:
            masked["job_id"] = own.sub(lambda _: self._hash(owner.user), owner.job_id)
        if owner.scheduler == "processes":
            masked |= {name: _USER_UNIT.sub(self._hash(owner.user), masked[name]) for name in ("job_id", "name")}
        return replace(owner, user=self.user(owner.user), **masked)

    def _add_name(self, name: str) -> None:
        """Register a name to be masked in texts; beyond _MOST_NAMES the one seen least recently is forgotten."""
        if name in _SYSTEM_USERS or name.isdecimal():
            return
        with self._lock:
            if name not in self._names:
                self._pattern = None
            self._names.pop(name, None)
            self._names[name] = None
            if len(self._names) > _MOST_NAMES:
                del self._names[next(iter(self._names))]


_FREE_TEXT = ("name", "pod", "namespace", "account", "comment")
"""Fields of an owner that may contain its user's name; the site controls the others."""


class MaskedScheduler:
    """Wraps a scheduler and masks the user names in its allocations and members."""

    def __init__(self, scheduler: Scheduler, mask: UserMask) -> None:
        self._scheduler, self._mask = scheduler, mask
        self.name, self.node = scheduler.name, scheduler.node
        if self.name == "kubernetes" and not mask.has_key:
            log.warning(
                'privacy.users = "drop" without privacy.key_file: a job that is named after its user has another id on'
                " each node and after each restart; see docs/security.md"
            )
        self._masked_jobs: dict[str, str] = {}
        """Masked job ids of the last poll, by true id."""

    def poll(self, now: int, devices: Sequence[Device], readings: Sequence[Reading]) -> SchedulerState | None:
        """See `Scheduler.poll`."""
        state = self._scheduler.poll(now, devices, readings)
        if state is None:
            return None
        masked = [replace(one, owner=self._mask.owner(one.owner)) for one in state.allocations]
        pairs = zip(state.allocations, masked, strict=True)
        self._masked_jobs = {}
        for one, other in pairs:
            self._masked_jobs[one.owner.job_id] = other.owner.job_id
            if one.owner.pod:
                self._mask.add_pod(one.owner, other.owner)
        return replace(state, allocations=tuple(masked), members=self._masked_members(state.members))

    def members(self, pids: Sequence[int]) -> Mapping[int, Member]:
        """See `Scheduler.members`."""
        return self._masked_members(self._scheduler.members(pids))

    def update(self, rules: Rules) -> None:
        """See `Scheduler.update`: the rules match the true names."""
        self._scheduler.update(rules)

    def close(self) -> None:
        """See `Scheduler.close`."""
        self._scheduler.close()

    def _masked_members(self, members: Mapping[int, Member]) -> Mapping[int, Member]:
        return {pid: replace(one, job_id=self._masked_job(one.job_id)) for pid, one in members.items()}

    def _masked_job(self, job_id: str) -> str:
        """Return the job id as its allocation has it; without an allocation it is masked like any text."""
        return self._masked_jobs[job_id] if job_id in self._masked_jobs else self._mask.text(job_id)


def open_mask(privacy: PrivacySettings) -> UserMask | None:
    """Return the configured mask; None when names are kept. Raises ConfigError if the key file cannot be used."""
    if privacy.users == "keep":
        return None
    return UserMask(_read_key(Path(privacy.key_file)) if privacy.key_file else None, drop=privacy.users == "drop")


def _read_key(path: Path) -> bytes:
    where = f"privacy.key_file: {path}"
    try:
        with path.open("rb") as file:
            mode, secret = os.fstat(file.fileno()).st_mode, file.read(_FILE_BYTES).strip()
    except OSError as err:
        raise ConfigError(
            f"{where}: cannot be read: {err.strerror or err}. Make it on one node (`openssl rand -hex 32`), copy"
            " it to all nodes, and let only this daemon's user read it"
        ) from err
    if len(secret) < SHORTEST_KEY:
        raise ConfigError(
            f"{where}: holds {len(secret)} bytes, and {SHORTEST_KEY} are the least: whoever guesses the secret can"
            " reveal the names. Make it with `openssl rand -hex 32`"
        )
    if mode & 0o007:
        log.warning("%s is readable by all users of this node, who can then reveal the names: chmod 0400", where)
    return secret if len(secret) <= _LONGEST_KEY else blake2b(secret).digest()


def _names_pattern(names: Iterable[str]) -> re.Pattern[str]:
    """Match any of the names as a whole word; longer names first, so that `ada-b` is not taken for `ada`."""
    each = "|".join(re.escape(name) for name in sorted(names, key=len, reverse=True))
    return re.compile(rf"(?<![0-9A-Za-z])(?:{each})(?![0-9A-Za-z])")


_MAYBE_DROPPED = _names_pattern((DROPPED,))
"""What a dropped name may have been replaced by."""


def without_paths(readings: tuple[Reading, ...]) -> tuple[Reading, ...]:
    """Return the readings without process paths, which often contain a user's home directory."""
    return tuple(
        replace(reading, processes=tuple(replace(process, name="") for process in reading.processes))
        if reading.processes
        else reading
        for reading in readings
    )
