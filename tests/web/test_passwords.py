"""Tests passwords: verification, the cache, and rate limits on guesses."""

import asyncio
import os
import threading
from base64 import b64encode
from types import SimpleNamespace

import bcrypt
import pytest

from exporter.web import security as module
from exporter.web.security import PasswordChecker, parse_credentials

WORDS = {"ada": b"right", "bob": b"x" * 90, "eve": "pässword".encode()}
HASHES = {name: bcrypt.hashpw(word[:72], bcrypt.gensalt(4)).decode() for name, word in WORDS.items()}


def basic(name: str, word: bytes) -> str:
    return "Basic " + b64encode(name.encode() + b":" + word).decode()


@pytest.fixture(autouse=True)
def _frozen(monkeypatch: pytest.MonkeyPatch) -> None:
    """No time passes: on a busy machine seconds would, and with them comes leave to guess again."""
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: 1000.0))


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


def test_guessing_from_everywhere_is_slowed_too(looked_at: list[bytes]) -> None:
    users = PasswordChecker(HASHES)
    got = [ask(users, ("ada", b"wrong"), address=f"10.0.0.{host % 50}")[0] for host in range(100)]
    assert got[:20] == ["no"] * 20
    assert got.count("later") >= 50
    assert len(looked_at) <= 45


def test_a_first_login_is_checked_whoever_guesses() -> None:
    """Guesses from many addresses have used up all that there is for them: an address without a failure has its own."""
    users = PasswordChecker(HASHES)
    for _ in range(3):
        for host in range(20):
            ask(users, ("ada", b"wrong"), address=f"10.0.0.{host}")
    assert ask(users, ("ada", b"wrong"), address="10.0.0.1") == ["later"]
    assert ask(users, ("ada", b"right"), address="10.0.1.1") == ["later"]  # twenty first failures used up the others'
    users._overall[False].refund()  # half a second later
    for host in range(20):
        ask(users, ("ada", b"wrong"), address=f"10.0.0.{host}")
    assert ask(users, ("ada", b"right"), address="10.0.1.1") == ["yes"]


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
