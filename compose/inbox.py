"""Prints what Alertmanager tells its receivers, one line an alert, for the demo of compose.yaml.

Owns one line's form. Refuses to know receivers: whatever address is told is printed with it.
"""

import json
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

ADDRESS = ("127.0.0.1", 9095)
"""Where the receivers of alerts/examples/alertmanager.yaml are."""


def lines(path: str, notification: dict[str, Any]) -> list[str]:
    """Who is told, whether it begins or ends, and the alert's own summary."""
    return [f"{path} {one['status']}: {one['annotations']['summary']}" for one in notification["alerts"]]


class Receiver(BaseHTTPRequestHandler):
    """Takes any notification."""

    def do_POST(self) -> None:
        """Print it."""
        told = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        print("\n".join(lines(self.path, told)), flush=True)
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Keep still: what was told is the log."""


if __name__ == "__main__":
    ThreadingHTTPServer(ADDRESS, Receiver).serve_forever()
