"""Converts the events of one job's logs to messages: which lines count as steps, over what interval, in which phase.

One writer is the main one; step lines of other ranks are copies while it keeps writing. A step that does not follow the
last is a copy if it was counted a moment ago, another run after the end of a training, and a rollback otherwise. All
figures are per GPU. No second is covered twice. Independent of files and frameworks.
"""

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

from msgspec import Struct, structs

from exporter.core.model import MS, NARROW_DTYPES, SECOND
from exporter.core.progress import OWN_RUN
from exporter.training.logs.formats import EventKind, LogEvent, scaled
from exporter.training.message import (
    Degrees,
    LoggedMessage,
    Message,
    Phase,
    PhaseName,
    Quality,
    Schedule,
    Shape,
    attention_flops,
)
from exporter.workloads import WorkloadProcess

Facts = Mapping[str, float | str]
_MOST_RANKS = 10**6
_LARGEST_SIZE = 10**8
_ROUNDED_SECONDS = 0.0005
"""Rounding error of a step's time, printed with three decimals: fewer tokens than it accounts for are not padding."""
_HALF_RECOMPUTED = 7.0 / 6.0
"""Hardware FLOPs over the model's, if half of the forward pass, 2 of 6 FLOPs per parameter and token, is repeated."""
_DEGREES = ("tensor", "pipeline", "data", "context", "expert")


def interval_fields(event: LogEvent, facts: Facts, *, steps: int, seconds: float, paused: float) -> dict[str, Any]:
    """Fields of a Message that cover an interval of `seconds`; empty if that is not positive.

    The line's rates are means over these and `paused` seconds.
    """
    if seconds <= 0.0:
        return {}
    world, sequence = rank_count(facts, "world"), facts.get("sequence")
    share = None if world is None else steps / world
    samples = scaled(event.samples, share)
    tokens = scaled(event.tokens, seconds + paused)
    if tokens is None and isinstance(sequence, float):
        tokens = scaled(samples, sequence)
    model, hardware = (scaled(rate, seconds + paused) for rate in (_flops(event, facts), event.hardware_flops))
    if facts.get("recompute") == "half":
        hardware = scaled(model, _HALF_RECOMPUTED)
    # In fine-tuning the rest of the tokens are prompts; in preference training pairs of answers are counted.
    plain = facts.get("use_sft") == "False" and facts.get("use_dpo") != "True"
    unpadded = scaled(event.unpadded_tokens, share) if plain else None
    return {
        "seconds": seconds,
        "steps": steps,
        "samples": samples,
        "tokens": tokens,
        "padding": _padding(tokens, unpadded, rounded=_ROUNDED_SECONDS * steps / seconds),
        "model_flops": model,
        # It may be below model_flops by rounding.
        "hardware_flops": None if hardware is None else max(hardware, model or 0.0),
        "model_flops_16bit": _flops_16bit(tokens, model, facts),
    }


def job_fields(facts: Facts) -> dict[str, Any]:
    """Fields of a Message that are constant for the job."""
    degrees = {name: found for name in _DEGREES if (found := rank_count(facts, name)) is not None}
    # torchtitan names no mode where it recomputes nothing; the peak comes after the place where it would have.
    granularity = facts.get("recompute", "None" if "peak" in facts else "")
    return {
        "gpus": 1,
        "world_size": rank_count(facts, "world"),
        "parallel": Degrees(**degrees) if degrees else None,
        "pipeline": _schedule(facts),
        "recompute": _RECOMPUTE.get(granularity, ""),
        "dtype": _precision(facts),
    }


_RECOMPUTE: Mapping[float | str, str] = {
    "None": "none", "selective": "selective", "half": "selective", "full": "full",
}  # fmt: skip


def encode_loss(loss: float | None) -> Any:
    """Encode a loss for a Message, which carries nan and infinity as text."""
    return loss if loss is None or math.isfinite(loss) else str(loss)


