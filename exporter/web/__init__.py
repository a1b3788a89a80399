"""Serves the newest snapshot over HTTP: metrics for Prometheus, JSON for programs, pages for people.

Refuses to wait for a sample, and to serve an old one as live.
"""
