"""Collects what training jobs report about themselves: over a local socket, over loopback HTTP, or from their logs.

Every report is attributed to a job by the process that sent it. Refuses claims: no message can name its own job.
"""
