"""The figures that matter most to who runs a fleet: cost of a node, cost in Prometheus, and is it right.

Owns which rows these are, and the words around them. A figure whose record is gone is not named; one whose row has
another name is a fault (KeyError), so that a sentence cannot outlive its figure.
"""

from collections.abc import Iterator, Mapping

from benchmarks.record import Record

_NAMES = ("under a wrong name", "in a residual row")
_SCRAPED = "(stand-in NVML, scraped every 10 s)"


def lines(records: Mapping[str, Record], page: str) -> Iterator[str]:
    """Give the sentences, as a list of Markdown, each with a link into `page`."""
    if found := _figures(records, "serve"):
        cpu, memory = found[f"CPU of one core, 8 GPUs at 1 s {_SCRAPED}"], found[f"Resident memory {_SCRAPED}"]
        yield f"- **A node of 8 GPUs: {cpu} of one core, {memory}**, one reading a second ([how]({page}#the-daemon))."
    if found := _figures(records, "rules"):
        rules = found["CPU of all rules, 10,000 GPUs, share of a core"]
        yield (
            f"- **A fleet of 10,000 GPUs: {rules} of one core** for all recording and alert rules in Prometheus "
            f"([how]({page}#recording-and-alert-rules))."
        )
    # Where two worlds differ, the harder one is named: its truth knows none of the detectors' rules.
    if found := _figures(records, "second_opinion"):
        precision, recall = found["hangs confirmed: precision"], found["hangs confirmed: recall"]
        wrong, residual = (found[f"random training jobs, counters, 1 s: points {what}"] for what in _NAMES)
        where = f"([how]({page}#against-an-independent-simulator))"
        yield (
            f"- **Leaks, from counters alone: of 100 simulated GPU-hours of training, "
            f"{wrong.removeprefix('mean ')} are booked to a wrong leak.** Another "
            f"{residual.removeprefix('mean ')} are booked to a leak without a cause, such as `unattributed_stall`, "
            f"although the simulator knows the cause {where}."
        )
        yield f"- **Hangs, from counters alone: precision {precision}, recall {recall}** in simulated jobs {where}."


def _figures(records: Mapping[str, Record], name: str) -> dict[str, str]:
    """The medians of a group, by what they are of."""
    record = records.get(name)
    return {line.what: line.median for line in record.rows} if record else {}
