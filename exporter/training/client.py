"""Reports a training job's progress to the gpu-efficiency daemon of its node: one file, copied beside the script.

    reporter = Reporter(model={"parameters": 7e9, "layers": 32, "heads": 32, "head_size": 128, "sequence": 4096})
    for batch in reporter.iterate(loader):
        ...
        reporter.step(tokens=batch.numel())

Never slows or breaks training: it does not block, raises no exception and starts no thread; figures that cannot be sent
are kept for the next message and counted. Needs Python 3.8 and nothing else, which is why it is one long file. The
meaning of the fields: docs/training-jobs.md.
"""

from __future__ import annotations

import atexit
import functools
import importlib
import json
import logging
import math
import os
import socket as sockets
import time
from collections.abc import Callable, Iterator, Mapping
from threading import get_ident
from typing import Any, TypeVar, cast

VERSION = 1
SOCKET = "/run/gpu-efficiency/report.sock"
PHASES = ("startup", "restore", "data", "compute", "communication", "bubble", "checkpoint", "evaluation", "idle")
LIVE = frozenset(("startup", "restore", "checkpoint", "evaluation", "idle"))
"""Phases that are reported when they begin and end, because they may be long and no step completes in them."""
_FIGURES = ("tokens", "padding", "samples", "model_flops", "hardware_flops", "model_flops_16bit")
_RANKS = (
    ("RANK", "WORLD_SIZE"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("PMI_RANK", "PMI_SIZE"),
    ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),
)
"""Environment variables with the rank and world size: torchrun, Open MPI, MPICH, srun. SLURM_STEP_NUM_TASKS is set only
in processes started by srun; SLURM_PROCID and SLURM_NTASKS are also set in the batch script, which has no rank."""
_SECOND = 1_000_000_000
_MS = 1_000_000
_RETRY = 10 * _SECOND
_LONGEST = 86_000 * _SECOND
"""Nanoseconds after which unsent figures are dropped: the daemon accepts intervals of up to a day."""
_LIVE_EVERY, _LIVE_BURST = _SECOND // 4, 2 * _SECOND
"""Rate limit of immediate messages: 4 a second on average, because the daemon accepts 10 messages a second."""
_QUALITIES = 16
"""Maximum quality figures waiting to be sent: a message has room for one."""
_REFUSALS = 8
"""Maximum number of different rejections that are logged."""
_NEVER = 1 << 62
_log = logging.getLogger("gpu_efficiency")


_Method = TypeVar("_Method", bound=Callable[..., None])


def _safely(method: _Method) -> _Method:
    """Catch all errors of a Reporter's method or a framework's hook: losing a figure is better than ending the job.

    The methods that are called in every step do so themselves, without the cost of a second call.
    """

    @functools.wraps(method)
    def run(self: Any, *args: Any, **named: Any) -> None:
        try:
            method(self, *args, **named)
        except Exception as error:  # noqa: BLE001 - see above
            getattr(self, "_reporter", self).failed(error)

    return cast("_Method", run)


