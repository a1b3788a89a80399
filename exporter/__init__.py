"""Where every paid GPU-second goes: an exporter of three-layer utilisation and named leaks."""

__version__ = "0.1.0"
