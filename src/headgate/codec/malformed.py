"""What decoding raises for bytes that are not ours, also under a right checksum.

Counterparts: all codecs. Each of them refuses such bytes in its own way, and lets nothing else out.
"""

from __future__ import annotations

import msgspec

from headgate.errors import CorruptionError, UnknownFormat

MALFORMED = (msgspec.MsgspecError, ValueError, OverflowError, RecursionError)
"""Other fields; no UTF-8, or what a value of the model refuses; numbers too large; what is nested too deeply."""


def not_beginning_with(magic: bytes, data: bytes, path: str, what: str) -> CorruptionError:
    """Return the error of a file that is not ``what``: damaged if it ends within ``magic``, else foreign."""
    is_cut = magic.startswith(data[: len(magic)])
    return (CorruptionError if is_cut else UnknownFormat)(path, 0, what, repr(data[:24]))
