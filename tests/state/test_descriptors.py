"""The identity of keyed state, which a checkpoint is refused by, and the columns of its sections."""

from __future__ import annotations

import pyarrow as pa

from headgate.state.descriptors import KeyColumns, StateDescriptor, StateKind, section_schema, state_identity

KEYS = KeyColumns(("id", "value"), (pa.int64(), pa.large_string()))
COUNT = StateDescriptor("count", StateKind.VALUE, pa.int64())
SEEN = StateDescriptor("seen", StateKind.LIST, pa.float64())
BY_NAME = StateDescriptor("by name", StateKind.MAP, pa.int64(), pa.large_string())


def test_the_identity_is_frozen_and_no_order_of_declaration_belongs_to_it() -> None:
    expected = (
        "keyed state(keys id: int64, value: large_string; map by name: large_string -> int64; value count: int64; "
        "list seen: double)"
    )
    assert state_identity(KEYS, [COUNT, SEEN, BY_NAME]) == state_identity(KEYS, [BY_NAME, COUNT, SEEN]) == expected
    assert state_identity(KEYS, []) == ""


def test_whatever_is_declared_otherwise_has_another_identity() -> None:
    others = [
        state_identity(KEYS, [COUNT]),
        state_identity(KeyColumns(("id",), (pa.int64(),)), [COUNT]),
        state_identity(KeyColumns(("id", "value"), (pa.int32(), pa.large_string())), [COUNT]),
        state_identity(KEYS, [StateDescriptor("count", StateKind.LIST, pa.int64())]),
        state_identity(KEYS, [StateDescriptor("count", StateKind.VALUE, pa.int32())]),
        state_identity(KEYS, [StateDescriptor("counts", StateKind.VALUE, pa.int64())]),
        state_identity(KEYS, [StateDescriptor("count", StateKind.MAP, pa.int64(), pa.int64())]),
        state_identity(KEYS, [StateDescriptor("count", StateKind.MAP, pa.int64(), pa.int32())]),
        state_identity(KEYS, [COUNT, SEEN]),
    ]
    assert len(set(others)) == len(others)


def test_columns_of_a_section_never_have_the_name_of_a_key_s_column() -> None:
    assert section_schema(KEYS, COUNT).names == ["key0", "key1", "value"]
    assert section_schema(KEYS, BY_NAME) == pa.schema(
        [("key0", pa.int64()), ("key1", pa.large_string()), ("map_key", pa.large_string()), ("value", pa.int64())]
    )
