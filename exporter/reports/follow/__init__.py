"""Training logs that say what a report would, followed without a change to the job.

Owns the way from the lines of a job's log to `Followed` messages. Refuses to give away anything of a line but the
numbers of a format it knows, and to read what is not the log of a job that holds a GPU here.
"""

from exporter.reports.follow.following import Followers, open_followers

__all__ = ["Followers", "open_followers"]
