"""An API server over real HTTP with TLS and tokens: lists and watches as in Kubernetes' "API Concepts".

Has objects, resource versions, a history that can be forgotten (410), bookmarks, and faults that tests inject. Every
object is validated with kubernetes-validate before it is served, and so is each Event that is sent. Rejects any
request without the right token, and any that selects more than one node's objects or one pod.
"""

import json
import re
import socket
import ssl
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Self
from urllib.parse import parse_qs, urlsplit

from tests.certificates import Authority
from tests.kubernetes import schemas

VERSION = "1.34"
"""Version of Kubernetes against which objects are validated."""
PATHS = {
    "/api/v1/pods": ("v1", "Pod"),
    "/api/v1/nodes": ("v1", "Node"),
    "/apis/resource.k8s.io/v1/resourceslices": ("resource.k8s.io/v1", "ResourceSlice"),
    "/apis/kueue.x-k8s.io/v1beta1/workloads": ("kueue.x-k8s.io/v1beta1", "Workload"),
    "/apis/kueue.x-k8s.io/v1beta1/localqueues": ("kueue.x-k8s.io/v1beta1", "LocalQueue"),
    "/apis/kueue.x-k8s.io/v1beta2/workloads": ("kueue.x-k8s.io/v1beta2", "Workload"),
    "/apis/kueue.x-k8s.io/v1beta2/localqueues": ("kueue.x-k8s.io/v1beta2", "LocalQueue"),
}
_WITHOUT_SCHEMA = "kueue.x-k8s.io/"
"""API group whose objects are not validated: the schemas are those of Kubernetes alone."""
Json = dict[str, Any]
_WRITTEN = re.compile(r"/api/v1/namespaces/([^/]+)/(events|pods)(?:/([^/]+))?")
"""Namespace, kind, and the name of the changed object."""


def certificate(folder: Path) -> tuple[Path, Path]:
    """A CA's certificate, and one it signed for 127.0.0.1 with its key, all made for this test."""
    authority = Authority(folder)
    chain, key = authority.issue("kubernetes", "IP:127.0.0.1")
    chain.write_text(chain.read_text() + key.read_text())
    return authority.certificate, chain


