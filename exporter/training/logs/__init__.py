"""Reads progress from the logs of training jobs, without changes to the jobs.

Reads only logs of jobs that hold a GPU of this node, and uses nothing of a line but the values of known formats.
"""
