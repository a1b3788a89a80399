"""Reads GPUs through NVML, the management library of NVIDIA's driver, where there is no DCGM."""
