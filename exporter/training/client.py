"""What a training job says how it is doing with: one file, to be copied beside a training script as it is.

    reporter = Reporter(model={"parameters": 7e9, "layers": 32, "heads": 32, "head_size": 128, "sequence": 4096})
    for batch in reporter.iterate(loader):
        ...
        reporter.step(tokens=batch.numel())

Owns the figures between two messages and the way to the daemon of this node. Refuses to slow or to break training: it
never waits, never raises, starts no thread, and what cannot be sent is kept for later and counted. Needs Python 3.8
and nothing else, which is why it is one file, and longer than the others. What the fields mean: docs/client.md.
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
from typing import Any

VERSION = 1
SOCKET = "/run/gpu-efficiency/report.sock"
PHASES = ("startup", "restore", "data", "compute", "communication", "bubble", "checkpoint", "evaluation", "idle")
LIVE = frozenset(("startup", "restore", "checkpoint", "evaluation", "idle"))
"""Phases that are told when they begin and when they end: they may last, and no step ends in them."""
_FIGURES = ("tokens", "padding", "samples", "model_flops", "hardware_flops")
_RANKS = (
    ("RANK", "WORLD_SIZE"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("PMI_RANK", "PMI_SIZE"),
    ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),
)
"""Where launchers tell a process its place: torchrun, Open MPI, MPICH, srun. Slurm tells the number of tasks of a step
in processes that srun has started only; SLURM_NTASKS is in the batch script too, which is no rank."""
_SECOND = 1_000_000_000
_MS = 1_000_000
_RETRY = 10 * _SECOND
_LONGEST = 86_000 * _SECOND
"""The daemon takes intervals of a day at most: figures that could not be sent for longer are let go."""
_LIVE_EVERY, _LIVE_BURST = _SECOND // 4, 2 * _SECOND
"""Phases that come and go quickly are told 4 times a second in the long run: the daemon takes 10 messages a second."""
_QUALITIES = 16
"""That wait to be told: a message has one."""
_REFUSALS = 8
"""Different ones that are logged."""
_NEVER = 1 << 62
_log = logging.getLogger("gpu_efficiency")


class Reporter:
    """Reports of one training process; see docs/client.md. Make it before the model is built, to have startup counted.

    `gpus` are those whose figures are told together. Without it they are the GPUs that share one batch (tensor x
    pipeline x context): so tell the tokens of the batch that this process has loaded.
    `socket` and `http` are paths of the daemon; empty ones: it is silent. `dropped` counts messages that could not be
    sent, `refusal` is what the daemon has said against the last one it refused, `error` what went wrong in here.
    """

    _tokens: Any
    _padding: Any
    _samples: Any
    _model_flops: Any
    _hardware_flops: Any
    _step: Any
    _epoch: Any
    _loss: Any
    _odd: float | None
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
            self._every = self._due_in(every)
            placed = _rank_fields(rank, world_size, gpus=gpus, parallel=parallel)
            fields = {"run": run or os.environ.get("GPU_EFFICIENCY_RUN", ""), **placed, "model": model}
            fields.update({"parallel": parallel, "pipeline": pipeline, "dtype": dtype, "recompute": recompute})
            self._head = _head(fields)
            if not self.closed:
                atexit.register(self.close)
                self._send_soon(clock())
        except Exception as error:  # noqa: BLE001 - a figure less is nothing, a dead training run is much
            self.failed(error)

    @property
    def refusal(self) -> str:
        """What the daemon has said against the last message that it refused; empty: nothing."""
        return "" if self._connection is None else self._connection.refusal

    @property
    def closed(self) -> bool:
        """Whether nothing that is told goes anywhere: after close(), in a fork, in a copy, or without a way."""
        return self._connection is None or self._connection.mute()

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
    ) -> None:
        """Say that an optimiser step has ended, the `step`-th of the run (1, 2, ...), with figures of it alone.

        `padding` is a part of `tokens`. `flops` are the model's own, where no `model` was given; `hardware_flops` have
        recomputation with them. A tensor is read when a message goes out, and only then its device is waited for.
        """
        try:
            self._steps += 1
            self._step = self._step + 1 if step is None else step
            if tokens is not None:
                self._tokens += tokens
            if padding is not None:
                self._padding += padding
            if samples is not None:
                self._samples += samples
            if flops is not None:
                self._model_flops += flops
            if hardware_flops is not None:
                self._hardware_flops += hardware_flops
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
        """Give a context manager: the time inside is of that phase (one of PHASES), less that of phases within it."""
        return _Phase(self, name)

    def checkpoint(self) -> _Phase:
        """Give a context manager around the writing of a checkpoint; it counts when nothing is raised in it."""
        return _Phase(self, "checkpoint")

    def evaluation(self) -> _Phase:
        """Give a context manager around an evaluation."""
        return _Phase(self, "evaluation")

    def iterate(self, loader: Any) -> _Timed:
        """Give an iterable of the same items and length: the time that the loader takes is of phase data."""
        return _Timed(self, loader)

    def started(self) -> None:
        """Say that the startup is over. The first phase of data says so too, and the first step."""
        self.enter("compute", only_from="startup")

    def enter(self, name: str, *, only_from: str = "") -> None:
        """For hooks: end whatever phase is open, and begin this one; with `only_from` only if that is the open one."""
        try:
            before = self._stack[-1]
            if name not in PHASES or name == before or (only_from and before != only_from):
                return
            now = self._charge(self._clock())
            self._stack[:] = [name]
            if name in LIVE or before in LIVE:
                self._send_soon(now)
            elif now >= self._due:
                self._message(now)
        except Exception as error:  # noqa: BLE001 - see __init__
            self.failed(error)

    def restored(self, step: int, highest_step: int | None = None) -> None:
        """Say that training goes on from a checkpoint of `step`, and how far the run had come before, if known.

        0: from the beginning. Steps up to the highest are counted as done again. Without `highest_step` it is the
        last step of this process, or what the daemon remembers of the run.
        """
        try:
            if self._steps:
                self._message(self._clock())
            reached = [int(each) for each in (highest_step, self._highest, self._step) if each]
            self._highest = max(reached) if reached and max(reached) > step else self._highest
            self._step = step
            self._restart = True
            self._send_soon(self._clock())
        except Exception as error:  # noqa: BLE001 - see __init__
            self.failed(error)

    def note(self, *, loss: Any = None, epoch: float | None = None, flops: float = 0, checkpoints: int = 0) -> None:
        """Tell figures that are known outside of step(): they go out with the next message."""
        if epoch is not None:
            self._epoch = epoch
        if loss is not None:
            self._loss = loss if type(loss) is float else _detached(loss)
            if type(loss) is float and loss - loss:  # nan and infinities: no later loss may hide them
                self._odd = loss
        if flops:
            self._model_flops += flops
        self._checkpoints += checkpoints

    def quality(self, name: str, value: Any, target: float | None = None, *, falls: bool = False) -> None:
        """Tell what the model is good for, and what is wanted; `falls`: less is better."""
        try:
            figure = float(value)
            if math.isfinite(figure) and (len(self._qualities) < _QUALITIES or name in self._qualities):
                entry = {"value": figure, "name": str(name)[:128], "target": target, "falls": falls}
                self._qualities[name] = {key: each for key, each in entry.items() if each is not None}
                self._send_soon(self._clock())
        except Exception as error:  # noqa: BLE001 - see __init__
            self.failed(error)

    def close(self) -> None:
        """Send what is left and be silent from now on. Done by itself when the process ends; once is enough."""
        try:
            if self._connection is not None and not self.closed:
                now = self._charge(self._clock())
                self._stack[:] = ["compute"]
                self._message(now)
            if self._connection is not None:
                self._connection.close()
            self._due = _NEVER
            atexit.unregister(self.close)
        except Exception as error:  # noqa: BLE001 - see __init__
            self.failed(error)

    def __reduce__(self) -> tuple[Any, ...]:
        """Give a silent one to whoever copies it: workers of a data loader are no training processes."""
        return _silent, ()

    # -- phases --

    def begin(self, name: str) -> bool:
        """Begin a phase inside the open one; False: not, for it is unknown or begins in another thread."""
        if name not in PHASES:
            self.failed(ValueError(f"{name!r} is no phase: {', '.join(PHASES)}"))
            return False
        here = get_ident()
        if here != self._thread:
            if self._thread:  # an asynchronous checkpoint, say: training goes on meanwhile
                return False
            self._thread = here
        if name == "data" and self._stack == ["startup"]:
            self.started()
        now = self._charge(self._clock())
        self._stack.append(name)
        if name in LIVE:
            self._send_soon(now)
        return True

    def end(self) -> None:
        """End the phase that began last."""
        now = self._charge(self._clock())
        name = self._stack.pop() if len(self._stack) > 1 else ""
        if name in LIVE:
            self._send_soon(now)
        elif now >= self._due:
            self._message(now)

    def _charge(self, now: int) -> int:
        """Let the open phase have the time up to now, and give it back."""
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
        """Send at once, or, when that was done too often, soon."""
        if self._sent_until - now <= _LIVE_BURST:
            self._sent_until = max(self._sent_until, now) + _LIVE_EVERY
            self._message(now)
        else:
            self._due = min(self._due, now + _LIVE_EVERY)

    def _message(self, now: int) -> None:
        """Send all figures since the last message that went out, or keep them."""
        connection = self._connection
        if connection is None or connection.mute():
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
        """One message, as the daemon's schema wants it: exporter/training/message.py."""
        self._step = _whole(self._step)
        steps = min(self._steps, self._step)  # to a job that counts from 0 the first step is none
        seconds = (end - self._since) / _SECOND
        fields: dict[str, Any] = {"at": end, "seconds": seconds, "steps": steps}
        fields["step"] = None if self._fresh and not self._step else self._step
        self._known.update(name for name in _FIGURES if not _zero(getattr(self, "_" + name)))
        if seconds:
            fields.update({name: _figure(getattr(self, "_" + name)) for name in sorted(self._known)})
            spent = {name: took / _SECOND for name, took in self._spent.items() if took > 0 and name}
            fields["phases"] = {name: took for name, took in spent.items() if name != "compute"}
        fields["phase"] = next((name for name in reversed(self._stack) if name in LIVE), "")
        fields["epoch"] = _figure(self._epoch)
        fields["loss"] = _loss(self._loss if self._odd is None else self._odd)
        fields["quality"] = next(iter(self._qualities.values()), None)
        fields["checkpoints"] = self._checkpoints
        fields["restart"] = self._restart
        fields["highest_step"] = self._highest
        wanted = {name: each for name, each in fields.items() if each not in (None, "", {}) and each is not False}
        return (self._head + ", " + json.dumps(wanted)[1:]).encode()

    def _clear(self, end: int) -> None:
        """Begin the next interval."""
        self._since = end
        self._steps = 0
        self._tokens = 0
        self._padding = 0
        self._samples = 0
        self._model_flops = 0
        self._hardware_flops = 0
        self._checkpoints = 0
        self._epoch = None
        self._loss = None
        self._odd = None
        self._spent = {}
        self._restart = False
        for name in list(self._qualities)[:1]:
            del self._qualities[name]

    def _due_in(self, every: float) -> int:
        return int(min(max(float(every), 0.2), 3600.0) * _SECOND)

    def failed(self, error: Exception) -> None:
        """Keep what went wrong, and say it once."""
        try:
            if not self.error:
                _log.warning("gpu-efficiency: something could not be reported, training goes on: %r", error)
        except Exception:  # nosec B110  # noqa: BLE001, S110 - raised by a logging handler of the job's own
            pass
        self.error = self.error or repr(error)


