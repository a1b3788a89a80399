"""Previews policies: the GPU-hours that other thresholds would have freed, and the jobs that they would have hit.

A GPU is reclaimed when it first enters the state that the threshold defines, once in an allocation. The rest of the
allocation is freed; it is freed wrongly, and the job is hit, if the GPU did real work in it, by the readings.
"""
