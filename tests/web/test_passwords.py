"""Tests passwords: verification, the cache, and rate limits on guesses."""

import asyncio
import os
import threading
from base64 import b64encode
from collections.abc import Callable

import bcrypt
import pytest
from msgspec import Struct

from exporter.web import security as module
from exporter.web.security import PasswordChecker, parse_credentials

WORDS = {"ada": b"right", "bob": b"x" * 90, "eve": "pässword".encode()}
HASHES = {name: bcrypt.hashpw(word[:72], bcrypt.gensalt(4)).decode() for name, word in WORDS.items()}


def basic(name: str, word: bytes) -> str:
    return "Basic " + b64encode(name.encode() + b":" + word).decode()


class Clock(Struct):
    """No time passes but what a test lets pass: on a busy machine seconds would, and with them comes leave to guess."""

    now: float = 1000.0
    used: float = 0.0
    """Processor seconds."""

    def monotonic(self) -> float:
        return self.now

    def thread_time(self) -> float:
        return self.used


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    return clock


@pytest.fixture
def hash_takes(monkeypatch: pytest.MonkeyPatch, clock: Clock) -> Callable[[float], list[bytes]]:
    """Let every hash take so many processor seconds, by the clock; returns the passwords that are hashed, in order."""

    def takes(seconds: float) -> list[bytes]:
        hashed: list[bytes] = []

        def matches(word: bytes, _known: bytes) -> bool:
            clock.used += seconds
            clock.now += seconds
            hashed.append(word)
            return word == b"right"

        monkeypatch.setattr(module, "_matches", matches)
        return hashed

    return takes


@pytest.fixture
def looked_at(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """Record the hashes that were computed; in production each takes a tenth of a second."""
    seen: list[bytes] = []
    real = module._matches

    def counted(word: bytes, known: bytes) -> bool:
        seen.append(known)
        return real(word, known)

    monkeypatch.setattr(module, "_matches", counted)
    return seen


def ask(users: PasswordChecker, *tries: tuple[str, bytes], address: str = "10.0.0.1") -> list[str]:
    async def all_of() -> list[str]:
        return [await users.verdict(basic(*one), address) for one in tries]

    return asyncio.run(all_of())


@pytest.mark.parametrize(("name", "word"), WORDS.items())
def test_who_knows_the_word_is_let_in(name: str, word: bytes) -> None:
    assert ask(PasswordChecker(HASHES), (name, word), (name, word + b"!"), (name, b""))[0] == "yes"


@pytest.mark.parametrize("kind", ["2a", "2b", "2y"])
def test_hashes_of_every_tool(kind: str) -> None:
    users = PasswordChecker({"ada": HASHES["ada"].replace("$2b$", f"${kind}$")})
    assert ask(users, ("ada", b"right"), ("ada", b"wrong")) == ["yes", "no"]


@pytest.mark.parametrize("word", [b"wrong", b"", b"right\0", b"righ", b"right ", b"\xff"])
def test_others_are_not(word: bytes) -> None:
    assert ask(PasswordChecker(HASHES), ("ada", word)) == ["no"]


@pytest.mark.parametrize(
    "header",
    [
        None,
        "",
        "Basic",
        "Basic !",
        "Basic YWRh",
        "Bearer " + b64encode(b"ada:right").decode(),
        "Basic \xe4",
        "Basic YWRhOnI",
    ],
)
def test_what_is_no_name_and_password(header: str | None) -> None:
    assert parse_credentials(header) is None


def test_a_word_may_hold_colons_and_the_scheme_any_case() -> None:
    assert parse_credentials("bAsIc  " + b64encode(b"ada:a:b").decode()) == ("ada", b"a:b")


def test_a_right_word_is_remembered_and_a_wrong_one_is_not(looked_at: list[bytes]) -> None:
    users = PasswordChecker(HASHES)
    assert ask(users, *[("ada", b"right")] * 50) == ["yes"] * 50
    assert len(looked_at) == 1
    assert ask(users, ("ada", b"wrong"), ("ada", b"wrong"), ("ada", b"right")) == ["no", "no", "yes"]
    assert len(looked_at) == 3
    assert not any(word in repr(vars(users)).encode() for word in (b"right", b"wrong"))


def test_the_next_version_of_the_file_remembers_nothing(looked_at: list[bytes]) -> None:
    assert ask(PasswordChecker(HASHES), ("ada", b"right")) == ["yes"] == ask(PasswordChecker(HASHES), ("ada", b"right"))
    assert len(looked_at) == 2


def test_hashing_gives_way_to_scrapes_on_the_same_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    priorities: list[int] = []

    def hashed(_word: bytes, _known: bytes) -> bool:
        priorities.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))
        return True

    monkeypatch.setattr(module, "_matches", hashed)
    assert ask(PasswordChecker(HASHES), ("ada", b"right"), ("eve", b"right")) == ["yes", "yes"]
    assert priorities == [min(os.getpriority(os.PRIO_PROCESS, 0) + 10, 19)] * 2


