"""Serves a snapshot over HTTP: metrics for Prometheus, JSON for programs, pages for people.

Refuses to wait for a sample, and to show an old one as live.
"""
