"""`python -m benchmarks.detection [CASE...]`: each case on a line, with the seeds for tuning."""

import sys

from benchmarks.detection.cases import CASES
from benchmarks.detection.runs import ALL, TUNING, runs, tell

tell(runs([ALL[name] for name in sys.argv[1:]] or CASES, TUNING))