def rank_count(facts: Facts, name: str) -> int | None:
    """A fact as a number of ranks; None if it is missing or out of range."""
    found = facts.get(name)
    return int(found) if isinstance(found, float) and 1.0 <= found <= _MOST_RANKS else None


def _flops(event: LogEvent, facts: Facts) -> float | None:
    peak = facts.get("peak")
    return event.flops if event.flops is not None else scaled(event.mfu, peak if isinstance(peak, float) else None)


def _flops_16bit(tokens: float | None, model: float | None, facts: Facts) -> float | None:
    """FLOPs of attention's products and of the output layer, which FP8 and FP4 training leaves in 16 bits.

    None with another format, or if the model's shape is not known.
    """
    shape = [facts.get(name) for name in ("layers", "heads", "head_size", "sequence", "hidden", "vocabulary")]
    sizes = [int(size) for size in shape if isinstance(size, float) and size <= _LARGEST_SIZE]
    if len(sizes) < len(shape) or facts.get("latent") == "True":
        return None
    if tokens is None or model is None or _precision(facts) not in NARROW_DTYPES:
        return None
    layers, heads, head_size, sequence, hidden, vocabulary = sizes
    attention = attention_flops(Shape(1.0, layers=layers, heads=heads, head_size=head_size, sequence=sequence))
    return min(model, tokens * (attention + 6.0 * hidden * vocabulary))


def _padding(tokens: float | None, trained: float | None, *, rounded: float) -> float | None:
    if tokens is None or trained is None:
        return None
    return 0.0 if tokens - trained <= tokens * rounded else tokens - trained


def _schedule(facts: Facts) -> Schedule | None:
    stages, microbatches = rank_count(facts, "pipeline"), rank_count(facts, "microbatches")
    if stages is None or microbatches is None or stages == 1:
        return None
    chunks = rank_count(facts, "chunks") or 1
    return Schedule(stages, microbatches, chunks, "interleaved" if chunks > 1 else "1f1b")


def _precision(facts: Facts) -> str:
    narrow = next((name for name in ("fp4", "fp8") if facts.get(name, "None") not in ("None", "False")), "")
    return narrow or next((name for name in ("bf16", "fp16") if facts.get(name) == "True"), "")


COPY_SECONDS = 3.0
"""A repeated step within this time is a copy: no job can fail, restart, load a checkpoint and step again so fast."""
SILENT_SECONDS = 30.0
"""Time without lines of the main writer after which another writer may continue from the last step."""
SILENT_BACK_SECONDS = 60.0
"""The same for a writer that goes back to an earlier step."""
_LONGEST_SILENCE = 600.0
"""A writer whose lines are further apart is silent only after twice that time, but after this at the latest."""
SAME_START_SECONDS = 60.0
"""Starts at the same step within this time are lines of several ranks."""
_RECENT = 256
"""Steps whose time is kept to detect copies."""
_FIRST_STEPS = 100
"""If a log was read from its beginning and its first step is at most this, the run started at step 0."""
_DAY = 86_400.0
_HOUR = 3600.0
_CLOCK_CHANGE_SECONDS = 60.0
"""If timestamps differ by an hour more or less than the times of reading, within this, the clock was changed."""
_MIXED_ROLLBACKS, _MIXED_SECONDS, _MIXED_LINES = 3, 300.0, 16
"""If the steps go back so often, although nothing was started, and pass the highest one again each time, several
trainings write: in so few seconds, or, if they jump over it, lines. One that fails repeats the step of each line."""


class LineTime(Struct, frozen=True):
    """When a line was written, and when it was read."""

    timestamp: float | None
    """The line's own timestamp in seconds; None without one."""
    read_at: int
    """Monotonic nanoseconds."""

    def since(self, before: "LineTime") -> float:
        """Seconds since `before`; from the timestamps if both lines have one.

        They are local times: when summer time begins or ends, they jump by an hour.
        """
        read = (self.read_at - before.read_at) / SECOND
        if self.timestamp is None or before.timestamp is None:
            return read
        stamped = self.timestamp - before.timestamp
        changed = abs(abs(stamped - read) - _HOUR) < _CLOCK_CHANGE_SECONDS
        return stamped - math.copysign(_HOUR, stamped - read) if changed else stamped