class Reporter:
    """Reports of one training process (docs/training-jobs.md). Create it before building the model, to count startup.

    `gpus` is the number of GPUs that the figures cover. Without it these are the GPUs that share one batch (tensor x
    pipeline x context), so report the tokens of the batch that this process has loaded.
    `socket` and `http` are the daemon's addresses; if both are empty, nothing is sent. `dropped` counts messages that
    could not be sent, `refusal` is the reason of the daemon's last rejection, `error` the last internal error.
    """

    _figures: dict[str, Any]
    _step: Any
    _epoch: Any
    _loss: Any
    _non_finite_loss: float | None
    _spent: dict[str, int]

    def __init__(
        self,
        run: str = "",
        *,
        rank: int | None = None,
        world_size: int | None = None,
        gpus: int | None = None,
        model: Mapping[str, Any] | None = None,
        parallel: Mapping[str, int] | None = None,
        pipeline: Mapping[str, Any] | None = None,
        dtype: str = "",
        recompute: str = "",
        socket: str | None = None,
        http: str | None = None,
        every: float = 2.0,
        clock: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self.dropped = 0
        self.error = ""
        self._clock = clock
        self._every = 2 * _SECOND
        self._head = '{"v": 1'
        self._connection: _DaemonConnection | None = None
        self._stack = ["startup"]
        self._thread = 0
        self._fresh = True
        self._step = 0
        self._highest: int | None = None
        self._restart = False
        self._qualities: dict[str, dict[str, Any]] = {}
        self._known: set[str] = set()
        self._sent_until = 0
        self._since = self._charged_until = clock() // _MS * _MS
        self._clear(self._since)
        self._due = self._since + self._every
        try:
            self._connection = _open_connection(socket, http)
            self._every = int(min(max(float(every), 0.2), 3600.0) * _SECOND)
            placed = _rank_fields(rank, world_size, gpus=gpus, parallel=parallel)
            fields = {"run": run or os.environ.get("GPU_EFFICIENCY_RUN", ""), **placed, "model": model}
            fields.update({"parallel": parallel, "pipeline": pipeline, "dtype": dtype, "recompute": recompute})
            self._head = _head(fields)
            if not self.closed:
                atexit.register(self.close)
                self._send_soon(clock())
        except Exception as error:  # noqa: BLE001 - losing a figure is better than ending the training
            self.failed(error)

    @property
    def refusal(self) -> str:
        """The daemon's reason for rejecting the last rejected message; empty if none was rejected."""
        return "" if self._connection is None else self._connection.refusal

    @property
    def closed(self) -> bool:
        """Whether no report can be sent: after close(), in a fork, in a copy, or without an address."""
        return self._connection is None or self._connection.closed()

    def step(
        self,
        *,
        tokens: float | None = None,
        padding: float | None = None,
        samples: float | None = None,
        loss: Any = None,
        step: int | None = None,
        epoch: float | None = None,
        flops: float | None = None,
        hardware_flops: float | None = None,
        flops_16bit: float | None = None,
    ) -> None:
        """Report a completed optimiser step, the `step`-th of the run (1, 2, ...), with the figures of this step alone.

        `padding` is included in `tokens`. `flops` are the model's, if no `model` was given; `hardware_flops` include
        recomputation; `flops_16bit` are the part in 16 bits, if `dtype` is FP8 or FP4 and no `model` was given. Tensors
        are read only when a message is sent, and only then their device is synchronised.
        """
        try:
            self._steps += 1
            self._step = self._step + 1 if step is None else step
            figures = self._figures
            given = (tokens, padding, samples, flops, hardware_flops, flops_16bit)
            for name, value in zip(_FIGURES, given):  # noqa: B905  Python 3.8 has no `strict`
                if value is not None:
                    figures[name] += value
            if loss is not None or epoch is not None:
                self.note(loss=loss, epoch=epoch)
            if self._fresh:
                self._first()
            now = self._clock()
            if now >= self._due:
                self._message(now)
        except Exception as error:  # noqa: BLE001 - see __init__
            self.failed(error)

    def phase(self, name: str) -> _Phase:
        """Return a context manager; time inside counts as this phase (one of PHASES), except nested phases."""
        return _Phase(self, name)

    def checkpoint(self) -> _Phase:
        """Return a context manager for saving a checkpoint; it is counted unless an exception is raised inside."""
        return _Phase(self, "checkpoint")

    def evaluation(self) -> _Phase:
        """Return a context manager for an evaluation."""
        return _Phase(self, "evaluation")

    def iterate(self, loader: Any) -> _Timed:
        """Return an iterable with the same items and length; time spent in the loader counts as phase data."""
        return _Timed(self, loader)

    def started(self) -> None:
        """Report the end of the startup; the first phase of data and the first step do so too."""
        self.enter("compute", only_from="startup")

    @_safely
    def enter(self, name: str, *, only_from: str = "") -> None:
        """For hooks: end all open phases and begin this one; with `only_from` only if that is the innermost phase."""
        before = self._stack[-1]
        if name not in PHASES or name == before or (only_from and before != only_from):
            return
        now = self._charge(self._clock())
        self._stack[:] = [name]
        if name in LIVE or before in LIVE:
            self._send_soon(now)
        elif now >= self._due:
            self._message(now)

    @_safely
    def restored(self, step: int, highest_step: int | None = None) -> None:
        """Report that training resumes from a checkpoint of `step` (0: from the beginning).

        Steps up to `highest_step` count as repeated. Its default is the last step of this process, or the highest step
        that the daemon knows of the run.
        """
        if self._steps:
            self._message(self._clock())
        known = [int(number) for number in (highest_step, self._highest, self._step) if number]
        self._highest = max(known) if known and max(known) > step else self._highest
        self._step = step
        self._restart = True
        self._send_soon(self._clock())

    def note(self, *, loss: Any = None, epoch: float | None = None, flops: float = 0, checkpoints: int = 0) -> None:
        """Add figures outside of step(); they are sent with the next message."""
        try:
            if epoch is not None:
                self._epoch = epoch
            if loss is not None:
                self._loss = loss if type(loss) is float else _detached(loss)
                if type(loss) is float and loss - loss:  # true for nan and infinities; a later loss must not hide them
                    self._non_finite_loss = loss
            if flops:
                self._figures["model_flops"] += flops
            self._checkpoints += checkpoints
        except Exception as error:  # noqa: BLE001 - see __init__
            self.failed(error)

    @_safely
    def quality(self, name: str, value: Any, target: float | None = None, *, falls: bool = False) -> None:
        """Report a quality figure of the model and its target; `falls`: lower is better."""
        figure = float(value)
        if math.isfinite(figure) and (len(self._qualities) < _QUALITIES or name in self._qualities):
            entry = {"value": figure, "name": str(name)[:128], "target": target, "falls": falls}
            self._qualities[name] = {key: item for key, item in entry.items() if item is not None}
            self._send_soon(self._clock())

    @_safely
    def close(self) -> None:
        """Send the remaining figures and stop reporting. Called automatically when the process exits."""
        if self._connection is not None and not self.closed:
            now = self._charge(self._clock())
            self._stack[:] = ["compute"]
            self._message(now)
        if self._connection is not None:
            self._connection.close()
        self._due = _NEVER
        atexit.unregister(self.close)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle as a reporter that sends nothing: workers of a data loader are not training processes."""
        return _disabled_reporter, ()

    # -- phases --

    def begin(self, name: str) -> bool:
        """Begin a nested phase; returns False if the phase is unknown or begins in another thread."""
        if name not in PHASES:
            self.failed(ValueError(f"{name!r} is no phase: {', '.join(PHASES)}"))
            return False
        thread = get_ident()
        if thread != self._thread:
            if self._thread:  # an asynchronous checkpoint, for example: training continues meanwhile
                return False
            self._thread = thread
        if name == "data" and self._stack == ["startup"]:
            self.started()
        now = self._charge(self._clock())
        self._stack.append(name)
        if name in LIVE:
            self._send_soon(now)
        return True

    def end(self) -> None:
        """End the innermost phase."""
        now = self._charge(self._clock())
        name = self._stack.pop() if len(self._stack) > 1 else ""
        if name in LIVE:
            self._send_soon(now)
        elif now >= self._due:
            self._message(now)

    def _charge(self, now: int) -> int:
        """Add the time up to `now` to the innermost phase; returns `now`."""
        if now > self._charged_until:  # the end of the last message may lie ahead
            phase = self._stack[-1]
            self._spent[phase] = self._spent.get(phase, 0) + now - self._charged_until
            self._charged_until = now
        return now

    def _first(self) -> None:
        self._fresh = False
        if self._stack == ["startup"]:
            self.started()
        else:
            self._due = 0

    # -- messages --

    def _send_soon(self, now: int) -> None:
        """Send at once, or within `_LIVE_EVERY` if the rate limit is reached."""
        if self._sent_until - now <= _LIVE_BURST:
            self._sent_until = max(self._sent_until, now) + _LIVE_EVERY
            self._message(now)
        else:
            self._due = min(self._due, now + _LIVE_EVERY)

    def _message(self, now: int) -> None:
        """Send all figures since the last message that was sent, or keep them for the next one."""
        connection = self._connection
        if connection is None or connection.closed():
            self._due = _NEVER
            return
        self._due = now + self._every
        self._charge(now)
        if connection.ready(now):
            end = max(now // _MS * _MS, self._since + (_MS if self._steps else 0))
            if connection.send(self._packet(end), now):
                self._clear(end)
                return
        self.dropped += 1
        self._due = max(self._due, connection.retry)
        if now - self._since > _LONGEST:
            self._clear(now // _MS * _MS)

    def _packet(self, end: int) -> bytes:
        """Encode a message; its schema is docs/report.schema.json."""
        self._step = int(_figure(self._step) or 0)
        steps = min(self._steps, self._step)  # a job that counts from 0 reports its first step as number 0
        seconds = (end - self._since) / _SECOND
        fields: dict[str, Any] = {"at": end, "seconds": seconds, "steps": steps}
        fields["step"] = None if self._fresh and not self._step else self._step
        self._known.update(name for name, value in self._figures.items() if type(value) is not int or value)
        if seconds:
            fields.update({name: _figure(self._figures[name]) for name in sorted(self._known)})
            spent = {name: duration / _SECOND for name, duration in self._spent.items() if duration > 0 and name}
            fields["phases"] = {name: duration for name, duration in spent.items() if name != "compute"}
        fields["phase"] = next((name for name in reversed(self._stack) if name in LIVE), "")
        fields["epoch"] = _figure(self._epoch)
        fields["loss"] = _loss(self._loss if self._non_finite_loss is None else self._non_finite_loss)
        fields["quality"] = next(iter(self._qualities.values()), None)
        fields["checkpoints"] = self._checkpoints
        fields["restart"] = self._restart
        fields["highest_step"] = self._highest
        present = {name: value for name, value in fields.items() if value not in (None, "", {}) and value is not False}
        return (self._head + ", " + json.dumps(present)[1:]).encode()

    def _clear(self, end: int) -> None:
        """Reset all figures; the next interval starts at `end`."""
        self._since = end
        self._charged_until = max(self._charged_until, end)
        self._steps = 0
        self._figures = dict.fromkeys(_FIGURES, 0)
        self._checkpoints = 0
        self._epoch = None
        self._loss = None
        self._non_finite_loss = None
        self._spent = {}
        self._restart = False
        for name in list(self._qualities)[:1]:
            del self._qualities[name]

    def failed(self, error: Exception) -> None:
        """Record an error; only the first is logged."""
        try:
            if not self.error:
                _log.warning("gpu-efficiency: something could not be reported, training goes on: %r", error)
        except Exception:  # nosec B110  # noqa: BLE001, S110 - raised by one of the job's logging handlers
            pass
        self.error = self.error or repr(error)


class _Phase:
    """Context manager that measures the time of one phase."""

    def __init__(self, reporter: Reporter, name: str) -> None:
        self._reporter = reporter
        self._name = name
        self._inside = False

    def __enter__(self) -> None:
        try:
            self._inside = self._reporter.begin(self._name)
        except Exception as error:  # noqa: BLE001 - see Reporter.__init__
            self._reporter.failed(error)

    def __exit__(self, kind: object, *_: object) -> None:
        try:
            if self._name == "checkpoint" and kind is None:
                self._reporter.note(checkpoints=1)
            if self._inside:
                self._reporter.end()
        except Exception as error:  # noqa: BLE001 - see Reporter.__init__
            self._reporter.failed(error)


class _Timed:
    """A data loader whose time counts as phase data."""

    def __init__(self, reporter: Reporter, loader: Any) -> None:
        self._reporter = reporter
        self._loader = loader

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        data = self._reporter.phase("data")
        with data:
            items = iter(self._loader)
        while True:
            with data:
                try:
                    item = next(items)
                except StopIteration:
                    return
            yield item


# -- connection to the daemon --


class _DaemonConnection:
    """A non-blocking connection to the unix socket, or by HTTP to 127.0.0.1 if the socket is not available.

    HTTP needs neither a thread nor a timeout: on loopback the connection is established when connect() returns. It is
    kept open, so that the daemon identifies the process only once; responses are read at the next message.
    """

    def __init__(self, path: str, web: tuple[str, int, str] | None) -> None:
        self.refusal = ""
        self.retry = 0
        self._socket_path = path
        self._http_address = web
        self._pid = os.getpid()
        self._socket: sockets.socket | None = None
        self._by_http = False
        self._logged_refusals: set[str] = set()

    def closed(self) -> bool:
        """Whether no message can be sent: closed, without an address, or in a fork of the process that created it."""
        return os.getpid() != self._pid or not (self._socket_path or self._http_address)

    def ready(self, now: int) -> bool:
        """Read responses; returns whether a message can be tried now."""
        self._read_responses()
        return self._socket is not None or now >= self.retry

    def send(self, packet: bytes, now: int) -> bool:
        """Send a message; returns whether it was sent. Reconnects at most once every ten seconds."""
        if self._put(packet):
            return True
        if now < self.retry:
            return False
        self.retry = now + _RETRY
        return any(
            self._connect(address) and self._put(packet)
            for address in (self._socket_path, self._http_address)
            if address
        )

    def close(self) -> None:
        """Read the last responses and disconnect.

        With HTTP it waits up to 50 ms, the only wait: after disconnecting, the daemon cannot identify the process.
        """
        if self._socket is not None and self._by_http and not self.closed():
            self._socket.settimeout(0.05)
        self._read_responses()
        self._drop()
        self._socket_path, self._http_address = "", None

    def _connect(self, address: str | tuple[str, int, str]) -> bool:
        self._by_http = not isinstance(address, str)
        try:
            if isinstance(address, str):
                self._socket = sockets.socket(sockets.AF_UNIX, sockets.SOCK_SEQPACKET)
                self._socket.settimeout(0)
                self._socket.connect(address)
            else:
                family = sockets.AF_INET6 if ":" in address[0] else sockets.AF_INET
                self._socket = sockets.socket(family, sockets.SOCK_STREAM)
                self._socket.settimeout(0)
                self._socket.connect_ex(address[:2])
        except (OSError, AttributeError):  # AttributeError: a system without unix sockets, which has no daemon
            self._drop()
        return self._socket is not None

    def _put(self, packet: bytes) -> bool:
        """Send the whole packet; disconnects and returns False otherwise."""
        if self._socket is None:
            return False
        whole = self._request(packet) if self._by_http else packet
        try:
            if self._socket.send(whole, sockets.MSG_NOSIGNAL) == len(whole):
                return True
        except OSError:
            pass
        self._drop()
        return False

    def _request(self, packet: bytes) -> bytes:
        host, port, path = self._http_address or ("", 0, "")
        head = f"POST {path} HTTP/1.1\r\nHost: {host}:{port}\r\nContent-Type: application/json\r\n"
        return f"{head}Content-Length: {len(packet)}\r\n\r\n".encode() + packet

    def _read_responses(self) -> None:
        """Read the daemon's responses; the unix socket sends none for accepted messages."""
        data = b""
        for _ in range(16):
            try:
                data = b"" if self._socket is None else self._socket.recv(4096)
            except (BlockingIOError, sockets.timeout):  # noqa: UP041 - not a TimeoutError before Python 3.10
                break
            except OSError:
                data = b""
            if not data:
                self._drop()
                break
            self._handle_response(data)

    def _handle_response(self, data: bytes) -> None:
        for response in data.split(b"HTTP/1.1 ")[1:] if self._by_http else [data]:
            try:
                if not (self._by_http and response[:1] == b"2"):
                    body = json.loads(response.rpartition(b"\r\n\r\n")[2])
                    self.refusal = f"{body['field']}: {body['error']}" if body.get("field") else str(body["error"])
            except (ValueError, LookupError, TypeError, AttributeError):
                self.refusal = repr(response[:200])
        if self.refusal and self.refusal not in self._logged_refusals and len(self._logged_refusals) < _REFUSALS:
            self._logged_refusals.add(self.refusal)
            _log.warning("gpu-efficiency: the daemon refuses what this process reports: %s", self.refusal)

    def _drop(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None


def _open_connection(path: str | None, url: str | None) -> _DaemonConnection:
    """Use the given addresses, else those of the environment, else the daemon's default socket."""
    address = os.environ.get("GPU_EFFICIENCY_HTTP", "") if url is None else url
    return _DaemonConnection(
        os.environ.get("GPU_EFFICIENCY_SOCKET", SOCKET) if path is None else path, _address(address)
    )


def _address(url: str) -> tuple[str, int, str] | None:
    """Split http://127.0.0.1:PORT/PATH into host, port and path; no DNS lookups, which could block."""
    if not url:
        return None
    place, _, path = url.partition("://")[2].partition("/")
    host, _, port = place.rpartition(":")
    host = {"localhost": "127.0.0.1", "[::1]": "::1"}.get(host, host)
    if not url.startswith("http://") or not port.isdigit() or not (host == "::1" or host.startswith("127.")):
        _log.warning("gpu-efficiency: %r is not http://127.0.0.1:PORT/v1/report, so it is not used", url)
        return None
    return host, int(port), "/" + path


# -- fields of messages --


def _rank_fields(
    rank: int | None, world_size: int | None, *, gpus: int | None, parallel: Mapping[str, int] | None
) -> dict[str, int | None]:
    """Rank, world size and GPUs of this process, as given or from the launcher's environment."""
    env = os.environ
    pairs = ([env.get(name, "") for name in pair] for pair in _RANKS)
    found = next(([int(each) for each in pair] for pair in pairs if all(map(str.isdigit, pair))), (None, None))
    share = math.prod(max(1, int((parallel or {}).get(name, 1))) for name in ("tensor", "pipeline", "context"))
    return {
        "rank": found[0] if rank is None else rank,
        "world_size": found[1] if world_size is None else world_size,
        "gpus": share if gpus is None else gpus,
    }


def _head(fields: Mapping[str, Any]) -> str:
    """The constant first part of every message, without the closing brace."""
    short = {name: value[:128] if isinstance(value, str) else value for name, value in fields.items()}
    present = {name: value for name, value in short.items() if value not in (None, "")}
    return json.dumps({"v": VERSION, **present}, default=_plain)[:-1]


def _plain(value: Any) -> Any:
    """Convert a mapping or a numpy number for JSON."""
    if isinstance(value, Mapping):
        return dict(value)
    return int(value) if hasattr(value, "__index__") else float(value)


def _figure(value: Any) -> float | int | None:
    """Convert a number or tensor to a number; None if it is negative, not finite or not a number."""
    try:
        number = value if type(value) is int else float(value)
        return number if number >= 0 and math.isfinite(number) else None
    except Exception:  # noqa: BLE001 - tensor libraries raise exceptions of their own
        return None


def _loss(value: Any) -> float | str | None:
    """Convert a loss for JSON: nan and infinity become text; None if it is not a number."""
    try:
        number = float(value)
    except Exception:  # noqa: BLE001 - see _figure
        return None
    return number if math.isfinite(number) else str(number)


def _detached(loss: Any) -> Any:
    """Detach a tensor from its graph, which it would keep in memory."""
    return loss.detach() if hasattr(loss, "detach") else loss


def _disabled_reporter() -> Reporter:
    return Reporter(socket="", http="")


# -- callbacks for frameworks --

_trainings: dict[str, int] = {}
"""Trainings that callbacks have reported in this process, by run."""


def hugging_face(**options: Any) -> Any:
    """Return a transformers.TrainerCallback; `options` are those of Reporter.

    Reports steps, epochs, logged losses, tokens (with include_num_input_tokens_seen), checkpoints, evaluations,
    resumption and, without a `model`, the FLOPs that the Trainer counts, where it counts the model's. The Trainer
    updates these only when it logs; steps in between are reported with the FLOPs per step of the last log, steps before
    the first log without FLOPs. `recompute` is `full` by default if the Trainer checkpoints activations.
    """
    base = importlib.import_module("transformers").TrainerCallback
    return type("GpuEfficiency", (_HuggingFace, base), {})(options)


def lightning(count: Callable[[Any], Mapping[str, Any]] | None = None, **options: Any) -> Any:
    """Return a Callback of lightning or pytorch_lightning; `options` are those of Reporter.

    `count` returns the figures of a batch: {"tokens": ..., "padding": ..., "samples": ...}; by default the tokens are
    the size of `input_ids`. Steps, epochs, losses, checkpoints, validation and resumption come from the Trainer.
    """
    try:
        base = importlib.import_module("lightning.pytorch").Callback
    except ImportError:
        base = importlib.import_module("pytorch_lightning").Callback
    return _lightning(base, count, options)


def _lightning(base: Any, count: Callable[[Any], Mapping[str, Any]] | None, options: dict[str, Any]) -> Any:
    return type("GpuEfficiency", (_Lightning, base), {})(base, count, options)


class _Callback:
    """A callback's reporter. From the second training of a process on, each is a run: #2 follows the run's name."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        self._options = options
        self._reporter = _disabled_reporter()
        self._run = ""

    def _open(self, trainer: Any, number: int = 1) -> None:
        """Open a reporter for the training of that number, unless it is open."""
        run = self._name() if number == 1 else f"{self._name()}#{number}"
        if run != self._run:
            self._reporter.close()
        if self._reporter.closed:
            self._reporter = Reporter(**{**self._found(trainer), **self._options, "run": run})
            self._run = run

    def _begin(self, trainer: Any, *, resumed: bool) -> None:
        """Open a reporter for the training that begins; one that resumes is the latest."""
        name = self._name()
        if not resumed or name not in _trainings:
            _trainings[name] = _trainings.get(name, 0) + 1
        self._open(trainer, _trainings[name])

    def _name(self) -> str:
        return (self._options.get("run") or os.environ.get("GPU_EFFICIENCY_RUN", ""))[:120]

    def _found(self, trainer: Any) -> dict[str, Any]:
        """Defaults of the reporter's arguments."""
        raise NotImplementedError


class _HuggingFace(_Callback):
    """The hooks of a transformers.TrainerCallback."""

    def __init__(self, options: dict[str, Any]) -> None:
        super().__init__(options)
        self._tokens = 0
        self._flos: _FlopsPerStep | None = None

    def _found(self, trainer: Any) -> dict[str, Any]:
        world = trainer.world_size * max(1, trainer.n_gpu)
        sharded = getattr(trainer, "fsdp_config", None) or {}
        recompute = "full" if trainer.gradient_checkpointing or sharded.get("activation_checkpointing") else ""
        return {"rank": trainer.process_index, "world_size": world, "gpus": world, "recompute": recompute}

    @_safely
    def on_init_end(self, args: Any, *_: Any, **__: Any) -> None:
        self._open(args)

    @_safely
    def on_train_begin(self, args: Any, state: Any, *_: Any, model: Any = None, **__: Any) -> None:
        counted = "model" not in self._options and _counts_model_flops(args, model)
        self._tokens, self._flos = state.num_input_tokens_seen, _FlopsPerStep(state.total_flos) if counted else None
        self._begin(args, resumed=state.global_step > 0)
        if state.global_step:
            self._reporter.restored(state.global_step)
        self._reporter.enter("data")

    @_safely
    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self._reporter.enter("compute")

    @_safely
    def on_step_end(self, _: Any, state: Any, control: Any, **__: Any) -> None:
        seen = int(state.num_input_tokens_seen)
        tokens, self._tokens = seen - self._tokens, seen
        flops = None if self._flos is None else self._flos.step()
        self._reporter.step(step=state.global_step, epoch=state.epoch, tokens=tokens or None, flops=flops)
        self._after(control)

    @_safely
    def on_epoch_end(self, _: Any, __: Any, control: Any, **___: Any) -> None:
        self._after(control)

    @_safely
    def on_log(self, _: Any, state: Any, __: Any, logs: Any = None, **___: Any) -> None:
        if self._flos is not None:
            self._flos.seen(float(state.total_flos))
        if "loss" in (logs or {}):
            self._reporter.note(loss=float(logs["loss"]))

    @_safely
    def on_prediction_step(self, *_: Any, **__: Any) -> None:
        self._reporter.enter("evaluation", only_from="data")

    @_safely
    def on_evaluate(self, _: Any, __: Any, control: Any, **___: Any) -> None:
        self._reporter.enter("checkpoint" if control.should_save else "data", only_from="evaluation")

    @_safely
    def on_save(self, *_: Any, **__: Any) -> None:
        self._reporter.note(checkpoints=1)
        self._reporter.enter("data", only_from="checkpoint")

    @_safely
    def on_train_end(self, _: Any, state: Any, *__: Any, **___: Any) -> None:
        if self._flos is not None:
            self._reporter.note(flops=self._flos.rest(float(state.total_flos)))
        self._reporter.close()

    def _after(self, control: Any) -> None:
        """Enter the phase between two steps: evaluation first, then checkpoint, otherwise data."""
        saving = "checkpoint" if control.should_save else "data"
        self._reporter.enter("evaluation" if control.should_evaluate else saving)


def _counts_model_flops(args: Any, model: Any) -> bool:
    """Whether total_flos are the model's FLOPs: 6 for each element of the main input and parameter in this process.

    FSDP and ZeRO-3 leave each process a part of the parameters; frozen ones take 4, idle experts none; pixels are no
    tokens.
    """
    launched = any(os.environ.get(f"ACCELERATE_USE_{name}", "").lower() == "true" for name in ("FSDP", "DEEPSPEED"))
    sharded = launched or any(getattr(args, name, None) for name in ("fsdp", "deepspeed"))
    if sharded or getattr(model, "main_input_name", "input_ids") != "input_ids":
        return False
    sizes = [(each.numel(), each.requires_grad) for each in model.parameters()]
    frozen = sum(size for size, trained in sizes if not trained)
    settings = str(getattr(getattr(model, "config", None), "to_dict", dict)())
    sparse = any(name in settings for name in ("num_experts", "num_local_experts", "n_routed_experts"))
    return 100 * frozen <= sum(size for size, _ in sizes) and not sparse


class _FlopsPerStep:
    """Estimates the FLOPs of each step from a total that is updated now and then; each update corrects the error."""

    def __init__(self, total: float) -> None:
        self._total = total
        self._steps = 0
        self._rate: float | None = None
        self._owed = 0.0
        self._per_step = 0.0

    def step(self) -> float | None:
        """FLOPs to report for a completed step; None before the first update."""
        self._steps += 1
        if self._rate is None:
            return None
        self._owed -= self._per_step
        return self._per_step

    def seen(self, total: float) -> None:
        """Update the total over all steps so far."""
        if self._steps and total > self._total:
            added = total - self._total
            self._owed = 0.0 if self._rate is None else self._owed + added
            self._rate = added / self._steps
            self._per_step = max(0.0, self._rate + self._owed / self._steps)
            self._total, self._steps = total, 0

    def rest(self, total: float) -> float:
        """FLOPs not reported yet, at the end of the training."""
        self.seen(total)
        return max(0.0, self._owed)


class _Lightning(_Callback):
    """The hooks of a Lightning Callback."""

    def __init__(self, base: Any, count: Callable[[Any], Mapping[str, Any]] | None, options: dict[str, Any]) -> None:
        super().__init__(options)
        self._arguments = (base, count, options)
        self._resumed = False
        self._steps = 0
        self._batch: dict[str, Any] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle by arguments: Trainers that spawn processes pickle their callbacks."""
        return _lightning, self._arguments

    def _found(self, trainer: Any) -> dict[str, Any]:
        """Lightning's own launcher sets no RANK."""
        return {"rank": trainer.global_rank, "world_size": trainer.world_size}

    @_safely
    def setup(self, trainer: Any, *_: Any, **__: Any) -> None:
        self._open(trainer)

    @_safely
    def on_load_checkpoint(self, *_: Any, **__: Any) -> None:
        self._resumed = True

    @_safely
    def on_train_start(self, trainer: Any, *_: Any, **__: Any) -> None:
        self._steps = trainer.global_step
        self._begin(trainer, resumed=self._steps > 0)
        if self._resumed:
            self._reporter.restored(trainer.global_step)
        self._resumed = False
        trainer.save_checkpoint = self._timed(trainer.save_checkpoint)
        self._reporter.enter("data")

    @_safely
    def on_train_batch_start(self, *_: Any, **__: Any) -> None:
        self._reporter.enter("compute")

    @_safely
    def on_train_batch_end(self, trainer: Any, _: Any, outputs: Any, batch: Any, *__: Any, **___: Any) -> None:
        for name, figure in self._counted(batch).items():
            self._batch[name] = self._batch.get(name, 0) + figure
        if trainer.global_step > self._steps:
            self._steps = trainer.global_step
            loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
            self._reporter.step(step=self._steps, epoch=trainer.current_epoch, loss=loss, **self._batch)
            self._batch = {}
        self._reporter.enter("data")

    @_safely
    def on_validation_start(self, *_: Any, **__: Any) -> None:
        self._reporter.enter("evaluation", only_from="data")

    @_safely
    def on_validation_end(self, *_: Any, **__: Any) -> None:
        self._reporter.enter("data", only_from="evaluation")

    @_safely
    def teardown(self, trainer: Any, *_: Any, **__: Any) -> None:
        vars(trainer).pop("save_checkpoint", None)
        self._reporter.close()

    def _counted(self, batch: Any) -> Mapping[str, Any]:
        count = self._arguments[1]
        if count is not None:
            return count(batch)
        countable = isinstance(batch, Mapping) and hasattr(batch.get("input_ids"), "numel")
        return {"tokens": batch["input_ids"].numel()} if countable else {}

    def _timed(self, save: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap the Trainer's save_checkpoint, because no hook is called after a checkpoint was written."""

        @functools.wraps(save)
        def timed(*args: Any, **named: Any) -> Any:
            with self._reporter.checkpoint():
                return save(*args, **named)

        return timed
