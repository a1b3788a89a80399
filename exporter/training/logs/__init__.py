"""Reads progress from the logs of training jobs, without a change to the job.

Refuses to pass on anything of a line but the numbers of a format it knows, and to read a file that is not the log of a
job which holds a GPU of this node.
"""
