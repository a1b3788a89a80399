"""Replaces the names of users before anything is served, recorded or logged.

Wraps a scheduler so that its allocations and members carry hashed or dropped user names (`privacy.users`), and owns the
key of that hash. Rules and exemptions are applied before, on the true names. Job names are users' own text: only the
owner's user name is replaced in them.
"""

import logging
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from hashlib import blake2b
from pathlib import Path

from msgspec.structs import replace

from exporter.config import ConfigError, PrivacySettings
from exporter.core.model import Allocation, Device, Owner, Reading
from exporter.schedulers.base import Member, Scheduler, SchedulerState
from exporter.schedulers.rules import Rules

log = logging.getLogger(__name__)
SHORTEST_KEY, _LONGEST_KEY = 16, 64
"""Bytes. Of a longer file its hash is the key."""
_FILE_BYTES = 64 * 1024
_DIGEST_BYTES = 6
DROPPED = "user"
"""Stands in texts for a name that is dropped."""
_NAMED_AFTER_USERS = ("processes", "kubernetes")
"""Schedulers of which we make the job's id, with a user's name in it; others' ids are numbers."""
_USER_UNIT = re.compile(r"(?<=\buser[@-])\d+")
"""systemd names a user's own units after the uid."""
_MOST_NAMES = 1024
_SYSTEM_USERS = ("root", "nobody")
"""Left in texts, as are users that are only a number: our own messages have them too."""


class UserMask:
    """People's names as they are shown."""

    def __init__(self, key: bytes, *, drop: bool = False) -> None:
        """`drop`: shown as nobody; in a job's id, where two people must stay two, as a hash."""
        self._key, self._drop = key, drop
        self._names: dict[str, None] = {}
        self._pattern: re.Pattern[str] | None = None
        self.owner = lru_cache(maxsize=_MOST_NAMES)(self._owner)
        """The owner as it is shown."""

    def user(self, name: str) -> str:
        """A user's name as it is shown; nobody stays nobody."""
        return "" if self._drop or not name else self._hash(name)

    def text(self, text: str) -> str:
        """The text without the names of users that have been seen."""
        if not self._names:
            return text
        self._pattern = pattern = self._pattern or _names_pattern(tuple(self._names))
        return pattern.sub(self._replacement, text)

    def _replacement(self, found: re.Match[str]) -> str:
        return DROPPED if self._drop else self._hash(found[0])

    def _hash(self, name: str) -> str:
        return blake2b(name.encode(errors="backslashreplace"), key=self._key, digest_size=_DIGEST_BYTES).hexdigest()

    def _owner(self, owner: Owner) -> Owner:
        if not owner.user:
            return owner
        self._add_name(owner.user)
        own = _names_pattern((owner.user,))
        masked = {name: own.sub(self._replacement, getattr(owner, name)) for name in _FREE_TEXT}
        if owner.scheduler in _NAMED_AFTER_USERS:
            masked["job_id"] = own.sub(lambda _: self._hash(owner.user), owner.job_id)
        if owner.scheduler == "processes":
            masked |= {name: _USER_UNIT.sub(self._hash(owner.user), masked[name]) for name in ("job_id", "name")}
        return replace(owner, user=self.user(owner.user), **masked)

    def _add_name(self, name: str) -> None:
        """Know the name when it stands in a text; of too many the first are forgotten."""
        if name not in self._names and name not in _SYSTEM_USERS and not name.isdecimal():
            self._names[name] = None
            if len(self._names) > _MOST_NAMES:
                del self._names[next(iter(self._names))]
            self._pattern = None


_FREE_TEXT = ("name", "pod", "namespace", "account", "comment")
"""Fields of an owner in which its user's name may stand; the other ones are the site's."""


class MaskedScheduler:
    """A scheduler whose allocations and members name people as `mask` does; else it is that scheduler."""

    def __init__(self, scheduler: Scheduler, mask: UserMask) -> None:
        self._scheduler, self._mask = scheduler, mask
        self.name, self.node = scheduler.name, scheduler.node
        self._masked_jobs: dict[str, str] = {}
        """Job ids of the last poll, as they are shown."""

    def poll(self, now: int, devices: Sequence[Device], readings: Sequence[Reading]) -> SchedulerState | None:
        """See `Scheduler.poll`."""
        state = self._scheduler.poll(now, devices, readings)
        if state is None:
            return None
        masked = [self._masked_allocation(one) for one in state.allocations]
        pairs = zip(state.allocations, masked, strict=True)
        self._masked_jobs = {one.owner.job_id: other.owner.job_id for one, other in pairs}
        return replace(state, allocations=tuple(masked), members=self._masked_members(state.members))

    def members(self, pids: Sequence[int]) -> Mapping[int, Member]:
        """See `Scheduler.members`."""
        return self._masked_members(self._scheduler.members(pids))

    def update(self, rules: Rules) -> None:
        """See `Scheduler.update`: the rules match true names."""
        self._scheduler.update(rules)

    def close(self) -> None:
        """See `Scheduler.close`."""
        self._scheduler.close()

    def _masked_allocation(self, one: Allocation) -> Allocation:
        return replace(one, owner=self._mask.owner(one.owner))

    def _masked_members(self, members: Mapping[int, Member]) -> Mapping[int, Member]:
        return {pid: replace(one, job_id=self._masked_job(one.job_id)) for pid, one in members.items()}

    def _masked_job(self, job_id: str) -> str:
        """As the allocation has it; a job without one is masked as any text."""
        return self._masked_jobs[job_id] if job_id in self._masked_jobs else self._mask.text(job_id)


def open_mask(privacy: PrivacySettings) -> UserMask | None:
    """How people are shown; None: as they are. Raises ConfigError where the secret cannot be used."""
    if privacy.users == "keep":
        return None
    if privacy.users == "drop":
        return UserMask(os.urandom(_LONGEST_KEY), drop=True)
    return UserMask(_read_key(Path(privacy.key_file)))


def _read_key(path: Path) -> bytes:
    where = f"privacy.key_file: {path}"
    try:
        with path.open("rb") as file:
            mode, secret = os.fstat(file.fileno()).st_mode, file.read(_FILE_BYTES).strip()
    except OSError as err:
        raise ConfigError(
            f"{where}: cannot be read: {err.strerror or err}. Make it on one node (`openssl rand -hex 32`), bring the"
            " same to all, and let this daemon's user alone read it"
        ) from err
    if len(secret) < SHORTEST_KEY:
        raise ConfigError(
            f"{where}: holds {len(secret)} bytes, and {SHORTEST_KEY} are the least: whoever guesses the secret can tell"
            " the names. Make it with `openssl rand -hex 32`"
        )
    if mode & 0o007:
        log.warning("%s can be read by everybody on this node, who then can tell the names: chmod 0400", where)
    return secret if len(secret) <= _LONGEST_KEY else blake2b(secret).digest()


def _names_pattern(names: Iterable[str]) -> re.Pattern[str]:
    """Longer names first: of `ada` and `ada-b` the latter is meant where it stands."""
    each = "|".join(re.escape(name) for name in sorted(names, key=len, reverse=True))
    return re.compile(rf"(?<![0-9A-Za-z])(?:{each})(?![0-9A-Za-z])")


def without_paths(readings: tuple[Reading, ...]) -> tuple[Reading, ...]:
    """The readings, processes without their programs' paths: these are often below a user's home."""
    return tuple(
        replace(reading, processes=tuple(replace(process, name="") for process in reading.processes))
        if reading.processes
        else reading
        for reading in readings
    )
