"""Runs the commands that print tables of this program: `metrics`, `leaks` and `check-config`.

Owns their layout for a terminal, Markdown, JSON and TOML. The content comes from exporter.core and exporter.config.
"""

import argparse
import json
import shutil
import sys
import textwrap
import time
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any

import msgspec

from exporter.cli.wiring import FAILED, configure, fail, open_web_config
from exporter.cluster.metrics import METRICS as OF_CLUSTER
from exporter.config import Config
from exporter.core.leak_guide import (
    EXAMPLE_WATERFALLS,
    EXPECTED_USEFUL,
    LEAK_GUIDE,
    LITERATURE,
    OTHER_LEAKS,
    ExpectedLoss,
    LeakGuideEntry,
    OtherLeak,
)
from exporter.core.leaks import LAYER_OF, LEAK_NAMES, LEAKS, Leak
from exporter.core.metrics import METRICS, SERIES_BUDGET, Metric, max_series_of_scope
from exporter.redact import redact_secrets
from exporter.schedulers.privacy import open_mask
from exporter.stability import experimental

_METRICS_INTRO = """# Metrics

Printed by `gpu-efficiency metrics --markdown` (`make docs`) from the tables in `exporter/core/metrics.py`,
`exporter/core/leaks.py` and `exporter/cluster/metrics.py`.

Name, type and labels are stable ([what that means](releasing.md#what-is-stable)), except where *Experimental* stands.
"""
_METRIC_HEAD = """
| metric | type | labels | per | meaning |
|---|---|---|---|---|"""
_LEAK_HEAD = """
## Values of `leak`

In the order in which GPU-seconds are split. Evidence: measured and estimated leaks need only hardware counters. Leaks
that are only reported, or of an engine, stay 0 without the job's reports or the engine's metrics; of those that are
*reported or* something else, counters are used until the job reports.

| leak | layer | evidence | takes | watch | do first |
|---|---|---|---|---|---|"""
_OUTCOMES = """\
| `useful` | useful | measured | the remaining tensor time at full clock | GAU x ECTR x eMFU | |
| `unresolved` | unresolved | | a kernel ran, but no counter shows how useful it was | | |
| `unobserved` | unobserved | | no trustworthy telemetry, unknown owner of an idle GPU, or no daemon | coverage | |
"""


_CLUSTER_HEAD = """\
## Of a whole cluster: `gpu-efficiency cluster`

| metric | type | labels | per | meaning |
|---|---|---|---|---|"""


def check_config(args: argparse.Namespace) -> int:
    """Print the configuration in force as TOML; also load the files of certificates and secrets to check them."""
    config = configure(args)
    open_mask(config.privacy)
    note = open_web_config(config).current.note
    if note:
        print(f"gpu-efficiency: {config.web.config_file}: {note}", file=sys.stderr)
    for model in config.unknown_price_models:
        print(
            f"gpu-efficiency: [[prices]] has a row for {model!r}, which no table of specifications knows: it has an"
            " effect only if `nvidia-smi -L` calls a GPU exactly so",
            file=sys.stderr,
        )
    print(as_toml(config))
    expired = [exemption for exemption in config.exemptions if exemption.expiry <= time.time()]
    for exemption in expired:
        fail(
            f"the exemption {exemption.id} has expired ({exemption.expires}) and exempts no job: remove it, or set a"
            " later `expires`"
        )
    return FAILED if expired else 0


def as_toml(config: Config) -> str:
    """The configuration in the format of its file."""
    tree: dict[str, Any] = msgspec.to_builtins(config)
    return "\n".join(_toml_table("", tree)).strip()


def _toml_table(path: str, values: dict[str, Any]) -> Iterator[str]:
    """Write one TOML table and those inside it; values that are not set are omitted."""
    plain = {key: value for key, value in values.items() if not isinstance(value, dict) and value is not None}
    if path and (plain or not values):
        yield f"\n[{path}]"
    yield from (f"{key} = {_toml_value(value)}" for key, value in plain.items())
    for key, value in values.items():
        if isinstance(value, dict):
            bare = key.isascii() and key.replace("_", "").isalnum()
            name = key if bare else _toml_value(key)
            yield from _toml_table(f"{path}.{name}" if path else name, value)


