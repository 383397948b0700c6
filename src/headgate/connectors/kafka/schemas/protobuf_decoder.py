"""Decodes Kafka's values of Protobuf into the fields of a message, with the package ptars.

With a schema registry
a value begins with a zero byte, the id of its schema in four bytes, and the index of its message in that schema. Fields
have numbers, so that values of older and newer schemas are read without asking for these.
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from headgate.codec.avro import cut_out
from headgate.connectors.files.line_decoders import Decoded, Refused, isolate, one_batch
from headgate.connectors.kafka.schemas.avro_decoder import ID_HEADER
from headgate.connectors.kafka.schemas.protobuf_message import ProtobufMessage, handler_of
from headgate.operators.schemas import canonical_schema, to_canonical

_FRAME_BYTES = 5
"""A zero byte and an id."""

_HEADER_BYTES = {0: _FRAME_BYTES, 1: 17}
"""How long a header with an id or with a GUID is without the index of a message, by its first byte."""

_Rows: TypeAlias = npt.NDArray[np.int64]


class ProtobufDecoder:
    """See the module.

    Attributes:
        schema: of the records that it makes.
    """

    def __init__(self, message: ProtobufMessage, *, is_framed: bool) -> None:
        """``is_framed``: whether values begin as a schema registry demands it."""
        self._handler = handler_of(message)
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
