"""Removes passwords and tokens from addresses and messages before they are shown or logged."""

import re

HIDDEN = "***"
"""Replaces a secret."""
_ADDRESS = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*://)(\S*)")
_VALUE = re.compile(r"""([?&][^=&#\s]*=)[^&#\s]*?(?=['")>,:;]*(?:[&#\s]|$))""")
_NO_PORT = re.compile(r":(?!\d*$)[^\]]*$")
"""No port follows the colon, so this is no host but a password with a slash that was not written as %2F."""
_BARE = re.compile(r"(?<![^\s'\"(=<])[^\s:/@'\"(<]*:(?!//)\S+@")
"""user:password@ of an address without its scheme."""
_HEADER = re.compile(r"(?is)\b(illegal header value|authorization['\"]?\s*[:=])(\s*)\S.*")
"""HTTP libraries repeat a header in their errors: a token file with two lines is an illegal header value."""


def redact_secrets(text: str) -> str:
    """Return the text with its credentials (user:password@), query values and authorization headers hidden."""
    if "://" in text:
        text = _ADDRESS.sub(lambda found: found[1] + _VALUE.sub(rf"\1{HIDDEN}", _redact_user(found[2])), text)
    text = _BARE.sub(f"{HIDDEN}@", text) if "@" in text else text
    return _HEADER.sub(rf"\1\2{HIDDEN}", text)


def _redact_user(rest: str) -> str:
    """Hide user and password in what follows `://`."""
    authority = re.split(r"[/?#]", rest, maxsplit=1)[0]
    if "@" in authority:
        return f"{HIDDEN}@{rest[authority.rindex('@') + 1 :]}"
    if "@" in rest and _NO_PORT.search(authority):
        return f"{HIDDEN}@{rest[rest.rindex('@') + 1 :]}"
    return rest