def _toml_value(value: object) -> str:
    """Write a value in TOML: as in JSON, but for tables in a list."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key} = {_toml_value(v)}" for key, v in value.items() if v is not None) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(_toml_value, value)) + "]"
    return json.dumps(redact_secrets(value) if isinstance(value, str) else value, ensure_ascii=False)


def metrics(args: argparse.Namespace) -> int:
    """Print all metrics."""
    if args.markdown:
        sys.stdout.write(_metrics_markdown())
        return 0
    width = shutil.get_terminal_size((120, 24)).columns
    for metric in METRICS:
        labels = "{" + ",".join(metric.labels) + "}" if metric.labels else ""
        level = ", experimental" if experimental(metric.name) else ""
        print(f"{metric.name}{labels} ({metric.type}{level})"[:width])
        print(f"    {metric.help}")
    return 0


def _metric_rows(metrics: Iterable[Metric]) -> list[str]:
    return [
        f"| `{m.name}` | {m.type} | {', '.join(f'`{label}`' for label in m.labels)} | {m.scope} | "
        f"{'*Experimental.* ' if experimental(m.name) else ''}{m.help} |"
        for m in metrics
    ]


def _metrics_markdown() -> str:
    budget = (
        f"Series at most: {max_series_of_scope('gpu')} per GPU (budget {SERIES_BUDGET['gpu']}), "
        f"{max_series_of_scope('job')} per job on a node (budget {SERIES_BUDGET['job']}), "
        f"{max_series_of_scope('node') + max_series_of_scope('model')} per node with one model of GPU and the daemon's "
        f"own `process_*` (budget {SERIES_BUDGET['node']}); in addition {max_series_of_scope('account')} per account "
        "(at most `policy.max_accounts` and one), one per exemption, and on a GPU that several jobs share one "
        "`allocation_info` for each of them and two `shared_seconds_total`. Trouble adds to it while it lasts: "
        f"{max_series_of_scope('spinning GPU')} on a GPU that spins, "
        f"{max_series_of_scope('job in trouble')} of its job. A job on several GPUs has "
        f"{max_series_of_scope('job on several GPUs')} more. A training job that reports has "
        f"{max_series_of_scope('reporting job')} more and {max_series_of_scope('rank')} for each of its processes "
        f"here, a server whose engine is found {max_series_of_scope('serving job')}."
    )
    leak_rows = [f"| `{k.name}` | {k.layer} | {k.evidence} | {k.description} | {k.watch} | {k.fix} |" for k in LEAKS]
    return "\n".join(
        [
            _METRICS_INTRO,
            budget,
            _METRIC_HEAD,
            *_metric_rows(METRICS),
            _LEAK_HEAD,
            *leak_rows,
            _OUTCOMES,
            _CLUSTER_HEAD,
            *_metric_rows(OF_CLUSTER),
            "",
        ]
    )


def metrics_arguments(command: argparse.ArgumentParser) -> None:
    """Flags of `metrics`."""
    command.add_argument("--markdown", action="store_true", help="as docs/metrics.md")


_NARROWEST, _WIDEST = 40, 120
"""Limits of the width in columns, so that lines are neither cut nor too long to read."""
_LABEL_WIDTH = 9

_LEAKS_INTRO = """\
# Leaks: what to expect, to watch and to do