def test_one_s_word_is_not_another_s() -> None:
    assert ask(PasswordChecker(HASHES), ("ada", b"right"), ("eve", b"right"), ("bob", b"right")) == ["yes", "no", "no"]


def test_nobody_s_name_costs_what_somebody_s_does(looked_at: list[bytes]) -> None:
    users = PasswordChecker({"ada": HASHES["ada"].replace("$04$", "$06$"), "eve": HASHES["eve"]})
    assert ask(users, ("nobody", b"right")) == ["no"]
    (decoy,) = looked_at
    assert decoy.startswith(b"$2b$06$")
    assert bcrypt.checkpw(b"anything", decoy) is False


def test_guessing_is_slowed_for_its_address_and_not_for_others(looked_at: list[bytes]) -> None:
    users = PasswordChecker(HASHES)
    assert ask(users, *[("ada", b"wrong")] * 9) == ["no"] * 5 + ["later"] * 4
    assert len(looked_at) == 5
    assert ask(users, ("ada", b"right")) == ["later"]
    assert ask(users, ("ada", b"right"), address="10.0.0.2") == ["yes"]
    assert ask(users, ("ada", b"right")) == ["yes"], "it is known by now"


def test_guessing_names_is_slowed_as_guessing_passwords_is() -> None:
    assert ask(PasswordChecker(HASHES), *[("nobody", b"wrong")] * 9) == ["no"] * 5 + ["later"] * 4


COSTS = pytest.mark.parametrize("seconds", [0.07, 0.3, 1.0])
"""Of processor time, that a hash takes: about bcrypt's cost 10, 12 and 14."""


@COSTS
def test_guesses_take_a_fifth_of_a_processor_whatever_a_hash_costs(
    seconds: float, clock: Clock, hash_takes: Callable[[float], list[bytes]]
) -> None:
    """Twenty addresses go on and others come, each for one guess, in the five minutes beyond what may be at once."""
    users, hashed = PasswordChecker(HASHES), hash_takes(seconds)
    began = clock.now

    async def all_of() -> None:
        tries = 0
        while clock.now < began + 300:
            tries += 1
            await users.verdict(basic("ada", b"wrong"), f"10.0.0.{tries % 20}")
            await users.verdict(basic("ada", b"wrong"), f"10.1.{tries // 250}.{tries % 250}")
            clock.now += 0.2

    asyncio.run(all_of())
    at_once = module._GUESSING_AT_ONCE + module._FIRST_AT_ONCE
    spent, allowed = len(hashed) * seconds, 2 * module._SHARE * (clock.now - began)
    assert allowed - 2 * seconds <= spent <= allowed + at_once + 2 * seconds


@pytest.mark.parametrize("seconds", [0.3, 1.0])
def test_guesses_take_nothing_from_a_first_login(
    seconds: float, clock: Clock, hash_takes: Callable[[float], list[bytes]]
) -> None:
    """Guesses of three addresses have used up what guesses may: a check for an address without failures has its own."""
    users, hashed = PasswordChecker(HASHES), hash_takes(seconds)
    for number in range(15):
        ask(users, ("ada", b"wrong"), address=f"10.0.0.{number % 3}")
    assert users._overall[True].available(clock.now) <= 0
    assert ask(users, ("ada", b"right"), address="10.0.1.1") == ["yes"]
    assert hashed[-1] == b"right"


