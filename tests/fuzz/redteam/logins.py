"""People who log in for the first time while others guess passwords, and what checking a guess costs."""

import ssl
import time
from base64 import b64encode
from http.client import HTTPException, HTTPSConnection
from pathlib import Path

import bcrypt
import msgspec
from msgspec import Struct

from tests.fuzz.redteam.tally import Tally, outcome
from tests.fuzz.redteam.target import Target

EVERY = 5.0
"""Seconds between two first logins, each of another user at another address."""
PATIENCE = 30.0
"""Seconds after which a login has failed."""
_AGAIN = 0.5
"""Seconds after which who was refused tries again."""
COST = 10
"""Of bcrypt, as in the documents."""


class Login(Struct, frozen=True):
    """A first login: when it began, how long it took with all attempts, and what came of the last one."""

    at: float
    seconds: float
    attempts: int
    came: str


def number_of_logins(seconds: float) -> int:
    return int(seconds / EVERY) + 1


def person(number: int) -> str:
    return f"person{number}"


def hashed(password: str, cost: int) -> str:
    """Return the hash; that of every user may be the same, each is checked and remembered by itself."""
    return bcrypt.hashpw(password.encode(), bcrypt.gensalt(cost)).decode()


def seconds_of_check(password_hash: str) -> float:
    """Return the processor time of one check of a password, as this machine has it now."""
    began = time.thread_time()
    bcrypt.checkpw(b"guess", password_hash.encode())
    return time.thread_time() - began


class FirstLogins:
    """Logs one user after the other in, from the beginning of the attack on."""

    def __init__(self, target: Target, *, since: float, until: float, notes: Path) -> None:
        self._target, self._since, self._until, self._notes = target, since, until, notes
        self._tls = ssl.create_default_context(cafile=str(target.folder / "tls.crt"))

    def __call__(self, tally: Tally) -> None:
        with self._notes.open("wb", buffering=0) as notes:
            for number in range(number_of_logins(self._until - self._since)):
                due = self._since + number * EVERY
                time.sleep(max(due - time.monotonic(), 0))
                if time.monotonic() >= self._until:
                    return
                tally.attempt()
                login = self._login(number)
                tally.came(login.came)
                notes.write(msgspec.json.encode(login) + b"\n")

    def _login(self, number: int) -> Login:
        began, attempts = time.monotonic(), 0
        while True:
            attempts += 1
            came = self._attempt(number)
            seconds = time.monotonic() - began
            if came == "200" or seconds > PATIENCE:
                return Login(began, seconds, attempts, came)
            time.sleep(_AGAIN)

    def _attempt(self, number: int) -> str:
        credentials = b64encode(f"{person(number)}:{self._target.password}".encode()).decode()
        connection = HTTPSConnection(
            "127.0.0.1",
            self._target.port,
            timeout=PATIENCE,
            source_address=(f"127.78.{number // 250}.{1 + number % 250}", 0),
            context=self._tls,
        )
        try:
            connection.request("GET", "/metrics", headers={"Authorization": f"Basic {credentials}"})
            with connection.getresponse() as response:
                response.read()
                return f"{response.status}"
        except (OSError, HTTPException) as error:
            return outcome(error)
        finally:
            connection.close()
