"""`python -m exporter` is the command `gpu-efficiency`."""

import sys

from exporter.cli import main

sys.exit(main())
