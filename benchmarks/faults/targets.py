"""All parsers of foreign input, in the order of the page."""

from benchmarks.faults.targets_files import FILES
from benchmarks.faults.targets_history import HISTORY
from benchmarks.faults.targets_kubernetes import KUBERNETES
from benchmarks.faults.targets_logs import LOGS
from benchmarks.faults.targets_node import NODE
from benchmarks.faults.targets_schedulers import SCHEDULERS

TARGETS = {target.name: target for target in (*NODE, *LOGS, *SCHEDULERS, *KUBERNETES, *FILES, *HISTORY)}