class _Phase:
    """The time inside is of one phase."""

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
    """A loader whose own time is of phase data."""

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


# -- the way to the daemon --


class _DaemonConnection:
    """A connection that never waits: to the unix socket, or by HTTP to 127.0.0.1 where that is not to be had.

    HTTP needs neither a thread nor a time-out: on loopback the kernel has made the connection when connect() returns.
    It is kept, so that the daemon finds out once whose it is, and what is answered is read at the next message.
    """

    def __init__(self, path: str, web: tuple[str, int, str] | None) -> None:
        self.refusal = ""
        self.retry = 0
        self._path = path
        self._web = web
        self._pid = os.getpid()
        self._socket: sockets.socket | None = None
        self._by_http = False
        self._logged_refusals: set[str] = set()

    def mute(self) -> bool:
        """Whether nothing can ever be sent: closed, no way known, or a fork of the process that made it."""
        return os.getpid() != self._pid or not (self._path or self._web)

    def ready(self, now: int) -> bool:
        """Whether sending is worth a try; reads what has been answered."""
        self._read_responses()
        return self._socket is not None or now >= self.retry

    def send(self, packet: bytes, now: int) -> bool:
        """Whether it went out. A connection that fails is made anew, but not twice within ten seconds."""
        if self._put(packet):
            return True
        if now < self.retry:
            return False
        self.retry = now + _RETRY
        return any(self._connect(way) and self._put(packet) for way in (self._path, self._web) if way)

    def close(self) -> None:
        """Read what has been answered, and be mute.

        Only here, and only by HTTP, it waits, 50 ms at most: a connection that is gone has no process to be told by.
        """
        if self._socket is not None and self._by_http and not self.mute():
            self._socket.settimeout(0.05)
        self._read_responses()
        self._drop()
        self._path, self._web = "", None

    def _connect(self, way: str | tuple[str, int, str]) -> bool:
        self._by_http = not isinstance(way, str)
        try:
            if isinstance(way, str):
                self._socket = sockets.socket(sockets.AF_UNIX, sockets.SOCK_SEQPACKET)
                self._socket.settimeout(0)
                self._socket.connect(way)
            else:
                self._socket = sockets.socket(
                    sockets.AF_INET6 if ":" in way[0] else sockets.AF_INET, sockets.SOCK_STREAM
                )
                self._socket.settimeout(0)
                self._socket.connect_ex(way[:2])
        except (OSError, AttributeError):  # a system without such sockets has no daemon either
            self._drop()
        return self._socket is not None

    def _put(self, packet: bytes) -> bool:
        """Send all of it, or be without a connection."""
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
        host, port, path = self._web or ("", 0, "")
        head = f"POST {path} HTTP/1.1\r\nHost: {host}:{port}\r\nContent-Type: application/json\r\n"
        return f"{head}Content-Length: {len(packet)}\r\n\r\n".encode() + packet

    def _read_responses(self) -> None:
        """Read what has been answered. Silence means taken."""
        data = b""
        for _ in range(16):
            try:
                data = b"" if self._socket is None else self._socket.recv(4096)
            except (BlockingIOError, sockets.timeout):  # noqa: UP041 - one is the other from Python 3.10 on
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
    """Those given, else those of the environment, else the daemon's usual socket."""
    address = os.environ.get("GPU_EFFICIENCY_HTTP", "") if url is None else url
    return _DaemonConnection(
        os.environ.get("GPU_EFFICIENCY_SOCKET", SOCKET) if path is None else path, _address(address)
    )


