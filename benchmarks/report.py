"""The table in its two forms: columns for a terminal, Markdown for the documentation.

Owns words and layout; every figure comes from the rows it is given.
"""

from collections.abc import Sequence

from msgspec import Struct

from benchmarks.figures import Row
from benchmarks.growth import SAMPLES

_TITLES = ("what", "how often", "median", "spread (min - max unless named)", "budget", "met", "command")


class _Section(Struct, frozen=True):
    title: str
    about: str


_SECTIONS = {
    "advance": _Section(
        "Observation to ledger",
        "One core, in a tight loop, on readings with every signal; processor time (`time.process_time`), the garbage "
        "collector on. The simulation is made beforehand. In a daemon that wakes once a second the caches are cold: "
        "the last lines of [`serve`](#the-daemon) show what the same work takes there, by the daemon's own clock. "
        "Why the budget is missed: many short steps, none of them large. The largest is the second book: the same loop "
        "with the two lines taken out of `pipeline._post` that post to the job's ran 1.6 us faster. Deriving a job's "
        "book from its GPUs' would save that and cost a second way of accounting; at 8 GPUs once a second all of it "
        "is 0.03 % of a core (those last lines), so the simpler code stays.",
    ),
    "tick": _Section(
        "A tick",
        "One read of eight H100s through a source, its posts to the ledger and a snapshot, in a tight loop without the "
        "scheduler. NVIDIA's own Python bindings run over stand-ins for the libraries beneath them (`tests/dcgm_stub`, "
        "`tests/nvml_stub`), whose boards move on between two ticks: what a driver or a host engine takes to answer is "
        "not in these figures. Our own part is all but the calls: reading values out of the bindings' structures is in "
        "it, though their access to a member is Python of NVIDIA's. The wall clock divides, at every call across. The "
        "last row of each is another run, in processor time, with nothing timed within. Every tenth tick looks at the "
        "inventory and the boards' health too, so the mean is above the median.",
    ),
    "text": _Section(
        "Snapshot and text",
        "A node of eight GPUs, each held by a job of its own, with an hour of history. A snapshot is taken every tick, "
        "the text is made for every scrape. `process_*` series are not counted.",
    ),
    "reporter": _Section(
        "A call of the client",
        "What `exporter/reports/client.py` costs a training thread, in a tight loop of calls: with a real listener on "
        "a socket, with none, and with one that never reads. Most calls only count; one every two seconds sends. "
        "Processor and wall time are the same here: nothing waits.",
    ),
    "reports": _Section(
        "512 ranks that report",
        "Real processes, each with a connection of its own and a typical message every two seconds: processor time "
        "of the socket's thread and of the reading thread's part, the kernel's included. Whose a process is, is asked "
        "once a connection and not in it.",
    ),
    "replay": _Section(
        "Replay",
        "`gpu-efficiency replay` of a week of the demo node, as a command: the start of Python and the printing are in "
        "it, the making of the trace is not.",
    ),
    "imports": _Section(
        "Where the memory goes",
        "Resident memory (VmRSS) and time that each import adds, in the order in which `serve` meets them; what a "
        "module shares with an earlier one is counted there. Compiled files exist.",
    ),
    "scrape": _Section(
        "Scrapes",
        "One kept connection, the next request as soon as the answer is here, client and daemon on the same machine; "
        "wall time until the last byte. Meanwhile the daemon samples eight simulated GPUs with eight jobs once a "
        "second through its real loop. The forms take turns. The budget is held against the 99th percentile, "
        "the median of those of the rounds: a busy moment of a shared machine falls into one round, and slows "
        "`/healthz` too. The baseline makes the same series with prometheus_client's own metrics, without HTTP: "
        "compare it with [the text](#snapshot-and-text).",
    ),
    "serve": _Section(
        "The daemon",
        "`gpu-efficiency serve` on eight GPUs at one reading a second, watched from outside through the process's CPU "
        "clock and /proc, after ten seconds to warm up. The stand-in NVML (`tests/nvml_stub`) has the interface of "
        "NVIDIA's library and no driver behind it. CPU is judged over the whole time, memory by its peak (VmHWM). The "
        "dcgm-exporter page has the stock fields, figures made up, and changes every 30 s; what serves it is not "
        "counted.",
    ),
    "schedulers": _Section(
        "Who holds the GPUs",
        "The Slurm scheduler reads real sockets and asks /proc about real processes, in processor time of the reading "
        "thread; while no job changes nothing is started and nobody is asked, which this run makes sure of. The "
        "Kubernetes scheduler asks a gRPC kubelet and an API server over TLS, stand-ins in another process, in "
        "processor time of the whole process. Memory is a daemon's, by its peak.",
    ),
    "sampling": _Section(
        "Fast sampling, and MIG",
        "`gpu-efficiency serve` at ten readings a second, and on eight boards cut into 56 instances at one a second, "
        "as in [`serve`](#the-daemon) but not scraped. Over DCGM the stand-in's host engine works within the daemon "
        "and is in its figure; in life it is another process. Where GPU time is not observed at 10 Hz over NVML, a "
        "read came less than 100 ms after the one before, and GPM gives no figure for less.",
    ),
    "rules": _Section(
        "Recording and alert rules",
        "A real Prometheus, with all of `alerts/*.yaml`, scrapes 1,250 simulated nodes of eight GPUs once a minute: "
        "pages of the daemon's own text, of twelve kinds of node, under other names each, whose counters move on. "
        "The day that rules with long ranges read is written beforehand. The budget (100,000 GPUs in a quarter of "
        "the interval, on one core) is held against processor time: of the same server with its rules and then "
        "without them, so that scraping, and what else the machine does, is not in it. Times of groups and rules "
        "are what the server tells, wall time, and grow with the machine's load. Why it is linear: every rule over "
        "the daemons' series is one pass over them (a rate, then a sum by labels), a join finds its one partner by "
        "hash, and the series of a node do not depend on how many nodes there are: ten times the nodes and jobs are "
        "ten times the series in every step. Fleet rules read some thirty series a node, summed by the daemon, "
        "instead of 27 a GPU; leaks that took nothing are dropped at the first step; ranges of a day are over "
        "recorded series alone. Medians, in life every twenty minutes, are evaluated every four here, so that the run "
        "sees them. Where the budget is missed: each group but the one for deadlocks would stay within a quarter of "
        "its own interval at ten times the nodes; all together do not. That group looks at the states of all jobs "
        "every fifteen seconds, so that a page comes within six minutes; it and the rates by job are next to be made "
        "cheaper. Texts of the alerts that fire (ten nodes of each kind of trouble) are in the figure.",
    ),
    "dashboards": _Section(
        "Dashboards",
        "Every panel of every dashboard, opened as Grafana opens it, on a real Prometheus with two cores: raw series "
        "of 1,250 nodes of eight GPUs and of their jobs for the last hour, all recorded ones for a week and a day. "
        "How they were made, every panel by name, and what follows for larger fleets: [scale](scale.md).",
    ),
    "growth": _Section(
        "Whether memory grows",
        f"Resident memory (VmRSS), sampled at the start and {SAMPLES} times on the way. The core is told one simulated "
        "hour of the demo node again and again, a tick a second with its snapshot, each hour with jobs of new names; "
        "the hour itself lies in memory too. The DCGM source reads the stand-in once a second. What is kept of the "
        "past is full after an hour or two, so growth is the slope of a straight line through the samples after the "
        "first tenth. A million readings are 35 hours of eight GPUs at one a second.",
    ),
    "history": _Section(
        "The node's history",
        "Wall time, on the disk of the temporary folder. The node has eight GPUs, each shared by eight jobs, and all "
        "64 report their training every second; what is written is the ledger with all of them, compressed, and what "
        "is remembered of each beside it. Bytes are those given to write(2) and its kin. The year's receipts are like "
        "those of these jobs, every other one with its training, all with 24 samples of made-up figures, which "
        "compress worse than real ones. A question is timed from opening the file to Python's objects; `in short` "
        "leaves out samples and training, which sums do not need.",
    ),
    "detection": _Section(
        "Whether the alerts are right",
        "Simulated stories with a label (`benchmarks/detection_cases.py`), each played through the real core with six "
        "seeds, from which board, sampling period (1, 10 or 30 s), sensor noise and missing fields are drawn: "
        "`python -m benchmarks.detection` prints each case. A case without a label is a look-alike for every "
        "detector. The cases and rules were written looking at seeds 1 - 6 and the figures are of seeds 101 - 106; "
        "no threshold was moved for either. A run is right when all that is in trouble is named and nothing else. "
        "A hang may only be suspected, and a page would be false, where a field that could acquit is missing (DRAM, "
        "links, or FP pipes and power both) or the board gives no performance counters at all; three draws in five "
        "miss something. JobDeadlocked pages as its rule is written (`benchmarks/detection_page.py`): for a job with "
        "a GPU that hangs and none, on any node, that works, copies, or may be working unseen. The "
        "rules of thumb are scored on the same runs, but for hangs that cannot be proven with the fields there are. "
        "Each guard of ours is then made toothless, and the row names the cases that go wrong. The stories share no "
        "threshold with the core, but one person's idea of a hang made both: real recordings follow, and they hold "
        "no hang seen by DCGM. What they show is that busy boards and idle ones are told apart, that the lengths of "
        "first steps and saves are not made up, and how common low power at full utilisation is. They cannot show "
        "that a real hang is found.",
    ),
}
_HEAD = """# Benchmarks

<!-- Written by `make bench`; changes made here are lost. -->

What the exporter itself costs. {where}; {when}; the whole run took {minutes:.1f} minutes.

Medians are shown with their spread, for the machine is shared with other work unless its load says 0; a figure near its
budget should be measured again on a quiet one. {verdict}

**The driver's own cost per GPU on real hardware: unmeasured here (no GPU at hand).** NVML calls take the driver's time
on the calling core, GPM samples above all; add it to the CPU row of the daemon. DCGM's host engine takes it in its own
process.
"""


