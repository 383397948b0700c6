"""Types as msgspec may be given them from several threads.

At its first use of a dataclass or a ``Struct``, msgspec 0.22 puts a description of the fields where other threads find
it, and only then fills it in. A second thread that decodes the same type at that moment reads half a description, and
the process ends with a segmentation fault. So each type that msgspec decodes comes from ``decodable``.
"""

import functools
import threading
from collections.abc import Hashable
from typing import TypeVar, cast

import msgspec

_T = TypeVar("_T")

_LOCK = threading.Lock()


def decodable(kind: type[_T]) -> type[_T]:
    """Return ``kind``, with its fields and those of the types in it described for msgspec."""
    _describe(cast(Hashable, kind))
    return kind


@functools.cache
def _describe(kind: Hashable) -> None:
    # Two threads may come here for one type: the second finds what the first has filled in.
    with _LOCK:
        msgspec.msgpack.Decoder(kind)