class StepSequence:
    """The steps of one job. `fresh`: its log is read from the beginning."""

    def __init__(self, *, fresh: bool = False) -> None:
        self.step: int | None = None
        """The last counted step; None before the first."""
        self._first_step = 1
        """The step of a run's first line."""
        self._fresh, self._has_gap, self._steps_per_line = fresh, False, 0
        self._interval_start: LineTime | None = None
        self._interval_step = 0
        """The step at `_interval_start`."""
        self._paused, self._paused_at = 0.0, cast("LineTime | None", None)
        """Seconds of the interval that were no training, and since when it has paused."""
        self._resumed: tuple[LineTime, int] | None = None
        """When and at which step the interval went on after a pause whose beginning is unknown."""
        self._recent: dict[int, LineTime] = {}
        self._main_writer, self._last_line_at = "", 0
        self._line_seconds = 0.0
        """Seconds that the last line covered."""
        self._highest_before: int | None = None
        """Highest step before the last rollback, until it is passed."""
        self._lines, self._passed = 0, deque[tuple[int, LineTime, bool]](maxlen=_MIXED_ROLLBACKS)
        """Counted lines; at which of them, when, and whether by a jump the step before a rollback was passed."""
        self._started: int | None = None
        self._start_seen: tuple[int, LineTime] | None = None

    def is_new(self, step: int, writer: str, at: LineTime) -> bool:
        """Whether the line counts, rather than being a copy of a counted line."""
        if self.step is None or self._started is not None:
            return True
        back = step <= self.step
        if not self.is_main_writer(writer):
            silent = max(
                SILENT_BACK_SECONDS if back else SILENT_SECONDS, min(2.0 * self._line_seconds, _LONGEST_SILENCE)
            )
            return (at.read_at - self._last_line_at) / SECOND > silent and not (back and self._is_older(at))
        return not back or not (self._is_older(at) or self._is_copy(step, at))

    def is_restart(self, step: int) -> bool:
        """Whether the run was restarted before this step."""
        return bool(self._started) or (self.step is not None and step <= self.step)

    def goes_back(self, step: int) -> bool:
        """Whether this step, or the start before it, comes before the last counted step."""
        if self.step is None:
            return False
        return step <= self.step if self._started is None else self._started < self.step

    def begin_run(self) -> None:
        """Begin another run: its steps have nothing to do with those before."""
        self.step, self._fresh, self._has_gap, self._steps_per_line = None, True, False, 0
        self._recent.clear()
        self._passed.clear()
        self._highest_before = None
        if self._started is None:
            self._interval_start = None

    def is_mixed(self, step: int, at: LineTime) -> bool:
        """Whether the steps of several trainings alternate: they go back and on, again and again, without a start."""
        if self._started is not None:
            self._passed.clear()
            self._highest_before = None
        elif self.step is None:
            return False
        elif step <= self.step:
            if step > self._first_step and self._highest_before is None:
                self._highest_before = self.step
        elif self._highest_before is not None and step > self._highest_before:
            self._passed.append((self._lines, at, self.step < self._highest_before))
            self._highest_before = None
            lines, first, _ = self._passed[0]
            jumps = all(jumped for *_, jumped in self._passed) and self._lines - lines <= _MIXED_LINES
            return len(self._passed) == _MIXED_ROLLBACKS and (jumps or at.since(first) <= _MIXED_SECONDS)
        return False

    def interval(self, step: int, step_seconds: float | None, at: LineTime) -> tuple[int, float, float]:
        """Number of steps that the line covers, their seconds, and those of pauses over which its rates are means, too.

        Zeros if the duration of the steps is unknown.
        """
        base, paused = self._base(step), 0.0
        if step_seconds is not None:
            steps = min(self._steps_per_line or 1, step) if base is None else step - base
            seconds = step_seconds * steps
        elif base is None or self._interval_start is None:
            return 0, 0.0, 0.0
        else:
            steps = step - (self._interval_step if base == self.step else base)
            seconds = self._training_seconds(self._interval_start, step, steps, at)
            paused = self._paused if self._resumed is None else 0.0
        self._line_seconds = seconds
        return (steps, seconds, paused) if 0.0 < seconds <= _DAY else (0, 0.0, 0.0)

    def record(self, step: int, writer: str, at: LineTime) -> None:
        """Count the step."""
        base = self._base(step)
        if self.step is None and base == 0:
            self._first_step = step
        if self.is_restart(step):
            self._recent.clear()
        self._steps_per_line = self._steps_per_line if base is None else step - base
        if (
            base is None or self._interval_start is None or at.since(self._interval_start) > 0.0
        ):  # otherwise the next interval includes these steps
            self._restart_interval(at, step)
        self._lines += 1
        self.step, self._main_writer, self._last_line_at = step, writer, at.read_at
        self._started, self._has_gap = None, False
        self._recent[step] = at
        if len(self._recent) > _RECENT:
            del self._recent[next(iter(self._recent))]

    def begin(self, step: int, at: LineTime) -> bool:
        """Register that training starts after `step`; False if another rank has already logged the same start."""
        seen, self._start_seen = self._start_seen, (step, at)
        if seen and seen[0] == step and abs(at.since(seen[1])) < SAME_START_SECONDS and self._started is None:
            return False
        self._started = step
        self._restart_interval(at, step)
        return True

    def pause(self, at: LineTime) -> None:
        """Register that something else than training begins."""
        self._paused_at = self._paused_at or at

    def resume(self, at: LineTime, step: int | None) -> None:
        """Register that training goes on, after `step` if that is known.

        Steps since the last line were made before the pause: their time counts, too.
        """
        if self._paused_at is not None:
            self._paused, self._paused_at = self._paused + at.since(self._paused_at), None
        elif step is not None and self.step is not None and step > self.step:
            self._resumed = at, step
        else:
            self._restart_interval(at, self.step or 0)

    def _restart_interval(self, at: LineTime, step: int) -> None:
        self._interval_start, self._interval_step = at, step
        self._paused, self._paused_at, self._resumed = 0.0, None, None

    def _training_seconds(self, start: LineTime, step: int, steps: int, at: LineTime) -> float:
        """Seconds of the interval in which steps were made; after an unknown pause all take as long as those since."""
        seconds = at.since(start) - self._paused
        if self._resumed is None:
            return seconds
        since, resumed = self._resumed
        return min(seconds, at.since(since) * steps / (step - resumed)) if step > resumed else 0.0

    def is_main_writer(self, writer: str) -> bool:
        """Whether the writer is the main one, or there is none yet."""
        return self._main_writer in ("", writer)

    def end_history(self) -> None:
        """End the replay of old lines: no main writer yet, and without a timestamp their time is unknown."""
        self._main_writer, self._started = "", None
        self._interval_start = (
            None if self._interval_start is None or self._interval_start.timestamp is None else self._interval_start
        )

    def mark_gap(self) -> None:
        """Register that lines were skipped: the next interval's start is unknown."""
        self._has_gap, self._steps_per_line = True, 0

    def remove_writers(self, writers: str) -> None:
        """Forget the main writer if its name starts with `writers`."""
        if self._main_writer.startswith(writers):
            self._main_writer = ""

    def _base(self, step: int) -> int | None:
        """The step before the interval; None if unknown."""
        if self._started is not None:
            base: int | None = self._started
        elif self.step is None:
            base = 0 if self._fresh and step <= _FIRST_STEPS else None
        else:
            base = None if self._has_gap else self.step
        return base if base is not None and base < step else None

    def _is_copy(self, step: int, at: LineTime) -> bool:
        known = self._recent.get(step)
        return known is not None and at.since(known) < COPY_SECONDS

    def _is_older(self, at: LineTime) -> bool:
        last = self._interval_start
        if last is None or last.timestamp is None or at.timestamp is None:
            return False
        return at.since(last) < 0.0