class ApiServer:
    """Serves from construction to `stop`; `start` serves again at the same address."""

    def __init__(self, folder: Path) -> None:
        self.ca, self._chain = certificate(folder)
        self.token = f"token of {folder.name}"
        self.objects: dict[str, dict[str, Json]] = {path: {} for path in PATHS}
        self.missing: set[str] = set()
        """Paths that this server's version lacks."""
        self.forbidden: set[str] = set()
        self.requests: list[tuple[str, dict[str, str]]] = []
        self.writable = False
        """Whether this account may create Events and patch pods."""
        self.written: list[tuple[str, Json]] = []
        """Method, path and content of each accepted write."""
        self.answers: list[int] = []
        """Statuses of the next writes, which are rejected with them."""
        self.piece = 0
        """Bytes per chunk of a watch; 0: whole events."""
        self.fleeting = False
        """End each watch at once."""
        self.deaf = False
        """Accept requests and answer none of them until `stop`."""
        self._over = threading.Event()
        self._version, self._oldest = 100, 0
        self._history: list[tuple[int, str, str, Json, Json | None]] = []
        """Version, type, path, the object, and the object as it was before."""
        self._changed = threading.Condition()
        self.connections: list[socket.socket] = []
        self._round = 0
        self.port = 0
        self.start()

    def start(self) -> None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(self._chain)
        self._over.clear()
        self._server = ThreadingHTTPServer(("127.0.0.1", self.port), _handler(self))
        self._server.daemon_threads = True
        self._server.socket = context.wrap_socket(self._server.socket, server_side=True, do_handshake_on_connect=False)
        self.port = self._server.server_address[1]
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02})
        self._thread.start()

    def stop(self) -> None:
        self._over.set()
        if self._thread.is_alive():
            self._server.shutdown()
            self._thread.join()
            self._server.server_close()
        self.end_watches()
        for connection in self.connections:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        self.connections.clear()

    def endure(self) -> None:
        """Send nothing while this server lives."""
        self._over.wait()

    @property
    def url(self) -> str:
        return f"https://127.0.0.1:{self.port}"

    def has(self, *things: Json) -> Self:
        """Create or change objects; each is valid Kubernetes, and gets a resource version."""
        for thing in things:
            path = next(path for path, kind in PATHS.items() if kind == (thing["apiVersion"], thing["kind"]))
            if not thing["apiVersion"].startswith(_WITHOUT_SCHEMA):
                schemas.validate(thing, VERSION, strict=False)
            uid = thing["metadata"]["uid"]
            self._happened("MODIFIED" if uid in self.objects[path] else "ADDED", path, thing)
        return self

    def deletes(self, thing: Json) -> None:
        path = next(path for path, found in self.objects.items() if thing["metadata"]["uid"] in found)
        self._happened("DELETED", path, thing)

    def bookmark(self) -> None:
        """Send a bookmark to all watches."""
        for path, (version, kind) in PATHS.items():
            empty: Json = {"apiVersion": version, "kind": kind, "metadata": {"uid": ""}}
            self._happened("BOOKMARK", path, empty)

    def says(self, path: str, text: str) -> None:
        """Send any line to the watches of `path`."""
        self._happened("RAW", path, {"text": text, "metadata": {}})

    def forgets(self) -> None:
        """Forget the history: a watch from an older version is answered with 410, an open one gets it as an error."""
        with self._changed:
            self._version += 1
            self._oldest = self._version
            self._history.clear()
            self._changed.notify_all()

    def end_watches(self) -> None:
        with self._changed:
            self._round += 1
            self._changed.notify_all()

    def asked(self, path: str, *, watch: bool) -> list[dict[str, str]]:
        """Return the number of requests for `path` so far."""
        return [asked for found, asked in self.requests if found == path and ("watch" in asked) == watch]

    def _happened(self, what: str, path: str, thing: Json) -> None:
        with self._changed:
            self._version += 1
            thing = json.loads(json.dumps(thing))  # as it is now, whatever the test changes later
            thing["metadata"]["resourceVersion"] = f"{self._version}"
            before = self.objects[path].get(thing["metadata"].get("uid", ""))
            if what in ("ADDED", "MODIFIED"):
                self.objects[path][thing["metadata"]["uid"]] = thing
            elif what == "DELETED":
                del self.objects[path][thing["metadata"]["uid"]]
            self._history.append((self._version, what, path, thing, before))
            self._changed.notify_all()

    def listing(self, path: str, selector: str) -> Json:
        version, kind = PATHS[path]
        with self._changed:
            items = [thing for thing in self.objects[path].values() if _selected(thing, selector)]
            metadata = {"resourceVersion": f"{self._version}"}
        return {"apiVersion": version, "kind": f"{kind}List", "metadata": metadata, "items": items}

    def watched(self, path: str, asked: dict[str, str]) -> Iterator[bytes]:
        """Yield the lines of a watch, until it ends."""
        since, began = int(asked["resourceVersion"]), self._round
        until = time.monotonic() + int(asked["timeoutSeconds"])
        while time.monotonic() < until:
            with self._changed:
                if since < self._oldest:
                    yield _line("ERROR", {"kind": "Status", "code": 410, "reason": "Expired", "message": "too old"})
                    return
                events = [each for each in self._history if each[0] > since and each[2] == path]
                if not events and self._round == began:
                    self._changed.wait(0.5)
                if self._round != began:
                    return
            for version, what, _, thing, before in events:
                since = version
                if what == "RAW":
                    yield thing["text"].encode() + b"\n"
                elif what == "BOOKMARK":
                    yield _line(what, thing)
                else:
                    yield from _selected_event(what, thing, before, asked["fieldSelector"])

    def expired(self, asked: dict[str, str]) -> bool:
        return int(asked["resourceVersion"]) < self._oldest

    @property
    def version(self) -> int:
        """The newest resource version."""
        return self._version

    def lacks(self, asked: dict[str, str]) -> bool:
        """Whether a list is requested that is newer than anything here."""
        return int(asked.get("resourceVersion") or 0) > self._version

    def restores(self) -> None:
        """Go back to the first version, as with an older copy of etcd, and forget everything."""
        with self._changed:
            self._version, self._oldest = 100, 101
            self._history.clear()
            for things in self.objects.values():
                things.clear()
            self._changed.notify_all()

    def one_pod(self, namespace: str, selector: str) -> Json:
        """Answer with the selected pods of that namespace."""
        pods = self.listing("/api/v1/pods", selector)
        return pods | {"items": [pod for pod in pods["items"] if pod["metadata"]["namespace"] == namespace]}

    def write(self, method: str, path: str, kind: str, thing: Json) -> tuple[int, str]:
        """Store an Event or a change of a pod; return status and message."""
        if self.answers:
            return self.answers.pop(0), "another time"
        if not self.writable:
            return 403, f'"system:serviceaccount:gpu:gpu" cannot {method} {path}'
        if (method, kind) == ("POST", "events"):
            schemas.validate(thing, VERSION, strict=True)
            names = [event["metadata"]["name"] for found, event in self.written if found == f"POST {path}"]
            if thing["metadata"]["name"] in names:
                return 409, "already exists"
            if not path.endswith(f"/{thing['involvedObject']['namespace']}/events"):
                return 422, "involvedObject.namespace: does not match event.namespace"
        elif (method, kind) != ("PATCH", "pods"):
            return 405, "the server does not allow this method on the requested resource"
        self.written.append((f"{method} {path}", thing))
        return (201, "") if method == "POST" else (200, "")


def _line(what: str, thing: Json) -> bytes:
    return json.dumps({"type": what, "object": thing}, ensure_ascii=False).encode() + b"\n"


