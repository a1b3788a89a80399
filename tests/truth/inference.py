"""Servers for language models: busy, bursty, without requests, and hung.

A server that has no request is an idle allocation, also when its ranks poll for the next one inside a kernel. What a
server does between iterations on its CPU is host overhead.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from random import Random

from tests.truth.causes import EXPOSED_COMMUNICATION, HUNG, IDLE_ALLOCATION, STARTUP
from tests.truth.kernels import decode, gemm, prefill
from tests.truth.loads import GB, Load, collective, mix, spin, wait, worthless
from tests.truth.tracks import Pattern, chain
from tests.truth.world import GPUS, Gpu, Hang, Holding, Job, Served, World, new_world

REPORT_MS = 10_000
"""A server's figures cover this long."""


@dataclass(frozen=True)
class Server:
    """What a replica does, by the fill of its batch."""

    levels: tuple[Pattern | Load, ...]
    """From the emptiest batch to the fullest."""
    idle: Load
    """Without requests."""
    prompts: Pattern | Load
    slots: int = 256
    tokens: float = 4000.0
    """Generated per second by a full batch."""


def _server(rng: Random, *, degree: int, gaps: float = 0.05, heavy: float = 0.1) -> Server:
    """Return a replica over `degree` GPUs; `heavy` is the share of its time for prompts."""
    share = 0.0 if degree == 1 else rng.uniform(0.06, 0.18)
    inner = collective(sm=rng.uniform(0.1, 0.25), dram=0.05, nvlink=rng.uniform(30, 140) * GB, watts=25)
    prompts = prefill(rng)
    if degree > 1:
        prompts = mix("prefill", ((0.85, prompts), (0.15, inner)))
    levels = tuple(
        chain(
            "serve",
            (heavy * (0.3 + fill), prompts),
            (1.0 - heavy * (0.3 + fill), decode(rng, batch=fill, gaps=gaps, inner=inner, share=share)),
        )
        for fill in (0.05, 0.2, 0.4, 0.6, 0.8, 1.0)
    )
    return Server(levels=levels, idle=wait(IDLE_ALLOCATION), prompts=prompts, tokens=rng.uniform(1500, 6000))


class Replica:
    """A server in operation on some GPUs of a world, which all do the same."""

    def __init__(self, world: World, job: Job, gpus: list[Gpu], server: Server, rng: Random) -> None:
        self.world, self.job, self.gpus, self.server, self.rng = world, job, gpus, server, rng
        world.holdings.append(Holding(job, tuple(gpu.index for gpu in gpus)))

    @property
    def now(self) -> int:
        """Milliseconds of the world."""
        return self.gpus[0].track.end

    def do(self, milliseconds: float, what: Pattern | Load) -> None:
        """Let all GPUs do the same."""
        end = self.now + max(1, round(milliseconds))
        for gpu in self.gpus:
            gpu.track.until(end, what)

    def start(self) -> None:
        """Load the weights and capture graphs, before the first request."""
        rng, trial = self.rng, worthless(mix("trial", ((0.4, gemm(self.rng)), (0.6, wait(STARTUP)))), STARTUP)
        self.do(rng.uniform(8e3, 25e3), wait(STARTUP, context=False))
        self.do(rng.uniform(10e3, 60e3), wait(STARTUP, pcie_rx=rng.uniform(1, 9) * GB, dram=0.01))
        for gpu in self.gpus:
            gpu.memory.append((self.now, gpu.condition.board.memory_gb * 1e9 * rng.uniform(0.88, 0.92)))
        self.do(rng.uniform(8e3, 40e3), trial)

    def serve(self, milliseconds: float, fill: float) -> None:
        """Serve with a batch filled to `fill`; 0: no request."""
        begin, server = self.now, self.server
        level = min(len(server.levels) - 1, int(fill * len(server.levels)))
        self.do(milliseconds, server.levels[level] if fill > 0 else server.idle)
        self.report(begin, running=round(fill * server.slots), tokens=fill * server.tokens)

    def report(self, begin: int, *, running: float, tokens: float, waiting: float = 0.0) -> None:
        """Record what the server would say about the time since `begin`."""
        seconds = (self.now - begin) / 1e3
        self.world.served.append(
            Served(
                job_id=self.job.job_id, start=begin, end=self.now, running=running, waiting=waiting,
                slots=self.server.slots, generated=tokens * seconds, prompted=tokens * seconds * 1.7,
                gpus=tuple(gpu.index for gpu in self.gpus),
            )
        )  # fmt: skip


Story = Callable[[Replica, Random], None]


def steady(replica: Replica, rng: Random) -> None:
    """Requests at a steady rate."""
    fill = rng.uniform(0.35, 0.95)
    while replica.now < replica.world.milliseconds:
        replica.serve(rng.uniform(2e3, 15e3), min(1.0, max(0.05, fill * rng.gauss(1.0, 0.1))))


def bursty(replica: Replica, rng: Random) -> None:
    """Bursts of 2 to 40 s with nothing for up to a minute between them."""
    while replica.now < replica.world.milliseconds:
        replica.serve(rng.uniform(2e3, 40e3), rng.uniform(0.05, 1.0))
        replica.serve(rng.expovariate(1 / 15e3) + 200, 0.0)


