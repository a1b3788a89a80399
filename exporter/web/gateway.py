"""Builds the app of the gateway: job records of the nodes, to each user those of his own jobs alone.

Who the user is, the kernel reports of the unix socket's other end; only of the site's proxy a header names him. The
user is part of every query, and each record is compared again before it is sent. A job of somebody else and one that
does not exist have the same answer. Does not send requests itself.
"""

import pwd
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

from fastapi import FastAPI, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from msgspec import Struct

from exporter import __version__
from exporter.core.job_record import JobRecord, JobRecordQuery
from exporter.web.app import ReceiptQuery, internal_error, invalid_query, repeated_parameter, without_pydantic_v1
from exporter.web.history_api import encode_records, newest_first
from exporter.web.responses import JSON, encode_json, error_response, make_response, status_response

_USER_REQUESTS, _REQUESTS = 2, 8
"""Requests that are handled at once: of one user, and in total."""
_WAIT_SECONDS = 20.0
"""How long a request waits for others before it is refused."""
_NAME = re.compile(r"[!-+\--~]{1,256}")
"""A user's name in the proxy's header: no blank, and no comma, which is between the values of a repeated header."""
_OVERFLOW_UID = Path("/proc/sys/kernel/overflowuid")
"""Has the uid that stands for all that the kernel cannot name here, such as those of another user namespace."""
_DEFAULT_OVERFLOW_UID = 65534
"""The kernel's own; systemd's `ProcSubset=pid` hides the file."""


class GatewayError(Exception):
    """No node can be asked; the message has the reason."""


class FoundRecords(Struct, frozen=True, kw_only=True):
    """What the nodes answered."""

    records: tuple[JobRecord, ...]
    unanswered: tuple[str, ...] = ()
    """One sentence for each node that did not answer."""
    notes: tuple[str, ...] = ()
    cut: bool = False
    """Whether some records are missing because there were too many."""


class Identity(Struct, frozen=True, kw_only=True):
    """How a request's user is known."""

    proxy_uid: int | None = None
    """User as which the site's authenticating proxy runs."""
    header: str = ""
    """Header in which the proxy names the user."""
    exported: Callable[[str], str] = str
    """Returns the user's name as the nodes export it; empty: they export none."""

    def user(self, request: Request) -> str:
        """Return the name of the user who is to be answered; empty if he is not known."""
        uid: int | None = request.scope["state"]["connection"].uid
        if uid is None:
            return ""
        if uid != self.proxy_uid:
            return _user_name(uid)
        values = request.headers.getlist(self.header)
        return values[0] if len(values) == 1 and _NAME.fullmatch(values[0]) else ""


def _user_name(uid: int) -> str:
    try:
        overflow = int(_OVERFLOW_UID.read_text(encoding="ascii"))
    except OSError:
        overflow = _DEFAULT_OVERFLOW_UID
    try:
        return "" if uid == overflow else pwd.getpwuid(uid).pw_name
    except KeyError:
        return ""


Fetch = Callable[[JobRecordQuery, str], FoundRecords]
"""Asks the nodes; takes the query and the user's true name. Raises GatewayError."""


def create_gateway_app(fetch: Fetch, identity: Identity) -> FastAPI:
    """Build the app; `fetch` and `identity` are called on worker threads."""
    app = FastAPI(title="gpu-efficiency gateway", version=__version__, openapi_url=None, docs_url=None, redoc_url=None)
    turns = _Turns()

    def receipts(request: Request, query: Annotated[ReceiptQuery, Query()]) -> Response:
        if repeated := repeated_parameter(request):
            return error_response(422, f"{repeated} is given twice")
        true_name = identity.user(request)
        user = identity.exported(true_name) if true_name else ""
        if not user:
            return error_response(403, "who asks is not known here: no user has this uid, or the proxy named none")
        with turns.turn(true_name) as refusal:
            return refusal or _own_records(fetch, query, true_name, user)

    with without_pydantic_v1():
        for path, answer in (
            ("/api/v1/receipts", receipts),
            ("/healthz", lambda: status_response("")),
            ("/readyz", lambda: status_response("")),
        ):
            app.add_api_route(path, answer, methods=["GET", "HEAD"], response_class=Response)
    app.add_exception_handler(404, lambda *_: error_response(404, "no such page; there is /api/v1/receipts"))
    app.add_exception_handler(RequestValidationError, invalid_query)
    app.add_exception_handler(Exception, internal_error)
    return app


def _own_records(fetch: Fetch, query: ReceiptQuery, true_name: str, user: str) -> Response:
    """Respond with the records of the user, as exported; 503 if a node that may have them does not answer."""
    wanted = JobRecordQuery(**query.model_dump() | {"user": user})
    found = FoundRecords(records=())
    if query.user in ("", true_name, user):
        try:
            found = fetch(wanted, true_name)
        except GatewayError as err:
            return error_response(503, str(err))
    own = [record for record in found.records if wanted.matches(record)]
    if found.unanswered and not own:
        return error_response(503, "; ".join(found.unanswered))
    texts, cut = encode_records(newest_first(own)[: query.limit])
    body = {
        "node": "", "host": "", "at": time.time(), "kept": True,
        "cut": cut or found.cut or len(own) > query.limit,
        "notes": (*found.unanswered, *found.notes), "receipts": texts,
    }  # fmt: skip
    return make_response(encode_json(body), JSON)


class _Turns:
    """Requests that are handled now: of each user, and in total."""

    def __init__(self) -> None:
        self._of_user: Counter[str] = Counter()
        self._lock, self._places = threading.Lock(), threading.Semaphore(_REQUESTS)

    @contextmanager
    def turn(self, user: str) -> Iterator[Response | None]:
        """Yield the refusal of the user's request; None: it may be handled now."""
        with self._lock:
            refused = self._of_user[user] >= _USER_REQUESTS
            self._of_user[user] += not refused
        if refused:
            yield error_response(429, f"{_USER_REQUESTS} of your requests are being answered: wait for them")
            return
        try:
            if self._places.acquire(timeout=_WAIT_SECONDS):
                try:
                    yield None
                finally:
                    self._places.release()
            else:
                yield error_response(503, "too many users ask at once: try again")
        finally:
            with self._lock:
                self._of_user[user] -= 1
                self._of_user += Counter()  # forgets who has none
