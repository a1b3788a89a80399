"""The policy preview: what another threshold would have freed, and which jobs it would have hit.

A GPU is reclaimed when it enters the state that the previewed threshold leads to. The time from then until its job
worked again, its hold ended or the recording ended is freed: wrongly, if the job worked again. That job is hit.
"""
