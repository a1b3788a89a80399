"""Reads GPUs from the metrics page of a dcgm-exporter that runs on the node."""
