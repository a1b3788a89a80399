"""Reads GPUs through a DCGM host engine, with NVIDIA's own Python bindings."""
