"""Answers of the past: receipts and events as JSON, what the page shows of them, and a job's own page.

Owns what is said when the store cannot be read. Refuses to withhold what is over while nothing is sampled now.
"""

from fastapi import Request, Response

from exporter.core.model import SECOND
from exporter.core.statement import Wanted
from exporter.http import page
from exporter.http.asking import AskedError, events_of, wanted_of
from exporter.http.feed import Feed
from exporter.http.replying import JSON, PLAIN, encode, html, reply, trouble
from exporter.http.statements import UNREADABLE, Kept, events_out, gathered, receipts_body


def receipts_answer(feed: Feed, request: Request, kept: Kept | None) -> Response:
    """With a store also while nothing is sampled: what is over stays true."""
    seen = feed.look()
    if kept is None and (seen.snapshot is None or seen.problem):
        return trouble(503, seen.problem)
    try:
        found = gathered(kept, seen.snapshot, wanted_of(request.query_params.multi_items()))
    except AskedError as err:
        return trouble(422, str(err))
    except UNREADABLE as err:
        return trouble(503, f"the store of receipts cannot be read: {err}")
    return reply(receipts_body(found, seen.snapshot, kept=kept is not None), JSON, request=request)


def events_answer(feed: Feed, request: Request, kept: Kept | None) -> Response:
    """Without a store there are none, and it says so."""
    seen = feed.look()
    try:
        since, limit = events_of(request.query_params.multi_items())
        found = [] if kept is None else kept.events(since, limit)
    except AskedError as err:
        return trouble(422, str(err))
    except UNREADABLE as err:
        return trouble(503, f"the store of events cannot be read: {err}")
    return reply(encode(events_out(found, seen.snapshot, kept=kept is not None)), JSON, request=request)


def past_of(feed: Feed, kept: Kept | None) -> page.Past:
    """What the page shows of the store, and why not where it cannot be read: the present is shown in any case."""
    wanted = Wanted(limit=2 * page.RECEIPTS_SHOWN)
    try:
        found = gathered(kept, feed.look().snapshot, wanted)
        events = [] if kept is None else kept.events(0.0, page.EVENTS_SHOWN)
    except UNREADABLE as err:
        return page.Past(kept=True, trouble=str(err))
    return page.Past(kept=kept is not None, statements=found, events=events)


def job_answer(feed: Feed, request: Request, kept: Kept | None) -> Response:
    """What is over stays true, so it is shown whether or not anything is sampled now."""
    seen, job_id = feed.look(), request.path_params["job_id"]
    try:
        lives = gathered(kept, seen.snapshot, Wanted(job_id=job_id)) if job_id else []  # none would pick all
    except UNREADABLE as err:
        return reply(f"the store of receipts cannot be read: {err}\n".encode(), PLAIN, status=503)
    now = None if seen.snapshot is None else seen.snapshot.wall / SECOND
    shown = page.render_job(job_id, lives, now=now, kept=kept is not None, problem=seen.problem)
    return html(shown, request, status=200 if lives else 404)
