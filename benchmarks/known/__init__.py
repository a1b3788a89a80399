"""Known kernels, and what the exporter says of them: the parts of `benchmarks/accuracy.py`."""
