"""`python -m benchmarks.dashboards`: every panel as a table, or a server to look at."""

import sys

from benchmarks.dashboards.measured import main

sys.exit(main())
