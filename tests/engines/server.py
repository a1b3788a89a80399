"""Runs the processes of a serving engine for tests: a parent that listens, and a child that stands for the GPU process.

Run as `python server.py BIND PORT PAGE WORDS...`; prints its port and its child's pid. Ends with its standard input.
"""

import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

BIND, PORT, PAGE = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])


class Handler(BaseHTTPRequestHandler):
    """Returns the file for every request."""

    def do_GET(self) -> None:
        body = PAGE.read_bytes()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


if __name__ == "__main__":
    child = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)
    with child, ThreadingHTTPServer((BIND, PORT), Handler) as http:
        print(http.server_port, child.pid, os.getpid(), flush=True)  # noqa: T201  what the test waits for
        threading.Thread(target=http.serve_forever, daemon=True).start()
        sys.stdin.read()
        http.shutdown()
