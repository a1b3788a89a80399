"""HTTP: metrics for Prometheus, JSON for programs, a page for people, and the server around them.

Owns everything between a Snapshot and a socket. Refuses to wait for a sample, and to show an old one as live.
"""

from exporter.http.app import create_app
from exporter.http.guarding import Guarding
from exporter.http.serving import ListenError, run

__all__ = ["Guarding", "ListenError", "create_app", "run"]
