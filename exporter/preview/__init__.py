"""What another threshold would have freed, and whom it would have hit: the policy preview.

A GPU that somebody holds is *taken back* at the moment it enters the state that the previewed threshold leads to: for
`zombie.*` that is when effective work has stayed below the duty for the threshold. That moment is known from the past
alone. What comes later only scores it:

- *freed*: from then to the end of the hold, or of the recording, if the job never worked again on that GPU;
- *wrongly freed*: from then until it worked again, if it did. That job is *hit*. It may be hit again after that.

Each GPU is judged by itself. A job is *reclaimed* if any GPU would have been taken from it, and hit if it worked again
on one of those. Owns rows, scores and words. Refuses to detect: on a trace the states are the core's own.
"""
