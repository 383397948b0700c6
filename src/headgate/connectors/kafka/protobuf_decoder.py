"""Decodes Kafka's values of Protobuf into the fields of a message, with the package ptars.

The message is that of a generated class; its description travels to the workers, not the class. With a schema registry
a value begins with a zero byte, the id of its schema in four bytes, and the index of its message in that schema. Fields
have numbers, so that values of older and newer schemas are read without asking for these.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from headgate.codec.avro import cut_out
from headgate.connectors.files.line_decoders import Decoded, Refused, isolate, one_batch
from headgate.connectors.kafka.avro_decoder import ID_HEADER
from headgate.distribution import install_command
from headgate.errors import UsageError
from headgate.operators.schemas import canonical_schema, to_canonical

_FRAME_BYTES = 5
"""A zero byte and an id."""

_HEADER_BYTES = {0: _FRAME_BYTES, 1: 17}
"""How long a header with an id or with a GUID is without the index of a message, by its first byte."""

_Rows: TypeAlias = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class ProtobufMessage:
    """A message.

    Attributes:
        files: the descriptions of the files that define it, those that others need first.
        indexes: how values may say which message of its file it is.
    """

    name: str
    files: tuple[bytes, ...]
    indexes: tuple[bytes, ...]


def message_of(generated: object) -> ProtobufMessage:
    """Return what a generated class describes.

    Raises:
        UsageError: it is none.
    """
    descriptor = getattr(generated, "DESCRIPTOR", None)
    if descriptor is None or not hasattr(descriptor, "full_name") or not hasattr(descriptor, "file"):
        raise UsageError(
            "format='protobuf' of a Kafka source needs schema=Message, a class that protoc generated, "
            f"not {generated!r}"
        )
    files: dict[str, bytes] = {}
    _add(descriptor.file, files)
    return ProtobufMessage(descriptor.full_name, tuple(files.values()), _indexes_of(descriptor))


def _indexes_of(descriptor: Any) -> tuple[bytes, ...]:
    """Return the index of a message in its file, in the forms of the wire.

    It is its number there, after those of the messages around it. Some clients count the entries of maps among the
    messages of a message, and others do not. The first message of a file is one zero byte for short.
    """
    paths: list[list[int]] = [[], []]
    inner = descriptor
    while inner is not None:
        around = inner.containing_type
        same = list(inner.file.message_types_by_name.values() if around is None else around.nested_types)
        written = [one for one in same if not one.GetOptions().map_entry]
        for path, counted in zip(paths, (same, written), strict=True):
            path.insert(0, [one.full_name for one in counted].index(inner.full_name))
        inner = around
    forms = [b"".join(map(_zigzag, (len(path), *path))) for path in paths]
    return tuple(dict.fromkeys([*forms, *(b"\0" for path in paths if path == [0])]))


def _zigzag(number: int) -> bytes:
    number, found = 2 * number, bytearray()
    while number > 0x7F:
        found.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*found, number])


def _add(file: Any, files: dict[str, bytes]) -> None:
    for one in file.dependencies:
        if one.name not in files:
            _add(one, files)
    files[file.name] = file.serialized_pb


class ProtobufDecoder:
    """See the module.

    Attributes:
        schema: of the records that it makes.
    """

    def __init__(self, message: ProtobufMessage, *, is_framed: bool) -> None:
        """``is_framed``: whether values begin as a schema registry demands it."""
        try:
            ptars, library = importlib.import_module("ptars"), importlib.import_module("ptars._lib")
        except ImportError as error:
            raise UsageError(
                f"format='protobuf' needs the package ptars: {install_command('protobuf')}, on every worker"
            ) from error
        config = ptars.PtarsConfig(
            use_large_string=True, use_large_binary=True, use_large_list=True, enum_repr="string"
        )
        self._handler = library.ProtoRegistry(list(message.files)).create_for_message(message.name, config)
        self._message, self._is_framed = message, is_framed
        self.schema = canonical_schema(self._handler.schema())

    def decode(self, values: pa.Array, rows: _Rows, headers: pa.Array | None) -> Decoded:
        """Return the records and the refused values. ``rows``: what to call each value."""
        refused = Refused()
        if self._is_framed:
            values, rows = self._without_frame(values, rows, headers, refused)
        messages = values.cast(pa.binary())
        good = np.ones(len(values), np.bool_)
        batches: list[pa.RecordBatch] = []

        def parse(low: int, high: int) -> str | None:
            try:
                found = self._handler.array_to_record_batch(pa.concat_arrays([messages.slice(low, high - low)]))
                batches.append(to_canonical(found, self.schema))
            except ValueError as error:
                return str(error).removeprefix("failed to decode Protobuf message: ")
            return None

        isolate(len(values), parse, values, rows, refused, good)
        whole = pa.Table.from_batches(batches, self.schema).combine_chunks()
        return Decoded(one_batch(whole, self.schema), rows[good], refused)

    def _without_frame(
        self, values: pa.Array, rows: _Rows, headers: pa.Array | None, refused: Refused
    ) -> tuple[pa.Array, _Rows]:
        """Return what follows the frames; values whose header names their schema have none."""
        indexes = self._message.indexes
        offsets = np.frombuffer(values.buffers()[1], np.int64, len(values) + 1, 8 * values.offset)
        raw = (values.buffers()[2] or pa.py_buffer(b"")).to_pybytes() + bytes(_FRAME_BYTES + max(map(len, indexes)))
        data = np.frombuffer(raw, np.uint8)
        begin, size = offsets[:-1], np.diff(offsets)
        is_framed = (size > _FRAME_BYTES) & (data[begin] == 0)
        skip = np.zeros(len(values), np.int64)
        for index in indexes:
            found = data[begin[:, None] + np.arange(_FRAME_BYTES, _FRAME_BYTES + len(index))]
            skip[(found == np.frombuffer(index, np.uint8)).all(axis=1)] = _FRAME_BYTES + len(index)
        is_message = (skip > 0) & (skip <= size)
        if headers is not None:
            by_header, is_other = self._in_headers(headers)
            is_framed[by_header], is_message[by_header], skip[by_header] = True, ~is_other, 0
        other = f"it is not {self._message.name}, but another message of its schema"
        frame = "it does not begin with the id of a schema, a zero byte and four more, and with its message"
        for problem, is_bad in ((frame, ~is_framed), (other, is_framed & ~is_message)):
            if is_bad.any():
                refused.add(problem, rows[is_bad], values.filter(pa.array(is_bad)))
        is_good = is_framed & is_message
        begin, size, skip = begin[is_good], size[is_good], skip[is_good]
        return cut_out(raw, begin + skip, size - skip), rows[is_good]

    def _in_headers(self, headers: pa.Array) -> tuple[_Rows, npt.NDArray[np.bool_]]:
        """Return which values have a header that names their schema, and whether it says another message."""
        is_id = pc.equal(pc.struct_field(headers.flatten(), "key"), ID_HEADER)
        which = pc.list_parent_indices(headers).filter(is_id).to_numpy()
        named = pc.struct_field(headers.flatten(), "value").filter(is_id).to_pylist()
        indexes = [one[_HEADER_BYTES.get(one[0], len(one)) :] if one else b"" for one in named]
        return which, np.array([bool(one) and one not in self._message.indexes for one in indexes], np.bool_)
