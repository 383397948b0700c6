"""The form in which Pravega's Java client writes objects: ``VersionedSerializer`` and ``RevisionDataOutput`` of 0.13.

An object has a version and revisions: an older reader skips the revisions that it does not know.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Collection, Mapping
from typing import TypeVar
from uuid import UUID

from headgate.errors import ProtocolViolation

_K = TypeVar("_K")
_V = TypeVar("_V")

_SHORT, _INT, _LONG = struct.Struct(">H"), struct.Struct(">i"), struct.Struct(">q")

_FORMAT, _VERSION = 0, 0
"""Of the form itself, and of all objects that are read and written here."""


class JavaInput:
    """Reads fields one after the other.

    Raises:
        ProtocolViolation: of every call: they are cut off.
    """

    def __init__(self, data: bytes) -> None:
        self._data, self._at = data, 0

    @property
    def is_at_end(self) -> bool:
        """Whether everything was read."""
        return self._at >= len(self._data)

    def byte(self) -> int:
        """Return one byte."""
        return self._bytes(1)[0]

    def integer(self) -> int:
        """Return 32 bits with a sign."""
        return int(self._take(_INT))

    def long(self) -> int:
        """Return 64 bits with a sign."""
        return int(self._take(_LONG))

    def text(self) -> str:
        """Return a text."""
        return self._bytes(self._take(_SHORT)).decode(errors="surrogateescape")

    def size(self) -> int:
        """Return a number that takes one byte, two or four."""
        first = self.byte()
        if first < 0x80:
            return first
        rest = self._bytes(1 if first < 0xC0 else 3)
        return int.from_bytes(bytes([first & 0x3F]) + rest)

    def buffer(self) -> bytes:
        """Return bytes with their length in front."""
        return self._bytes(self.size())

    def sized(self) -> bytes:
        """Return bytes with 32 bits of length in front."""
        return self._bytes(self.integer())

    def pairs(self, key: Callable[[], _K], value: Callable[[], _V]) -> dict[_K, _V]:
        """Return pairs."""
        return {key(): value() for _ in range(self.size())}

    def elements(self, element: Callable[[], _V]) -> list[_V]:
        """Return elements."""
        return [element() for _ in range(self.size())]

    def longs(self) -> dict[str, int]:
        """Return texts with numbers, as segments have offsets."""
        return self.pairs(self.text, self.long)

    def first_revision(self) -> JavaInput:
        """Return the fields of an object that have been there from the beginning; read past the others.

        Raises:
            ProtocolViolation: a later Pravega has written it in another way.
        """
        version, count = self.byte(), self.byte()
        if version != _VERSION or not count:
            raise ProtocolViolation("reader group of Pravega", f"an object of version {version}")
        found = []
        for _ in range(count):
            self.byte()
            found.append(self.sized())
        return JavaInput(found[0])

    def format(self) -> None:
        """Read what is in front of an object.

        Raises:
            ProtocolViolation: it is none, or a later Pravega has written it.
        """
        if (found := self.byte()) != _FORMAT:
            raise ProtocolViolation("reader group of Pravega", f"an object in format {found}")

    def _take(self, form: struct.Struct) -> int:
        return int(form.unpack(self._bytes(form.size))[0])

    def _bytes(self, size: int) -> bytes:
        found = self._data[self._at : self._at + size]
        if size < 0 or len(found) != size:
            raise ProtocolViolation("reader group of Pravega", "an object that is cut off")
        self._at += size
        return found


class JavaOutput:
    """Writes fields one after the other. Each call returns the output, for the next one."""

    def __init__(self) -> None:
        self._data = bytearray()

    @property
    def data(self) -> bytes:
        """What was written."""
        return bytes(self._data)

    def byte(self, value: int) -> JavaOutput:
        """Write one byte."""
        self._data.append(value)
        return self

    def integer(self, value: int) -> JavaOutput:
        """Write 32 bits."""
        self._data += _INT.pack(value)
        return self

    def long(self, value: int) -> JavaOutput:
        """Write 64 bits."""
        self._data += _LONG.pack(value)
        return self

    def double(self, value: float) -> JavaOutput:
        """Write a floating-point number."""
        self._data += struct.pack(">d", value)
        return self

    def id(self, value: UUID) -> JavaOutput:
        """Write an id."""
        self._data += value.bytes
        return self

    def text(self, value: str) -> JavaOutput:
        """Write a text."""
        data = value.encode()
        self._data += _SHORT.pack(len(data)) + data
        return self

    def size(self, value: int) -> JavaOutput:
        """Write a number below 2**30."""
        if value < 1 << 7:
            return self.byte(value)
        self._data += (value | 1 << 15).to_bytes(2) if value < 1 << 14 else (value | 3 << 30).to_bytes(4)
        return self

    def buffer(self, value: bytes) -> JavaOutput:
        """Write bytes with their length in front."""
        self.size(len(value))
        self._data += value
        return self

    def sized(self, value: bytes) -> JavaOutput:
        """Write bytes with 32 bits of length in front."""
        self.integer(len(value))
        self._data += value
        return self

    def pairs(self, values: Mapping[_K, _V], key: Callable[[_K], object], value: Callable[[_V], object]) -> JavaOutput:
        """Write pairs; ``key`` and ``value`` write each."""
        self.size(len(values))
        for one, other in values.items():
            key(one)
            value(other)
        return self

    def elements(self, values: Collection[_V], element: Callable[[_V], object]) -> JavaOutput:
        """Write elements; ``element`` writes each."""
        self.size(len(values))
        for one in values:
            element(one)
        return self

    def longs(self, values: Mapping[str, int]) -> JavaOutput:
        """Write texts with numbers."""
        return self.pairs(values, self.text, self.long)


def written(*revisions: JavaOutput, kind: int | None = None) -> bytes:
    """Return an object. ``kind``: which of the kinds that may stand there it is; None: there is only one."""
    out = JavaOutput().byte(_FORMAT)
    if kind is not None:
        out.byte(kind)
    out.byte(_VERSION).byte(len(revisions))
    for number, fields in enumerate(revisions):
        out.byte(number).sized(fields.data)
    return out.data