def empty(replica: Replica, rng: Random) -> None:
    """No request ever, but for a health check's single token every 30 s."""
    while replica.now < replica.world.milliseconds:
        replica.serve(rng.uniform(29e3, 31e3), 0.0)
        replica.do(rng.uniform(15, 60), replica.server.levels[0])


def sparse(replica: Replica, rng: Random) -> None:
    """A burst of 0.8 s every two minutes, for whole hours."""
    while replica.now < replica.world.milliseconds:
        replica.serve(rng.gauss(120e3, 8e3), 0.0)
        replica.serve(rng.uniform(600, 1000), 0.15)


def _build(name: str, seed: int, seconds: float, story: Story, *, degree: int = 1, gaps: float = 0.05,
           heavy: float = 0.1, polls: bool = False) -> World:  # fmt: skip
    world = new_world(name, seed, seconds)
    rng = world.random("servers")
    server = _server(rng, degree=degree, gaps=gaps, heavy=heavy)
    if polls:
        polling = spin(IDLE_ALLOCATION, sm=rng.uniform(0.1, 0.3), watts=rng.uniform(15, 60))
        server = replace(server, idle=replace(polling, doubts=((IDLE_ALLOCATION, EXPOSED_COMMUNICATION, 1.0),)))
    for number in range(GPUS // degree):
        gpus = world.gpus[number * degree : (number + 1) * degree]
        job = Job(job_id=f"serve-{seed}-{number}", name=name, workload_class="serving", gpus=degree)
        replica = Replica(world, job, gpus, server, world.random(f"replica:{number}"))
        replica.start()
        story(replica, replica.rng)
    return world.finish()


def build_steady(name: str, seed: int, seconds: float) -> World:
    """Eight replicas with one GPU each and steady requests."""
    return _build(name, seed, seconds, steady)


def build_bursty(name: str, seed: int, seconds: float) -> World:
    """Eight replicas with bursts."""
    return _build(name, seed, seconds, bursty)


def build_prefill(name: str, seed: int, seconds: float) -> World:
    """Long prompts, short answers."""
    return _build(name, seed, seconds, steady, heavy=0.6)


def build_polling(name: str, seed: int, seconds: float) -> World:
    """Replicas over four GPUs whose ranks poll inside a kernel while there is no request."""
    return _build(name, seed, seconds, bursty, degree=4, polls=True)


def build_polling_empty(name: str, seed: int, seconds: float) -> World:
    """The same without any request."""
    return _build(name, seed, seconds, empty, degree=4, polls=True)


def build_empty(name: str, seed: int, seconds: float) -> World:
    """Servers without requests."""
    return _build(name, seed, seconds, empty)


def build_sparse(name: str, seed: int, seconds: float) -> World:
    """Servers with 0.8 s of work every two minutes; no zombies."""
    return _build(name, seed, seconds, sparse)


def build_host_bound(name: str, seed: int, seconds: float) -> World:
    """Decoding whose CPU work between iterations takes as long as the iterations."""
    return _build(name, seed, seconds, steady, gaps=1.0)


def build_hung(name: str, seed: int, seconds: float) -> World:
    """A server over eight GPUs with steady requests whose engine deadlocks; requests queue up.

    Without the server's own figures, this looks as a polling server without requests does.
    """
    world = new_world(name, seed, seconds)
    rng = world.random("servers")
    job = Job(job_id=f"serve-{seed}", name=name, workload_class="serving")
    replica = Replica(world, job, world.gpus, _server(rng, degree=GPUS), world.random("replica"))
    replica.start()
    onset, fill = world.milliseconds * rng.uniform(0.25, 0.5), rng.uniform(0.3, 0.9)
    while replica.now < onset:
        replica.serve(rng.uniform(2e3, 15e3), fill * rng.uniform(0.85, 1.1))
    began, culprit = replica.now, rng.randrange(GPUS)
    while replica.now < world.milliseconds:
        begin = replica.now
        end = begin + REPORT_MS
        for gpu in world.gpus:
            gpu.track.until(end, _HUNG_RANK if gpu.index == culprit else _HUNG_OTHERS)
        waiting = (replica.now - began) / 1e3 * 0.5
        replica.report(begin, running=round(fill * 256), tokens=0.0, waiting=round(waiting))
    world.hang = Hang(job.job_id, began / 1e3, None, culprit, "a server's engine deadlocks with requests in its batch")
    return world.finish()


_HUNG_RANK = wait(HUNG)
_HUNG_OTHERS = spin(HUNG, sm=0.2, watts=30)

BUILDERS = {
    "inference_steady": build_steady,
    "inference_bursty": build_bursty,
    "inference_prefill": build_prefill,
    "inference_polling": build_polling,
    "inference_polling_empty": build_polling_empty,
    "inference_empty": build_empty,
    "inference_sparse": build_sparse,
    "inference_host_bound": build_host_bound,
    "hang_server": build_hung,
}