def _address(url: str) -> tuple[str, int, str] | None:
    """Host, port and path of http://127.0.0.1:PORT/PATH; no name is looked up, for that may take long."""
    if not url:
        return None
    place, _, path = url.partition("://")[2].partition("/")
    host, _, port = place.rpartition(":")
    host = {"localhost": "127.0.0.1", "[::1]": "::1"}.get(host, host)
    if not url.startswith("http://") or not port.isdigit() or not (host == "::1" or host.startswith("127.")):
        _log.warning("gpu-efficiency: %r is not http://127.0.0.1:PORT/v1/report, so it is not used", url)
        return None
    return host, int(port), "/" + path


# -- what is said --


def _rank_fields(
    rank: int | None, world_size: int | None, *, gpus: int | None, parallel: Mapping[str, int] | None
) -> dict[str, int | None]:
    """The place of this process in its job, as given or as its launcher tells it."""
    env = os.environ
    names = next((pair for pair in _RANKS if env.get(pair[0], "").isdigit()), ("", ""))
    found = [int(env[name]) if env.get(name, "").isdigit() else None for name in names]
    share = math.prod(max(1, int((parallel or {}).get(name, 1))) for name in ("tensor", "pipeline", "context"))
    return {
        "rank": found[0] if rank is None else rank,
        "world_size": found[1] if world_size is None else world_size,
        "gpus": share if gpus is None else gpus,
    }


