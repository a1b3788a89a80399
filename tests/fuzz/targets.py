"""All parsers of foreign input, in the order of the page."""

from tests.fuzz.targets_files import FILES
from tests.fuzz.targets_history import HISTORY
from tests.fuzz.targets_kubernetes import KUBERNETES
from tests.fuzz.targets_logs import LOGS
from tests.fuzz.targets_node import NODE
from tests.fuzz.targets_schedulers import SCHEDULERS

TARGETS = {target.name: target for target in (*NODE, *LOGS, *SCHEDULERS, *KUBERNETES, *FILES, *HISTORY)}
