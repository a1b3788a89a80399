"""Pushes the figures of /metrics over OTLP, with OpenTelemetry's own SDK."""