def test_a_first_login_is_checked_whoever_guesses(clock: Clock, hash_takes: Callable[[float], list[bytes]]) -> None:
    """Where more new addresses fail than may at once, a first login waits until there is time for one again."""
    users = PasswordChecker(HASHES)
    hash_takes(1.0)
    for host in range(20):
        ask(users, ("ada", b"wrong"), address=f"10.0.0.{host}")
    assert ask(users, ("ada", b"right"), address="10.0.1.1") == ["later"]
    clock.now += 1 / module._SHARE
    assert ask(users, ("ada", b"right"), address="10.0.1.1") == ["yes"]


def test_a_first_login_waits_for_one_guess_at_most(hash_takes: Callable[[float], list[bytes]]) -> None:
    users, hashed = PasswordChecker(HASHES), hash_takes(0.07)
    for host in range(8):
        ask(users, ("ada", b"wrong"), address=f"10.0.0.{host}")
    hashed.clear()

    async def together() -> list[str]:
        guesses = [users.verdict(basic("ada", b"guess"), f"10.0.0.{host}") for host in range(8)]
        return await asyncio.gather(*guesses, users.verdict(basic("ada", b"right"), "10.0.1.1"))

    assert asyncio.run(together()) == ["no"] * 8 + ["yes"]
    assert hashed.index(b"right") <= 1


def test_guesses_that_came_before_the_first_of_them_failed_wait_as_guesses(
    hash_takes: Callable[[float], list[bytes]],
) -> None:
    users, hashed = PasswordChecker(HASHES), hash_takes(0.07)

    async def together() -> list[str]:
        guesses = [users.verdict(basic("ada", b"guess"), "10.0.0.1") for _ in range(5)]
        return await asyncio.gather(*guesses, users.verdict(basic("ada", b"right"), "10.0.0.2"))

    assert asyncio.run(together())[-1] == "yes"
    assert hashed.index(b"right") <= 2


def test_guesses_that_wait_leave_room_for_a_first_login() -> None:
    users = PasswordChecker(HASHES)
    ask(users, ("ada", b"wrong"), address="10.0.0.1")

    async def together() -> list[str]:
        guesses = [users.verdict(basic("ada", b"wrong"), "10.0.0.1") for _ in range(40)]
        return await asyncio.gather(*guesses, users.verdict(basic("ada", b"right"), "10.0.0.2"))

    assert asyncio.run(together())[-1] == "yes"


def test_a_probe_costs_no_hash(looked_at: list[bytes]) -> None:
    users = PasswordChecker(HASHES)
    assert not users.knows(basic("ada", b"right"))
    assert not users.knows(None)
    assert looked_at == []
    ask(users, ("ada", b"right"))
    assert users.knows(basic("ada", b"right"))
    assert not users.knows(basic("ada", b"wrong"))


def test_right_words_are_not_counted_as_guesses() -> None:
    users = PasswordChecker({f"u{number}": HASHES["ada"] for number in range(30)})
    assert ask(users, *[(f"u{number}", b"right") for number in range(30)]) == ["yes"] * 30


def test_many_at_once_wait_for_one_look(looked_at: list[bytes]) -> None:
    users = PasswordChecker(HASHES)

    async def together() -> list[str]:
        return await asyncio.gather(*(users.verdict(basic("ada", b"right"), "10.0.0.1") for _ in range(16)))

    assert asyncio.run(together()) == ["yes"] * 16
    assert len(looked_at) == 1


def test_no_more_wait_than_a_few() -> None:
    users = PasswordChecker(HASHES)

    async def together() -> list[str]:
        return await asyncio.gather(*(users.verdict(basic("ada", b"right"), "10.0.0.1") for _ in range(40)))

    assert asyncio.run(together()) == ["yes"] * 16 + ["later"] * 24
