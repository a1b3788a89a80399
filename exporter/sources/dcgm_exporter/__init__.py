"""Reads GPUs from the metrics page of a dcgm-exporter that already runs on the node."""