def _head(fields: Mapping[str, Any]) -> str:
    """The part of every message that stays, without its last brace."""
    short = {name: each[:128] if isinstance(each, str) else each for name, each in fields.items()}
    wanted = {name: each for name, each in short.items() if each not in (None, "")}
    return json.dumps({"v": VERSION, **wanted}, default=_plain)[:-1]


def _plain(value: Any) -> Any:
    """What JSON has no word for: a mapping, a number of numpy's."""
    if isinstance(value, Mapping):
        return dict(value)
    return int(value) if hasattr(value, "__index__") else float(value)


def _zero(value: Any) -> bool:
    return type(value) is int and value == 0


def _figure(value: Any) -> float | int | None:
    """A number, whatever it comes in (a tensor, say); None: none that could be told."""
    try:
        plain = value if type(value) is int else float(value)
        return plain if plain >= 0 and math.isfinite(plain) else None
    except Exception:  # noqa: BLE001 - what a tensor raises is its library's own
        return None


def _whole(value: Any) -> int:
    return int(_figure(value) or 0)


def _loss(value: Any) -> float | str | None:
    """JSON has no words for nan and infinity: they go as text."""
    try:
        plain = float(value)
    except Exception:  # noqa: BLE001 - see _figure
        return None
    return plain if math.isfinite(plain) else str(plain)


