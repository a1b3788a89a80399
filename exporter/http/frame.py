"""What every page of the daemon has: head, style, script, the banner that says what is not live, and the policy.

Owns the security policy: nothing is fetched but the page itself, nothing runs but the one script, and no string becomes
markup in the browser (trusted types: none are made). Refuses to know what stands on the page.
"""

from base64 import b64encode
from hashlib import sha256
from html import escape

from exporter import __version__
from exporter.http.appearance import HATCHES, STYLE
from exporter.http.script import SCRIPT
from exporter.http.words import clock, text

REFRESH_SECONDS = 4
"""Between two looks of an open page. Without a script the browser loads it anew that often."""


def _digest(source: str) -> str:
    return f"'sha256-{b64encode(sha256(source.encode()).digest()).decode()}'"


CONTENT_SECURITY_POLICY = (
    f"default-src 'none'; style-src {_digest(STYLE)}; script-src {_digest(SCRIPT)}; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'"
)
_VERSION = sha256(f"{__version__}{STYLE}{SCRIPT}".encode()).hexdigest()[:12]
"""An open page loads itself anew when the daemon has another: its policy would not fit any more."""


def document(title: str, body: str, *, sampled_at: float | None, live: bool, stale: bool = False) -> str:
    """A whole page. `sampled_at`: Unix seconds of what it shows, None where it shows nothing sampled."""
    asof = "" if sampled_at is None else f"as of {_bare(clock(sampled_at))}"
    return (
        f'<!doctype html><html lang="en" data-every="{REFRESH_SECONDS}" data-version="{_VERSION}"><head>'
        '<meta charset="utf-8"><meta name="viewport" content="width=device-width,initial-scale=1">'
        f'<noscript><meta http-equiv="refresh" content="{REFRESH_SECONDS}"></noscript>'
        f"<title>{text(title)} · GPU efficiency</title><style>{STYLE}</style></head><body>{HATCHES}"
        '<p id="gone" class="banner alarm" role="alert" hidden></p>'
        f'<p id="pulse" data-asof="{asof}"{" data-live=1" if live else ""}>{asof}</p>'
        f'<div id="page"{" class=stale" if stale else ""}>{body}</div>'
        f"<script>{SCRIPT}</script></body></html>"
    )


def alarm(what: str, why: str) -> str:
    """The banner above what is not live, or not there."""
    return f'<p class="banner alarm" role="alert">{what}{escape(why[:1].upper() + why[1:])}</p>'


def simulated() -> str:
    """The banner above what was measured nowhere."""
    return (
        '<p class="banner simulated" role="status"><b>SIMULATED</b> · made by a model or a replay. '
        "Nothing here was measured on this machine.</p>"
    )


def _bare(tagged: str) -> str:
    """A `<time>` without its tags, for where only text may stand."""
    return tagged.partition(">")[2].removesuffix("</time>")
