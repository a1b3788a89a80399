"""Commands that print what the program knows: check-config, metrics."""

import argparse
import json
import shutil
import sys
from collections.abc import Iterable, Iterator
from typing import Any

import msgspec

from exporter.cli.wiring import configuration, guarding_of
from exporter.cluster.metrics import METRICS as OF_CLUSTER
from exporter.config import Config
from exporter.core.catalog import METRICS, Metric, series_of
from exporter.core.leaks import LEAKS
from exporter.schedulers.telling import open_mask
from exporter.wording import without_secrets

_HEAD = """# Metrics

Printed by `gpu-efficiency metrics --markdown` (`make docs`) from the table in `exporter/core/catalog.py`.
"""
_METRIC_HEAD = """
| metric | type | labels | per | meaning |
|---|---|---|---|---|"""
_LEAK_HEAD = """
## Values of `leak`

In the order of pouring. Evidence: measured and estimated leaks take from hardware counters alone; what is reported by
a workload or an engine takes nothing until one speaks.

| leak | layer | evidence | takes | watch | do first |
|---|---|---|---|---|---|"""
_OUTCOMES = """\
| `useful` | useful | measured | the rest of tensor time at full clock | GAU x ECTR x eMFU | |
| `unresolved` | unresolved | | kernel time whose worth cannot be known: no tensor counter, or an unknown board | | |
| `unobserved` | unobserved | | time nobody saw, or saw and could not believe | coverage | |
"""


_CLUSTER_HEAD = """\
## Of a whole cluster: `gpu-efficiency cluster`

| metric | type | labels | per | meaning |
|---|---|---|---|---|"""


def check_config(args: argparse.Namespace) -> int:
    """Print the configuration as it will be used, as TOML; the files of certificates and secrets are tried as well."""
    config = configuration(args)
    open_mask(config.privacy)
    note = guarding_of(config).now.note
    if note:
        print(f"gpu-efficiency: {config.web.config_file}: {note}", file=sys.stderr)
    print(as_toml(config))
    return 0


def as_toml(config: Config) -> str:
    """The configuration as its file would have it."""
    tree: dict[str, Any] = msgspec.to_builtins(config)
    return "\n".join(_table("", tree)).strip()


def _table(path: str, values: dict[str, Any]) -> Iterator[str]:
    """One TOML table and those inside it; what is not set is left out."""
    plain = {key: value for key, value in values.items() if not isinstance(value, dict) and value is not None}
    if path and (plain or not values):
        yield f"\n[{path}]"
    yield from (f"{key} = {_toml(value)}" for key, value in plain.items())
    for key, value in values.items():
        if isinstance(value, dict):
            bare = key.isascii() and key.replace("_", "").isalnum()
            name = key if bare else _toml(key)
            yield from _table(f"{path}.{name}" if path else name, value)


def _toml(value: object) -> str:
    """Strings, numbers, booleans and lists as TOML writes them: as JSON does; tables in a list differ."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key} = {_toml(v)}" for key, v in value.items() if v is not None) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(_toml, value)) + "]"
    return json.dumps(without_secrets(value) if isinstance(value, str) else value, ensure_ascii=False)


def metrics(args: argparse.Namespace) -> int:
    """Print the catalogue."""
    if args.markdown:
        sys.stdout.write(_catalog_markdown())
        return 0
    width = shutil.get_terminal_size((120, 24)).columns
    for metric in METRICS:
        labels = "{" + ",".join(metric.labels) + "}" if metric.labels else ""
        print(f"{metric.name}{labels} ({metric.type})"[:width])
        print(f"    {metric.help}")
    return 0


def _rows(metrics: Iterable[Metric]) -> list[str]:
    return [
        f"| `{m.name}` | {m.type} | {', '.join(f'`{label}`' for label in m.labels)} | {m.scope} | {m.help} |"
        for m in metrics
    ]


def _catalog_markdown() -> str:
    budget = (
        f"Series at most: {series_of('gpu')} per GPU (budget 64), {series_of('job')} per job on a node (budget 45), "
        f"{series_of('node') + series_of('model')} per node with one model of GPU and the daemon's own `process_*` "
        f"(budget 150); beside them {series_of('account')} per account (at most `policy.max_accounts` and one), one an "
        "exemption, and on a GPU that several jobs share one `allocation_info` for each of them and two "
        f"`shared_seconds_total`. Trouble adds to it while it lasts: {series_of('spinning GPU')} on a GPU that spins, "
        f"{series_of('job in trouble')} of its job. A training job that reports has {series_of('reporting job')} more "
        f"and {series_of('rank')} for each of its processes here, a server whose engine is found "
        f"{series_of('serving job')}."
    )
    leaks = [f"| `{k.name}` | {k.layer} | {k.evidence} | {k.takes} | {k.watch} | {k.fix} |" for k in LEAKS]
    return "\n".join(
        [
            _HEAD,
            budget,
            _METRIC_HEAD,
            *_rows(METRICS),
            _LEAK_HEAD,
            *leaks,
            _OUTCOMES,
            _CLUSTER_HEAD,
            *_rows(OF_CLUSTER),
            "",
        ]
    )


def metrics_arguments(command: argparse.ArgumentParser) -> None:
    """Flags of `metrics`."""
    command.add_argument("--markdown", action="store_true", help="as docs/metrics.md")