_VALIDATION = "validation loss"
_BARS = 16
"""Bars of different length before the first loss: downloads and tokenizers have some, too."""
_FACTS = 64


class _FirstBar(Struct):
    """Where a bar begins: at its first position, or where it jumps to from 0, because a training resumes there."""

    step: int
    writer: str
    at: LineTime
    moved: bool = False

    def move(self, step: int) -> None:
        """Take the step before the first position other than 0."""
        if not self.moved and step > self.step:
            self.step, self.moved = step - 1 if self.step == 0 else self.step, True


class TimedMessage(Struct, frozen=True):
    """A message and the duration it covers: earlier messages ended that much earlier."""

    message: Message
    seconds: float = 0.0


class LogTracker:
    """Converts the log events of one job to messages."""

    def __init__(self) -> None:
        self._facts: dict[str, float | str] = {}
        self._handlers: dict[EventKind, Callable[[LogEvent, str, LineTime], list[TimedMessage]]] = {
            "step": self._on_step, "bar": self._on_bar, "metrics": self._on_metrics,
            "save": self._on_save, "saved": self._on_saved, "detached": self._on_detached,
            "load": self._on_load, "loaded": self._on_loaded, "start": self._on_start,
            "validate": self._on_validate, "evaluated": self._on_evaluated, "validated": self._on_validated,
            "end": self._on_end, "facts": self._on_facts,
        }  # fmt: skip
        self.ambiguous = False
        """Several trainings write to the log: nothing is reported of it until one starts or ends."""
        self._run_began: LineTime | None = None
        """When the present run began, if another one of this job had ended before."""
        self.reset()

    def reset(self, *, fresh: bool = False) -> None:
        """Forget the job's progress; `fresh`: the next log is read from its beginning."""
        self.sequence = StepSequence(fresh=fresh)
        self._phase: Phase = ""
        self._just_saved, self._saved_step = False, -1
        self._total: int | None = None
        self._expects_total = self._ended = False
        self._first_bars: dict[int | None, _FirstBar] = {}
        """By the bar's total, until the training's is known."""
        self._bar_event: tuple[LogEvent, str, LineTime] | None = None

    def start_fresh(self) -> None:
        """Prepare for a log that is read from its beginning; no effect after the first step."""
        if self.sequence.step is None:
            self.reset(fresh=True)

    def handle(self, event: LogEvent, *, writer: str, at: LineTime) -> list[TimedMessage]:
        """Messages that follow from a line of `writer`."""
        before = [] if event.kind in ("bar", "facts") else self.flush_bar()
        messages = [*before, *self._handlers[event.kind](event, writer, at)]
        return [] if self.ambiguous else messages

    def flush_bar(self) -> list[TimedMessage]:
        """Messages of the progress bar's last position; called once per poll, because bars are redrawn often."""
        pending, self._bar_event = self._bar_event, None
        return [] if pending is None else self._on_step(*pending)

    def end_history(self) -> None:
        """End the replay of old lines, whose messages are discarded: without timestamps their time is unknown."""
        self._separate()
        self.sequence.end_history()
        self._phase, self._bar_event = "", None
        if self._run_began is not None and self._run_began.timestamp is None:
            self._run_began = None

    def _on_step(self, event: LogEvent, writer: str, at: LineTime) -> list[TimedMessage]:
        sequence, step = self.sequence, event.step or 0
        if not step or not sequence.is_new(step, writer, at):
            return []
        if self._ended and sequence.goes_back(step):
            self._begin_run(at)
        self.ambiguous = self.ambiguous or sequence.is_mixed(step, at)
        if self.ambiguous:
            return []
        steps, seconds, paused = sequence.interval(step, event.step_seconds, at)
        message = Message(
            **interval_fields(event, self._facts, steps=steps, seconds=seconds, paused=paused),
            **job_fields(self._facts),
            run=self._run(),
            step=step,
            loss=encode_loss(event.loss),
            restart=sequence.is_restart(step),
            checkpoints=int(self._phase == "checkpoint"),
            phase=self._resume_compute(),
        )
        sequence.record(step, writer, at)
        self._just_saved = False
        total = self._facts.get("steps") if event.total is None else event.total
        self._ended = isinstance(total, (int, float)) and step >= total
        return [TimedMessage(message, seconds)]

    def _begin_run(self, at: LineTime) -> None:
        """Begin another run of the job, after the end of the one before."""
        self.sequence.begin_run()
        self._run_began, self._ended, self._first_bars = at, False, {}

    def _run(self) -> str:
        """The run ID: when it began, because a new tracker does not know how many there were.

        Empty: the job's first run, or the one that it reported last.
        """
        at = self._run_began
        return "" if at is None else f"{OWN_RUN}{at.read_at / SECOND if at.timestamp is None else at.timestamp:.0f}"

    def _separate(self) -> None:
        """Of several trainings beside each other one starts or ends: count again, from the next step on."""
        if self.ambiguous:
            self.ambiguous = False
            self.reset()

    def _on_bar(self, event: LogEvent, writer: str, at: LineTime) -> list[TimedMessage]:
        if self._expects_total:
            self._choose_bar(event.total, at)
        elif (self._total is None or self._ended) and len(self._first_bars) < _BARS:
            self._first_bars.setdefault(event.total, _FirstBar(event.step or 0, writer, at)).move(event.step or 0)
        if event.total == self._total:
            if self._ended and event.step == 0:
                self._begin_run(at)
                self.sequence.record(0, writer, at)
            self._bar_event = None if event.step == self.sequence.step else (event, writer, at)
            return []
        # Only an evaluation draws a second bar during training; a full bar is redrawn after its end.
        if self._total is None or event.step == event.total:
            return []
        return [*self.flush_bar(), *self._on_validate(event, writer, at)]

    def _choose_bar(self, total: int | None, at: LineTime) -> None:
        """Take the bar for the training's: its steps count from its beginning on, which may be long ago."""
        first = self._first_bars.get(total)
        if self._ended and total != self._total:
            self._begin_run(at)
        self._total, self._expects_total = total, False
        if first is not None and self.sequence.step is None:
            self.sequence.record(first.step, first.writer, first.at)
        self._first_bars = {}

    def _on_metrics(self, event: LogEvent, _writer: str, _at: LineTime) -> list[TimedMessage]:
        self._expects_total = True
        message = Message(
            step=self.sequence.step, epoch=event.epoch, loss=encode_loss(event.loss), phase=self._resume_compute()
        )
        return [TimedMessage(message)]

    def _on_save(self, event: LogEvent, _writer: str, at: LineTime) -> list[TimedMessage]:
        if self._just_saved if event.step is None else self._saved_step == event.step:
            return []
        self.sequence.pause(at)
        return self._enter("checkpoint")

    def _on_saved(self, event: LogEvent, _writer: str, at: LineTime) -> list[TimedMessage]:
        during = self._phase == "checkpoint"
        known = self._just_saved if event.step is None else self._saved_step == event.step
        self._just_saved, self._saved_step = True, -1 if event.step is None else event.step
        if during:
            self.sequence.resume(at, None)
            return [TimedMessage(Message(checkpoints=1, phase=self._resume_compute()), event.seconds or 0.0)]
        return [] if known else [_past_phase("checkpoint", event.seconds or 0.0, checkpoints=1)]

    def _on_detached(self, _event: LogEvent, _writer: str, at: LineTime) -> list[TimedMessage]:
        if self._phase != "checkpoint":
            return []
        self.sequence.resume(at, None)
        return self._enter("compute")

    def _on_load(self, event: LogEvent, _writer: str, at: LineTime) -> list[TimedMessage]:
        self._separate()
        if event.step is not None and not self.sequence.begin(event.step, at):
            return []
        return self._enter("restore")

    def _on_loaded(self, _event: LogEvent, _writer: str, _at: LineTime) -> list[TimedMessage]:
        return self._enter("startup") if self._phase == "restore" else []

    def _on_start(self, event: LogEvent, writer: str, at: LineTime) -> list[TimedMessage]:
        self._separate()
        self.sequence.begin(event.step or 0, at)
        return self._on_loaded(event, writer, at)

    def _on_validate(self, _event: LogEvent, _writer: str, at: LineTime) -> list[TimedMessage]:
        self.sequence.pause(at)
        return self._enter("evaluation")

    def _on_evaluated(self, event: LogEvent, _writer: str, _at: LineTime) -> list[TimedMessage]:
        known = self._phase == "evaluation" or not event.seconds
        return [] if known else [_past_phase("evaluation", event.seconds or 0.0)]

    def _on_validated(self, event: LogEvent, writer: str, at: LineTime) -> list[TimedMessage]:
        if not self.sequence.is_main_writer(writer):
            return []
        self.sequence.resume(at, event.step)
        value = encode_loss(event.value)
        quality = Quality(value, _VALIDATION, falls=True) if isinstance(value, float) else None
        return [TimedMessage(Message(quality=quality, epoch=event.epoch, phase=self._resume_compute()))]

    def _on_end(self, _event: LogEvent, _writer: str, at: LineTime) -> list[TimedMessage]:
        self._run_began = at if self.ambiguous else self._run_began
        self._separate()
        self._ended = self.sequence.step is not None
        return []

    def _on_facts(self, event: LogEvent, _writer: str, _at: LineTime) -> list[TimedMessage]:
        if len(self._facts) < _FACTS:
            self._facts.update(event.facts)
        return []

    def _enter(self, phase: Phase) -> list[TimedMessage]:
        if phase == self._phase:
            return []
        self._phase = phase
        return [TimedMessage(Message(phase=phase))]

    def _resume_compute(self) -> Phase:
        """Switch to compute; returns the phase to report, which is empty if no other phase was reported before."""
        before, self._phase = self._phase, "compute"
        return "" if before in ("", "compute") else "compute"