def table(rows: Sequence[Row]) -> str:
    """Align the rows in columns, a line each."""
    cells = [_TITLES, *map(_cells, rows)]
    widths = [max(len(line[column]) for line in cells) for column in range(len(_TITLES))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in cells]
    return "\n".join([lines[0], "-" * max(map(len, lines)), *lines[1:]])


def markdown(rows: Sequence[Row], *, where: str, when: str, minutes: float) -> str:
    """Write the page: a section a group, each with what its figures mean."""
    head = _HEAD.format(where=where, when=when, minutes=minutes, verdict=_verdict(rows))
    groups = dict.fromkeys(line.group for line in rows)
    return "\n".join([head, *(_section(name, [line for line in rows if line.group == name]) for name in groups)])


def _section(name: str, rows: Sequence[Row]) -> str:
    section = _SECTIONS[name]
    lines = [_TITLES, ("---",) * len(_TITLES), *map(_cells, rows)]
    return "\n".join(
        [f"## {section.title}", "", section.about, "", *(f"| {' | '.join(cells)} |" for cells in lines), ""]
    )


def _cells(line: Row) -> tuple[str, ...]:
    met = {None: "-", True: "yes", False: "NO"}[line.met]
    command = f"python benchmarks/run.py {line.group}"
    return line.what, line.often, line.median, line.spread, line.budget or "-", met, f"`{command}`"


def _verdict(rows: Sequence[Row]) -> str:
    missed = [line.what for line in rows if line.met is False]
    judged = sum(line.met is not None for line in rows)
    if not missed:
        return f"All {judged} budgets were met."
    return f"Of {judged} budgets, {len(missed)} were not met: {'; '.join(missed)}."