def _selected_event(what: str, thing: Json, before: Json | None, selector: str) -> Iterator[bytes]:
    """Yield what the watch cache sends to a watch with this selector (convertToWatchEvent of its cacheWatcher).

    An object that is deleted or no longer selected is sent as it was before, with the new version.
    """
    now = what != "DELETED" and _selected(thing, selector)
    if before is not None and _selected(before, selector):
        version = {"resourceVersion": thing["metadata"]["resourceVersion"]}
        gone = before | {"metadata": before["metadata"] | version}
        yield _line("MODIFIED", thing) if now else _line("DELETED", gone)
    elif now:
        yield _line("ADDED", thing)


def _selected(thing: Json, selector: str) -> bool:
    """Whether a field selector selects it: `a=b` and `a!=b`, joined by commas; an empty one selects all."""
    return all(_field_matches(thing, part) for part in selector.split(",") if part)


def _field_matches(thing: Json, part: str) -> bool:
    field, operator, wanted = re.split("(!?=)", part)
    found: Any = thing
    for name in field.split("."):
        found = found.get(name, {})
    return bool((found == wanted) is (operator == "="))


def _refusal(api: ApiServer, token: str, path: str, asked: dict[str, str]) -> tuple[int, str] | None:
    if token != f"Bearer {api.token}":
        return 401, "Unauthorized"
    if path not in PATHS or path in api.missing:
        return 404, "the server could not find the requested resource"
    if path in api.forbidden:
        return 403, f'"system:serviceaccount:gpu:gpu" cannot list {path}'
    if "=" not in asked.get("fieldSelector", ""):
        return 400, "a daemon on a node has no business with other nodes' objects"
    if "watch" not in asked and api.lacks(asked):
        return 504, f"Timeout: Too large resource version: {asked['resourceVersion']}, current: {api.version}"
    return (410, "too old resource version") if "watch" in asked and api.expired(asked) else None


def _answer(api: ApiServer, request: BaseHTTPRequestHandler) -> None:
    parts = urlsplit(request.path)
    asked = {key: values[0] for key, values in parse_qs(parts.query, keep_blank_values=True).items()}
    api.requests.append((parts.path, asked))
    if api.deaf:
        api.endure()
    named = _WRITTEN.fullmatch(parts.path)
    refusal = _refusal(api, request.headers["Authorization"], "/api/v1/pods" if named else parts.path, asked)
    if refusal is None and named is not None:
        _send(request, 200, api.one_pod(named[1], asked["fieldSelector"]))
    elif refusal:
        _send(request, refusal[0], {"kind": "Status", "code": refusal[0], "message": refusal[1]})
    elif "watch" in asked:
        _stream(request, () if api.fleeting else api.watched(parts.path, asked), api)
    else:
        _send(request, 200, api.listing(parts.path, asked["fieldSelector"]))


def _write(api: ApiServer, request: BaseHTTPRequestHandler) -> None:
    body = json.loads(request.rfile.read(int(request.headers["Content-Length"])))
    api.requests.append((request.path, {}))
    if api.deaf:
        api.endure()
    named = _WRITTEN.fullmatch(request.path)
    merging = request.command == "POST" or request.headers["Content-Type"] == "application/merge-patch+json"
    if request.headers["Authorization"] != f"Bearer {api.token}":
        code, said = 401, "Unauthorized"
    elif named is None or not merging:
        code, said = 415, "no such place, or no such way to say it"
    else:
        code, said = api.write(request.command, request.path, named[2], body)
    _send(request, code, body if code < 300 else {"kind": "Status", "code": code, "message": said})


def _send(request: BaseHTTPRequestHandler, code: int, body: Json) -> None:
    text = json.dumps(body, ensure_ascii=False).encode()
    request.send_response(code)
    request.send_header("Content-Type", "application/json")
    request.send_header("Content-Length", f"{len(text)}")
    request.end_headers()
    request.wfile.write(text)


def _stream(request: BaseHTTPRequestHandler, lines: Iterable[bytes], api: ApiServer) -> None:
    request.send_response(200)
    request.send_header("Content-Type", "application/json")
    request.send_header("Transfer-Encoding", "chunked")
    request.end_headers()
    for line in lines:
        for piece in _pieces(line, api.piece):
            request.wfile.write(b"%x\r\n%b\r\n" % (len(piece), piece))
            request.wfile.flush()
    request.wfile.write(b"0\r\n\r\n")


def _handler(api: ApiServer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def handle(self) -> None:
            api.connections.append(self.connection)
            with suppress(OSError):  # the client disconnected, or this server is stopped
                super().handle()

        def do_GET(self) -> None:
            _answer(api, self)

        def do_POST(self) -> None:
            _write(api, self)

        def do_PATCH(self) -> None:
            _write(api, self)

        def log_message(self, *_: object) -> None:
            """Log nothing."""

    return Handler


def _pieces(line: bytes, size: int) -> list[bytes]:
    return [line[at : at + size] for at in range(0, len(line), size)] if size else [line]