def _detached(loss: Any) -> Any:
    """Without the graph that a tensor holds on to."""
    return loss.detach() if hasattr(loss, "detach") else loss


def _silent() -> Reporter:
    return Reporter(socket="", http="")


# -- one line in a framework --


def hugging_face(**options: Any) -> Any:
    """Give a transformers.TrainerCallback; `options` are a Reporter's.

    Steps, epochs, losses that are logged, tokens (with include_num_input_tokens_seen), checkpoints, evaluations,
    resumption, and, without a `model`, the FLOPs that the Trainer counts. It tells these when it logs: until then the
    steps are told at the pace of those before, so those before the first log go without.
    """
    base = importlib.import_module("transformers").TrainerCallback
    return type("GpuEfficiency", (_HuggingFace, base), {})(options)


def lightning(count: Callable[[Any], Mapping[str, Any]] | None = None, **options: Any) -> Any:
    """Give a Callback of lightning or pytorch_lightning; `options` are a Reporter's.

    `count` gives the figures of a batch: {"tokens": ..., "padding": ..., "samples": ...}; without it a batch's
    `input_ids` are its tokens. Steps, epochs, losses, checkpoints, validation and resumption are the Trainer's.
    """
    try:
        base = importlib.import_module("lightning.pytorch").Callback
    except ImportError:
        base = importlib.import_module("pytorch_lightning").Callback
    return _lightning(base, count, options)


def _lightning(base: Any, count: Callable[[Any], Mapping[str, Any]] | None, options: dict[str, Any]) -> Any:
    return type("GpuEfficiency", (_Lightning, base), {})(base, count, options)


def _safely(hook: Callable[..., None]) -> Callable[..., None]:
    """What another version of a framework does differently must not end the training."""

    @functools.wraps(hook)
    def run(self: Any, *args: Any, **named: Any) -> None:
        try:
            hook(self, *args, **named)
        except Exception as error:  # noqa: BLE001 - see Reporter.__init__
            self._reporter.failed(error)

    return run


