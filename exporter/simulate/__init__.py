"""Simulates nodes with GPUs: produces Observations from a physical model, and the ground truth separately."""
