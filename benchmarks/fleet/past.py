"""The day before a measurement, as the rules would have recorded it: what rules with long ranges read.

Owns the series of that day and the writing of it by promtool. Refuses raw series: no rule reads a day of those.
"""

import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks.fleet.site import host

_PAST = {
    "node:gpu_efficiency_gpus": (60, '{{node="{0}"}}'),
    "node:gpu_efficiency_cost_unheld:per_hour": (60, '{{node="{0}",currency="GPU-hours"}}'),
    "job:gpu_efficiency_gau:ratio_mean1h": (1200, '{{job_id="past-{0}"}}'),
    "job:gpu_efficiency_ectr:ratio_mean1h": (1200, '{{job_id="past-{0}"}}'),
    "job:gpu_efficiency_emfu:ratio_mean1h": (1200, '{{job_id="past-{0}"}}'),
}
"""What a range of a day is read of: seconds between samples, and the labels, two jobs a node."""
_JOBS_A_NODE = 2


def past_of(nodes: int, now: int) -> Iterator[str]:
    """Lines of OpenMetrics: the day before `now`."""
    for name, (every, labels) in _PAST.items():
        yield f"# TYPE {name} gauge\n"
        many = nodes * (_JOBS_A_NODE if name.startswith("job") else 1)
        for number in range(many):
            head = name + labels.format(host(number) if name.startswith("node") else number)
            yield "".join(f"{head} 8 {at}\n" for at in range(now - 86_400, now, every))
    yield "# EOF\n"


def remember(folder: Path, nodes: int) -> None:
    """Write it as blocks into `folder`/tsdb; RuntimeError where promtool cannot."""
    past = folder / "past.om"
    now = int(time.time()) - 120
    with past.open("w", encoding="ascii") as file:
        file.writelines(past_of(nodes, now))
    made = subprocess.run(
        ["promtool", "tsdb", "create-blocks-from", "openmetrics", "--quiet", f"{past}", f"{folder / 'tsdb'}"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    past.unlink()
    if made.returncode:
        raise RuntimeError(f"promtool could not write the history: {made.stderr[-500:]}")