class _HuggingFace:
    """What a Trainer says of itself, hook by hook."""

    def __init__(self, options: dict[str, Any]) -> None:
        self._options = options
        self._reporter = _silent()
        self._tokens = 0
        self._flos = _FlopsPerStep(0.0)

    def _open(self, args: Any) -> None:
        if self._reporter.closed:
            world = args.world_size * max(1, args.n_gpu)
            arguments = {"rank": args.process_index, "world_size": world, "gpus": world, **self._options}
            self._reporter = Reporter(**arguments)

    @_safely
    def on_init_end(self, args: Any, *_: Any, **__: Any) -> None:
        self._open(args)

    @_safely
    def on_train_begin(self, args: Any, state: Any, *_: Any, **__: Any) -> None:
        self._tokens, self._flos = state.num_input_tokens_seen, _FlopsPerStep(float(state.total_flos))
        self._open(args)
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
        flops = None if "model" in self._options else self._flos.step()
        self._reporter.step(step=state.global_step, epoch=state.epoch, tokens=tokens or None, flops=flops)
        self._after(control)

    @_safely
    def on_epoch_end(self, _: Any, __: Any, control: Any, **___: Any) -> None:
        self._after(control)

    @_safely
    def on_log(self, _: Any, state: Any, __: Any, logs: Any = None, **___: Any) -> None:
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
        if "model" not in self._options:
            self._reporter.note(flops=self._flos.rest(float(state.total_flos)))
        self._reporter.close()

    def _after(self, control: Any) -> None:
        """What comes between two steps: an evaluation first, then a checkpoint, else only data."""
        saving = "checkpoint" if control.should_save else "data"
        self._reporter.enter("evaluation" if control.should_evaluate else saving)


class _FlopsPerStep:
    """FLOPs of each step, of a sum that is told only now and then: those of the last steps, corrected at every sum."""

    def __init__(self, total: float) -> None:
        self._total = total
        self._steps = 0
        self._rate: float | None = None
        self._owed = 0.0
        self._each = 0.0

    def step(self) -> float | None:
        """FLOPs to tell of a step that has ended; None: not known yet."""
        self._steps += 1
        if self._rate is None:
            return None
        self._owed -= self._each
        return self._each

    def seen(self, total: float) -> None:
        """Learn the sum of all steps so far."""
        if self._steps and total > self._total:
            came = total - self._total
            self._owed = 0.0 if self._rate is None else self._owed + came
            self._rate = came / self._steps
            self._each = max(0.0, self._rate + self._owed / self._steps)
            self._total, self._steps = total, 0

    def rest(self, total: float) -> float:
        """FLOPs that were not told, at the end."""
        self.seen(total)
        return max(0.0, self._owed)


class _Lightning:
    """What a Lightning Trainer says of itself, hook by hook."""

    def __init__(self, base: Any, count: Callable[[Any], Mapping[str, Any]] | None, options: dict[str, Any]) -> None:
        self._made_of = (base, count, options)
        self._reporter = _silent()
        self._resumed = False
        self._steps = 0
        self._batch: dict[str, Any] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        """Trainers that spawn their processes send their callbacks along."""
        return _lightning, self._made_of

    @_safely
    def setup(self, *_: Any, **__: Any) -> None:
        if self._reporter.closed:
            self._reporter = Reporter(**self._made_of[2])

    @_safely
    def on_load_checkpoint(self, *_: Any, **__: Any) -> None:
        self._resumed = True

    @_safely
    def on_train_start(self, trainer: Any, *_: Any, **__: Any) -> None:
        self._steps = trainer.global_step
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
        count = self._made_of[1]
        if count is not None:
            return count(batch)
        there = isinstance(batch, Mapping) and hasattr(batch.get("input_ids"), "numel")
        return {"tokens": batch["input_ids"].numel()} if there else {}

    def _timed(self, save: Callable[..., Any]) -> Callable[..., Any]:
        """No hook is called when a checkpoint has been written, so the Trainer's own way to write one is timed."""

        @functools.wraps(save)
        def timed(*args: Any, **named: Any) -> Any:
            with self._reporter.checkpoint():
                return save(*args, **named)

        return timed
