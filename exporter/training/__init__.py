"""Collects what training jobs report about themselves: over a local socket, over loopback HTTP, or from their logs.

Attributes each report to a job by the process that sent it; a message cannot name its own job.
"""
