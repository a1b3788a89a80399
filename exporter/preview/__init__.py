"""Previews policies: the GPU-hours that other thresholds would have freed, and the jobs that they would have hit.

A GPU is reclaimed when it enters the state that the threshold defines. The time until its job works again, its
allocation ends or the recording ends is freed; if the job works again, it is freed wrongly, and the job is hit.
"""
