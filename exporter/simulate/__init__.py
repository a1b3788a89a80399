"""Simulates nodes with GPUs: Observations from a physical model, and the ground truth kept apart."""
