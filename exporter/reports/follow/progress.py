"""The messages that follow from what the lines of one job's logs say.

Owns the phases a job is in, and what is known of it for good. Refuses to know files and frameworks.
"""

from collections.abc import Callable

from msgspec import Struct

from exporter.reports.follow.figures import constants, figures, loss_word
from exporter.reports.follow.order import Moment, Order
from exporter.reports.follow.said import Kind, Said
from exporter.reports.message import Message, Named, Phase, Quality

_VALIDATION = "validation loss"
_FACTS = 64


class Told(Struct, frozen=True):
    """A message, and how long what it speaks of has lasted: those before it ended so much earlier."""

    message: Message
    seconds: float = 0.0


class Progress:
    """Of one job."""

    def __init__(self) -> None:
        self._facts: dict[str, float | str] = {}
        self._hears: dict[Kind, Callable[[Said, str, Moment], list[Told]]] = {
            "step": self._step, "bar": self._bar, "words": self._words,
            "save": self._save, "saved": self._saved, "detached": self._detached,
            "load": self._load, "loaded": self._loaded, "start": self._start,
            "validate": self._validate, "evaluated": self._evaluated, "validated": self._validated,
            "facts": self._fact,
        }  # fmt: skip
        self.reset()

    def reset(self, *, fresh: bool = False) -> None:
        """Forget how far it has come; `fresh`: the log that comes is read from its beginning."""
        self._order = Order(fresh=fresh)
        self._phase: Phase = ""
        self._saved_now, self._saved_step = False, -1
        self._total: int | None = None
        self._total_comes = False
        self._drawn: tuple[Said, str, Moment] | None = None

    def fresh(self) -> None:
        """A log comes that is read from its beginning."""
        if self._order.step is None:
            self.reset(fresh=True)

    def hear(self, said: Said, *, writer: str, at: Moment) -> list[Told]:
        """What a line says that was written by `writer`."""
        return self._hears[said.kind](said, writer, at)

    def look_ends(self) -> list[Told]:
        """The bar's last position in a look counts, not each of its drawings."""
        drawn, self._drawn = self._drawn, None
        return [] if drawn is None else self._step(*drawn)

    def learned(self) -> None:
        """What was heard until now had been written before: none of its messages is for anybody."""
        self._order.learned()
        self._phase, self._drawn = "", None

    def gap(self) -> None:
        """Lines were left out."""
        self._order.gap()

    def gone(self, writers: str) -> None:
        """No writer whose name begins so will write again."""
        self._order.gone(writers)

    def _step(self, said: Said, writer: str, at: Moment) -> list[Told]:
        order, step = self._order, said.step or 0
        if not step or not order.counts(step, writer, at):
            return []
        steps, seconds = order.interval(step, said.each, at)
        message = Message(
            **figures(said, self._facts, steps=steps, seconds=seconds),
            **constants(self._facts),
            step=step,
            loss=loss_word(said.loss),
            restart=order.restarts(step),
            checkpoints=int(self._phase == "checkpoint"),
            phase=self._back_to_work(),
        )
        order.counted(step, writer, at)
        self._saved_now = False
        return [Told(message, seconds)]

    def _bar(self, said: Said, writer: str, at: Moment) -> list[Told]:
        if self._total_comes:
            self._total, self._total_comes = said.total, False
        if said.total == self._total:
            self._drawn = None if said.step == self._order.step else (said, writer, at)
            return []
        # Only an evaluation draws another bar beside the training's; a full one is drawn again after its end.
        return [] if self._total is None or said.step == said.total else self._validate(said, writer, at)

    def _words(self, said: Said, _writer: str, _at: Moment) -> list[Told]:
        before = self.look_ends()
        self._total_comes = True
        message = Message(
            step=self._order.step, epoch=said.epoch, loss=loss_word(said.loss), phase=self._back_to_work()
        )
        return [*before, Told(message)]

    def _save(self, said: Said, _writer: str, _at: Moment) -> list[Told]:
        known = self._saved_now if said.step is None else self._saved_step == said.step
        return [] if known else self._enter("checkpoint")

    def _saved(self, said: Said, _writer: str, _at: Moment) -> list[Told]:
        during = self._phase == "checkpoint"
        known = self._saved_now if said.step is None else self._saved_step == said.step
        self._saved_now, self._saved_step = True, -1 if said.step is None else said.step
        if during:
            return [Told(Message(checkpoints=1, phase=self._back_to_work()), said.lasted or 0.0)]
        return [] if known else [_past("checkpoint", said.lasted or 0.0, checkpoints=1)]

    def _detached(self, _said: Said, _writer: str, _at: Moment) -> list[Told]:
        return self._enter("compute") if self._phase == "checkpoint" else []

    def _load(self, said: Said, _writer: str, at: Moment) -> list[Told]:
        if said.step is not None and not self._order.begins(said.step, at):
            return []
        return self._enter("restore")

    def _loaded(self, _said: Said, _writer: str, _at: Moment) -> list[Told]:
        return self._enter("startup") if self._phase == "restore" else []

    def _start(self, said: Said, writer: str, at: Moment) -> list[Told]:
        self._order.begins(said.step or 0, at)
        return self._loaded(said, writer, at)

    def _validate(self, _said: Said, _writer: str, _at: Moment) -> list[Told]:
        return self._enter("evaluation")

    def _evaluated(self, said: Said, _writer: str, _at: Moment) -> list[Told]:
        known = self._phase == "evaluation" or not said.lasted
        return [] if known else [_past("evaluation", said.lasted or 0.0)]

    def _validated(self, said: Said, writer: str, at: Moment) -> list[Told]:
        if not self._order.speaks(writer):
            return []
        self._order.waits(at)
        value = loss_word(said.value)
        quality = Quality(value, _VALIDATION, falls=True) if isinstance(value, float) else None
        return [Told(Message(quality=quality, epoch=said.epoch, phase=self._back_to_work()))]

    def _fact(self, said: Said, _writer: str, _at: Moment) -> list[Told]:
        if len(self._facts) < _FACTS:
            self._facts.update(said.facts)
        return []

    def _enter(self, phase: Phase) -> list[Told]:
        if phase == self._phase:
            return []
        self._phase = phase
        return [Told(Message(phase=phase))]

    def _back_to_work(self) -> Phase:
        """Told only to who has been told of another phase."""
        before, self._phase = self._phase, "compute"
        return "" if before in ("", "compute") else "compute"


def _past(phase: Named, seconds: float, *, checkpoints: int = 0) -> Told:
    """A phase that was not seen to begin."""
    return Told(Message(seconds=seconds, phases={phase: seconds} if seconds else {}, checkpoints=checkpoints), seconds)