def _past_phase(phase: PhaseName, seconds: float, *, checkpoints: int = 0) -> TimedMessage:
    """A message about a completed phase whose start was not logged."""
    return TimedMessage(
        Message(seconds=seconds, phases={phase: seconds} if seconds else {}, checkpoints=checkpoints), seconds
    )


SLACK = SECOND // 2
"""Accuracy of a file's modification time, in nanoseconds."""


def date_messages(
    messages: Sequence[tuple[TimedMessage, WorkloadProcess]], *, end: int, until: int | None
) -> list[LoggedMessage]:
    """Date a job's messages: the last ended at `end`, each other when the one after it started.

    The messages are shortened if they do not fit after `until`, the end of the job's previous ones; None: there are
    none. Times are monotonic nanoseconds.
    """
    duration = sum(timed.seconds for timed, _ in messages) * SECOND
    available = duration if until is None else end - until
    scale = available / duration if 0 < available < duration - SLACK else 1.0
    found: list[LoggedMessage] = []
    for timed, process in reversed(messages):
        found.append(LoggedMessage(process.pid, process.job_id, _shortened(timed.message, scale), end // MS * MS))
        end -= int(timed.seconds * scale * SECOND)
    return found[::-1]


def _shortened(message: Message, scale: float) -> Message:
    """The message with its durations multiplied by `scale`."""
    if scale >= 1.0:
        return message
    phases = {name: seconds * scale for name, seconds in message.phases.items()}
    return structs.replace(message, seconds=message.seconds * scale, phases=phases)
