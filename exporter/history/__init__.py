"""What this node has seen, on its own disk: a Prometheus that is down or far away is not the only memory of a job.

Owns one SQLite file: a checkpoint of the ledger, statements of jobs that have ended, events, closed books.
Refuses to hold up sampling, and to be worth more than the daemon: what fails here is counted and told, and no more.
"""

from exporter.history.file import HistoryError
from exporter.history.keeping import History
from exporter.history.place import boot_id, place_of
from exporter.history.store import Closed, Store, read_store

__all__ = ["Closed", "History", "HistoryError", "Store", "boot_id", "place_of", "read_store"]