A leak is a reason why paid GPU time was not useful work. The label `leak` has the names of 24 leaks as its values
([all of them](metrics.md#values-of-leak)). It has three more values, which are no leaks:

- `useful`: the work that was done, counted as the time that it would take at the GPU's dense tensor peak. For a job
  that does not use the tensor cores, the peak of its FP64 or FP32 pipe is used.
- `unobserved`: there was no trustworthy telemetry, the owner of an idle GPU was unknown, or the daemon was stopped or
  paused.
- `unresolved`: a kernel ran, but its usefulness cannot be measured. Tensor activity or the GPU's peak is unknown, or no
  counter shows what the kernel computes (integer work, graphics, video).

This page sorts 17 of the 24 leaks into twelve *kinds* known from the literature; the other seven leaks are
[below](#the-other-seven-leaks). `gpu-efficiency leaks` prints the same in a terminal, and `gpu-efficiency leaks --json`
prints it for programs. This page and both outputs are generated from one table, `exporter/core/leak_guide.py`.

The layer is the ratio that a leak lowers: `gau` (occupied / observed), `ectr` (computing / occupied) or `emfu` (useful
/ (computing - `unresolved`)). [README](../README.md) and [accounting](accounting.md) define these times. In short, a
GPU is *occupied* unless it is unavailable, unallocated, a zombie or held by a server without requests; the share of a
GPU that its job never needs is not occupied either. An occupied GPU is *computing* unless its job waits; waiting in a
pipeline bubble counts as computing.

The role is who can usually act. It is not the label `team`, which your workload rules set. *platform* runs the cluster,
*scheduling* decides who gets which GPU, *training* and *serving* run jobs and servers, *model* writes the model's code,
*data* supplies the input. [What each leak is](#what-each-leak-is) stands below. In the table, *held* GPUs are allocated
to a job or a server, and *free* ones are unallocated.

| # | kind | layer | role | leaks | do first |
|---|---|---|---|---|---|"""
_WHAT_HEAD = """
## What each leak is

For a job that does not use the tensor cores, *tensor work* means the work of its FP64 or FP32 pipe. After a crash,
`failure_recovery` begins with the restart. Until then the GPU is `idle_allocation` if it is unallocated, and otherwise
mostly `unattributed_stall`.

| # | leak | what it is |
|---|---|---|"""
_EXPECT_HEAD = """
## What to expect

The table shows how many of 100 paid GPU-hours each kind takes. Every range is an estimate of this project: most fleets
should lie within it. Keys in brackets name the [publications](#literature) on which a range is based. (E) marks a range
that rests on the authors' judgement alone. Each publication measured a single system, and some measured another
quantity, so no range is copied unchanged from a publication.

| # | kind | training | inference |
|---|---|---|---|"""
_WATCH_HEAD = """
## What to watch

The GPU-seconds of each leak are in `gpu_efficiency_node_seconds_total{leak="..."}`, and what they cost is in
`cluster_leak:gpu_efficiency_cost:per_hour{leak="..."}`. The table below has the series that show why a leak is large.
Names with a colon are recorded by the rules in `alerts/*.yaml`, which Prometheus must load. A runbook is named where an
alert exists. In names, `ofu` (overall FLOPs utilization) is the share of the dense tensor peak that the GPU delivered:
tensor activity x (the GPU's clock / the clock for which the peak is specified).

| evidence | how the daemon knows the time |
|---|---|
| measured | hardware counters and the scheduler |
| estimated | hardware counters, by a formula or by indicators |
| reported | the reports of the training job |
| engine | the metrics of the serving engine |

An estimate has bounds: [what is an estimate](accounting.md#what-is-an-estimate). `gpu-efficiency report` has a fifth
kind of evidence, *calibrated*, for `exposed_communication` alone: an estimate from the SM activity that was measured,
not assumed, for this job's communicating and computing kernels. The daemon measures it if it reads the counters at
least every 250 ms, for instance with `sampling.interval_seconds = 0.1` (the default is 1). At longer intervals it can
do so only if the job does nothing but exchange data in some of them.

Some leaks show only in the progress reports of a job or in the metrics of an engine. Without these, such a leak stays
at 0. Its time then counts as a leak that counters can show (mostly `unattributed_stall`, `memory_bound`,
`low_parallelism` or `other_compute`) or as `useful`. Four others are estimated from counters until the job reports
them: `checkpoint`, `data_stall`, `pipeline_bubble` and `exposed_communication`.

Not using speculative decoding is not a leak. For a server that does not use it,
`gpu_efficiency_job_advice_seconds_total{advice="speculative_decoding"}` counts half of the `memory_bound` time, as a
hint of what using it might save. This time stays in `memory_bound`.

| # | metric to watch | series | evidence | signals needed | runbook |
|---|---|---|---|---|---|"""
_OTHER_ROWS = """
## The other seven leaks

| leak | layer | role | what it is | do first | training | inference | runbook |
|---|---|---|---|---|---|---|---|"""
_LITERATURE_HEAD = """
## Literature

| key | publication | figure |
|---|---|---|"""


def leaks(args: argparse.Namespace) -> int:
    """Print all leaks: twelve kinds, and those of no kind."""
    if args.json:
        sys.stdout.write(msgspec.json.format(msgspec.json.encode(_json_tree()), indent=2).decode() + "\n")
    elif args.markdown:
        sys.stdout.write("\n".join(_leaks_markdown()) + "\n")
    else:
        columns = shutil.get_terminal_size((80, 24)).columns
        print("\n".join(_terminal_lines(min(max(columns, _NARROWEST), _WIDEST))))
    return 0


def leaks_arguments(command: argparse.ArgumentParser) -> None:
    """Flags of `leaks`."""
    form = command.add_mutually_exclusive_group()
    form.add_argument("--markdown", action="store_true", help="as docs/leaks.md")
    form.add_argument("--json", action="store_true", help="print JSON, with the example waterfalls")


# -- JSON --


def _json_tree() -> dict[str, object]:
    return {
        "twelve": [
            msgspec.structs.asdict(entry)
            | {"fix": entry.fix, "what": {row: _leak(row).description for row in entry.rows}}
            for entry in LEAK_GUIDE
        ],
        "others": [msgspec.structs.asdict(other) | {"what": _leak(other.row).description} for other in OTHER_LEAKS],
        "useful": dict(EXPECTED_USEFUL),
        "literature": dict(LITERATURE),
        "waterfalls": {name: dict(hours) for name, hours in EXAMPLE_WATERFALLS.items()},
    }


# -- terminal --


def _terminal_lines(width: int) -> Iterator[str]:
    yield from _wrapped(
        "Where paid GPU time is lost: twelve kinds, and the leaks (values of the label `leak`) of each. Ranges are"
        " GPU-hours of 100 paid: estimates, based on the references at the end or, (E), on experience alone.",
        width,
        indent=0,
    )
    yield from chain.from_iterable(_entry_lines(entry, width) for entry in LEAK_GUIDE)
    yield from ("", "The other seven leaks")
    yield from chain.from_iterable(_other_lines(other, width) for other in OTHER_LEAKS)
    yield from (
        "",
        "What remains",
        "",
        "  useful",
        *_ranges(EXPECTED_USEFUL["training"], EXPECTED_USEFUL["inference"], width),
    )
    yield from ("", "References")
    for key, source in LITERATURE.items():
        yield from ("", f"  {key}", *_wrapped(f"{source.work}: {source.figure}", width, indent=4))


def _entry_lines(entry: LeakGuideEntry, width: int) -> Iterator[str]:
    yield ""
    yield from textwrap.wrap(f"{entry.number:2} {entry.name}", width, subsequent_indent="   ")
    yield from _fact("layer", f"{', '.join(entry.layers)}; role {entry.team}", width)
    yield from _fact("label", ", ".join(entry.rows), width)
    for row in entry.rows:
        yield from _wrapped(f"{row}: {_leak(row).description}", width, indent=4 + _LABEL_WIDTH)
    yield from _fact("watch", entry.watch, width)
    yield from chain.from_iterable(_wrapped(name, width, indent=6) for name in entry.series)
    yield from _fact("first", entry.fix, width)
    yield from _fact("evidence", f"{', '.join(entry.evidence)}: {entry.needs}", width)
    yield from _ranges(entry.training, entry.inference, width)
    yield from _runbook(entry, width)


def _other_lines(other: OtherLeak, width: int) -> Iterator[str]:
    leak = _leak(other.row)
    yield from ("", f"  {other.row}", *_wrapped(f"{leak.description} ({_layer(other.row)})", width, indent=4))
    yield from _fact("first", f"{leak.fix} (role {leak.team})", width)
    yield from _ranges(other.training, other.inference, width)
    yield from _runbook(other, width)


def _ranges(training: ExpectedLoss | None, inference: ExpectedLoss | None, width: int) -> list[str]:
    return [
        *_fact("training", _expected(training, " h of 100"), width),
        *_fact("infer.", _expected(inference, " h of 100"), width),
    ]


def _runbook(of: LeakGuideEntry | OtherLeak, width: int) -> list[str]:
    return _fact("runbook", f"docs/runbooks/{of.runbook}.md", width) if of.runbook else []


def _fact(label: str, text: str, width: int) -> list[str]:
    return textwrap.wrap(
        text,
        width,
        initial_indent=f"    {label:<{_LABEL_WIDTH}}",
        subsequent_indent=" " * (4 + _LABEL_WIDTH),
        break_long_words=False,
        break_on_hyphens=False,
    )


def _wrapped(text: str, width: int, *, indent: int) -> list[str]:
    """Wrap a text; names of series are not broken, so that they can be copied."""
    gap = " " * indent
    return textwrap.wrap(
        text, width, initial_indent=gap, subsequent_indent=gap, break_long_words=False, break_on_hyphens=False
    )


# -- docs/leaks.md --


def _leaks_markdown() -> Iterator[str]:
    yield _LEAKS_INTRO
    for s in LEAK_GUIDE:
        yield _markdown_row(f"{s.number}", s.name, ", ".join(s.layers), s.team, _rows_with_layers(s), s.fix)
    yield _WHAT_HEAD
    for s in LEAK_GUIDE:
        yield from (_markdown_row(f"{s.number}", f"`{row}`", _leak(row).description) for row in s.rows)
    yield _EXPECT_HEAD
    for s in LEAK_GUIDE:
        yield _markdown_row(f"{s.number}", s.name, _expected(s.training), _expected(s.inference))
    yield _markdown_row(
        "", "left as **useful**", _expected(EXPECTED_USEFUL["training"]), _expected(EXPECTED_USEFUL["inference"])
    )
    yield "\n[A worked example](worked-example.md#two-waterfalls-of-100-gpu-hours) divides 100 paid hours of a training"
    yield "fleet and of an inference fleet among these leaks and useful work, in hours and in money."
    yield _WATCH_HEAD
    for s in LEAK_GUIDE:
        yield _markdown_row(f"{s.number}", s.watch, _coded(s.series), ", ".join(s.evidence), s.needs, _linked(s))
    yield _OTHER_ROWS
    for o in OTHER_LEAKS:
        leak, ranges = _leak(o.row), (_expected(o.training), _expected(o.inference))
        yield _markdown_row(f"`{o.row}`", _layer(o.row), leak.team, leak.description, leak.fix, *ranges, _linked(o))
    yield _LITERATURE_HEAD
    yield from (_markdown_row(f"[{key}]", source.work, source.figure) for key, source in LITERATURE.items())


def _rows_with_layers(of: LeakGuideEntry) -> str:
    """Its leaks; each with its layer where they have several."""
    return ", ".join(f"`{row}` ({_layer(row)})" for row in of.rows) if len(of.layers) > 1 else _coded(of.rows)


def _markdown_row(*cells: str) -> str:
    """One row of a table, with | in cells escaped."""
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def _coded(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _linked(of: LeakGuideEntry | OtherLeak) -> str:
    return f"[{of.runbook}](runbooks/{of.runbook}.md)" if of.runbook else ""


# -- for both --


def _layer(row: str) -> str:
    return LAYER_OF[LEAK_NAMES.index(row)]


def _leak(row: str) -> Leak:
    return LEAKS[LEAK_NAMES.index(row)]


def _expected(of: ExpectedLoss | None, unit: str = "") -> str:
    """The expected range in hours, and its sources."""
    if of is None:
        return "does not occur"
    references = ", ".join(f"[{key}]" for key in of.sources) or "E"
    return f"{of.low:g} to {of.high:g}{unit} ({references})"
