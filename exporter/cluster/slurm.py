"""Slurm as a source: four questions, three calls a turn.

Owns which command answers which question, how often, and what it costs (measured with sdiag on 22.05.8 and 24.11.5):
jobs 1 call each turn, nodes 2 and reservations 1 every other turn, topology 1 an hour. Refuses to read the answers.
"""

from collections.abc import Callable
from typing import Any

from exporter.cluster.model import Jobs
from exporter.cluster.slurm_jobs import NotAskedError, parse_jobs
from exporter.cluster.slurm_nodes import SINFO, parse_nodes, parse_reservations, parse_topology
from exporter.cluster.watching import Question, SilentError
from exporter.schedulers.slurm.commands import Commands
from exporter.schedulers.slurm.commands import SilentError as CommandError

_STATES = "PD,R,S,CG,CF,RQ,RH,SE,SI,SO,ST,NF,PR,BF"
"""All but jobs that ended by themselves; 22.05 lists those all the same."""
SQUEUE = ("--local", "-a", "-t", _STATES, "--json")
_LEAST_TIMEOUT = 30.0
"""Seconds; a table of 10,000 jobs takes longer than one job."""


class SlurmCluster:
    """The `Source` of a Slurm cluster."""

    name = "slurm"

    def __init__(self, run: Callable[..., str], *, refresh_seconds: float) -> None:
        """`run` gives what a command printed; see schedulers.slurm.commands."""
        self._run = run
        hourly = max(2, round(3600 / refresh_seconds))
        self.questions = (
            Question("jobs", 1, 1, self._jobs),
            Question("nodes", 2, 2, lambda: parse_nodes(self._ask("sinfo", *SINFO))),
            Question(
                "reservations",
                2,
                1,
                lambda: parse_reservations(self._ask("scontrol", "-a", "-o", "show", "reservation")),
            ),
            Question("topology", hourly, 1, lambda: parse_topology(self._ask("scontrol", "show", "topology"))),
        )

    def close(self) -> None:
        """Nothing is held open."""

    def _jobs(self) -> Jobs:
        try:
            return parse_jobs(self._ask("squeue", *SQUEUE))
        except NotAskedError as err:
            raise SilentError(str(err)) from err

    def _ask(self, *words: str) -> str:
        try:
            return self._run(*words)
        except CommandError as err:
            raise SilentError(str(err)) from err


def open_slurm(config: Any) -> SlurmCluster:
    """Open with the commands that `config.slurm` names."""
    slurm = config.slurm
    commands = Commands(bin_dir=slurm.bin_dir, conf=slurm.conf, timeout=max(_LEAST_TIMEOUT, slurm.timeout_seconds))
    return SlurmCluster(commands.printed, refresh_seconds=config.cluster.refresh_seconds)
