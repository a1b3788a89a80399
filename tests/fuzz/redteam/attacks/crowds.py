"""Crowds of local processes: 230 with eight connections each to the reports' socket, that die or stay silent."""

import json
import os
import select
import socket
import time
from random import Random

from tests.fuzz.redteam.child import Child
from tests.fuzz.redteam.tally import Tally, outcome, reason
from tests.fuzz.redteam.target import REPORTING, STRANGERS, Episode, Target

_PROCESSES, _CONNECTIONS = 230, 8


def attack(episode: Episode) -> None:
    """Keep up the crowd: whoever dies is replaced."""
    users = (*STRANGERS, REPORTING.uid)
    crowd: list[Child] = []
    number = episode.target.many(_PROCESSES)
    while not episode.over():
        gone = [child for child in crowd if child.ended()]
        crowd = [child for child in crowd if child not in gone]
        for child in gone:
            episode.tally.add(child.end())
        room = min(number - len(crowd), 20)
        for _ in range(room):
            dice = Random(episode.dice.getrandbits(32))  # noqa: S311  dice, no secret
            crowd.append(Child(_member(episode.target, dice, episode.until), uid=episode.dice.choice(users)))
        time.sleep(0.05 if room else 0.1)
    for child in crowd:
        episode.tally.add(child.wait(1))


def _member(target: Target, dice: Random, until: float) -> "Member":
    return Member(target, dice, until)


class Member:
    """One process of the crowd."""

    def __init__(self, target: Target, dice: Random, until: float) -> None:
        self._target, self._dice, self._until = target, dice, until

    def __call__(self, tally: Tally) -> None:
        lines = [line for _ in range(_CONNECTIONS) if (line := self._connect(tally))]
        way = self._dice.choice(("die", "die", "silent", "silent", "speak and die", "speak"))
        if "speak" in way:
            for line in lines:
                self._speak(line, tally)
        if way.endswith("die"):
            tally.came("died connected", len(lines))
            os._exit(0) if self._dice.random() < 0.2 else None  # some without a farewell, and without a tally
            return
        end = min(time.monotonic() + self._dice.uniform(0.5, 12), self._until)
        self._stay(lines, end, tally)

    def _connect(self, tally: Tally) -> socket.socket | None:
        line = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        line.setblocking(False)  # noqa: FBT003
        tally.attempt()
        try:
            line.connect(str(self._target.socket))
        except BlockingIOError:
            tally.came("backlog full")
        except OSError as error:
            tally.came(outcome(error))
        else:
            return line
        line.close()
        return None

    def _speak(self, line: socket.socket, tally: Tally) -> None:
        try:
            line.send(json.dumps({"v": 1, "phase": "compute"}).encode())
        except OSError as error:
            tally.came(f"send: {outcome(error)}")

    def _stay(self, lines: list[socket.socket], end: float, tally: Tally) -> None:
        waiting = dict.fromkeys(lines)
        while waiting and (left := end - time.monotonic()) > 0:
            readable, _, _ = select.select(list(waiting), [], [], left)
            for line in readable:
                text = _read(line)
                tally.came(text)
                if text in {"closed by the daemon", "reset"}:
                    del waiting[line]
        tally.came("held to the end of the process", len(waiting))


def _read(line: socket.socket) -> str:
    try:
        text = line.recv(4096)
    except OSError as error:
        return outcome(error)
    if not text:
        return "closed by the daemon"
    return reason(text)
