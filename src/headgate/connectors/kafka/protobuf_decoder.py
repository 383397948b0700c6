"""Decodes Kafka's values of Protobuf into the fields of a message, with the package ptars.

The message is that of a generated class; its description travels to the workers, not the class. With a schema registry
a value begins with a zero byte, the id of its schema in four bytes, and which message of that schema it is. Fields have
numbers, so that values of older and newer schemas are read without asking for these.
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

_FRAME_BYTES = 6
"""A zero byte, an id, and how many numbers say which message it is."""

_Rows: TypeAlias = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class ProtobufMessage:
    """A message. ``files``: the descriptions of the files that define it, those that others need first."""

    name: str
    files: tuple[bytes, ...]


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
    return ProtobufMessage(descriptor.full_name, tuple(files.values()))


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
        self._is_framed = is_framed
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
        offsets = np.frombuffer(values.buffers()[1], np.int64, len(values) + 1, 8 * values.offset)
        raw = (values.buffers()[2] or pa.py_buffer(b"")).to_pybytes() + bytes(_FRAME_BYTES)
        data = np.frombuffer(raw, np.uint8)
        begin, size = offsets[:-1], np.diff(offsets)
        count = data[np.minimum(begin + _FRAME_BYTES - 1, len(data) - 1)].astype(np.int64)
        skip = _FRAME_BYTES + count // 2  # of the numbers of messages each is a byte
        is_good = (size >= skip) & (data[np.minimum(begin, len(data) - 1)] == 0) & (count % 2 == 0) & (count < 64)
        if headers is not None:
            is_id = pc.equal(pc.struct_field(headers.flatten(), "key"), ID_HEADER)
            by_header = np.isin(np.arange(len(values)), pc.list_parent_indices(headers).filter(is_id).to_numpy())
            is_good, skip = is_good | by_header, np.where(by_header, 0, skip)
        if not is_good.all():
            problem = "it does not begin with the id of a schema, a zero byte and four more, and with its message"
            refused.add(problem, rows[~is_good], values.filter(pa.array(~is_good)))
        begin, size, skip = begin[is_good], size[is_good], skip[is_good]
        return cut_out(raw, begin + skip, size - skip), rows[is_good]
