"""Measures what the exporter itself costs: `make bench`, or `python benchmarks/run.py GROUP...` for a part of it.

Owns only the way in: the measuring is in the modules beside it, found whatever folder this is started from.
"""

import sys
from importlib import import_module
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    sys.exit(import_module("benchmarks.suite").main())
