"""What client and server say before the first question: versions, and that both know the token.

The handshake is that of all connections of ours (``codec.handshake``), carried by two requests; behind it the
connection is known. Counterparts: ``connection`` and ``serving.greeting``. Source: SS3 and SS5 of
docs/spec/served-store.md. The token never travels.
"""

from __future__ import annotations

import functools
import importlib.metadata
import os
from pathlib import Path

import msgspec

from headgate.codec.handshake import SECRET_BYTES_MIN
from headgate.errors import UsageError
from headgate.store.served.address import TOKEN_FILE_VARIABLE, TOKEN_VARIABLE

NO_TOKEN = b"no token is needed on this machine"
"""What both know where no token is needed: the same steps, without the proof."""

HELLO, PROVE = "/hello", "/prove"
VERSION_HEADER, RELEASE_HEADER, WANTS_TOKEN_HEADER = "Headgate-Protocol", "Headgate-Release", "Headgate-Wants-Token"
CHECKSUM_HEADER, REQUEST_HEADER = "Headgate-Checksum", "Headgate-Request"


@functools.cache
def release() -> str:
    """Return the release of Headgate that this is, for people."""
    try:
        return importlib.metadata.version("headgate")
    except importlib.metadata.PackageNotFoundError:
        return "of unknown release"


class Facts(msgspec.Struct, frozen=True):
    """What a server says of itself to those that it knows.

    Attributes:
        instance: of its process: another one knows nothing of the requests of this one.
        store: what tells its store from others.
        root: the store's directory, for messages.
    """

    instance: str
    store: str
    root: str


def tokens_of(file: str | None = None) -> list[bytes]:
    """Return the tokens in ``file``, one in each line, or those that the environment says; none: there is none.

    Raises:
        UsageError: the file cannot be read, or a token is too short to be one.
    """
    named = file or os.environ.get(TOKEN_FILE_VARIABLE)
    if named:
        try:
            text = Path(named).expanduser().read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or "it is no text"
            raise UsageError(f"the file {named} with the token of the store cannot be read: {reason}") from error
        where = f"the file {named}"
    else:
        text, where = os.environ.get(TOKEN_VARIABLE, ""), f"${TOKEN_VARIABLE}"
    tokens = [line.strip().encode() for line in text.splitlines() if line.strip()]
    if named and not tokens:
        raise UsageError(
            f"{where} has no token of a store in it; put one there, of {SECRET_BYTES_MIN} or more characters"
        )
    if any(len(token) < SECRET_BYTES_MIN for token in tokens):
        raise UsageError(
            f"{where} has a token that is too short; take {SECRET_BYTES_MIN} characters or more that nobody can guess, "
            "such as: python -c 'import secrets; print(secrets.token_urlsafe(32))'"
        )
    return tokens
