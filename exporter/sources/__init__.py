"""Reads what the GPUs did: one package or module for each telemetry source, chosen by the selector."""
