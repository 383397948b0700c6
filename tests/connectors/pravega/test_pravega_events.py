"""Events of Pravega in bulk, the controller's messages, and the logs beside streams: without a server."""

from __future__ import annotations

from typing import cast

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headgate.connectors.pravega.controller import NO_SECURITY, Controller, StreamName, message, parse
from headgate.connectors.pravega.events import frame, key_places, unframe
from headgate.connectors.pravega.scaled_stream import Position, ScaledStream
from headgate.connectors.pravega.stream_log import SideStream
from headgate.environment import SYSTEM_ENVIRONMENT
from headgate.errors import CorruptionError, ProtocolViolation, StorageError, UsageError


@given(st.lists(st.binary(max_size=40)), st.integers(0, 60))
def test_events_are_found_again_in_any_piece_of_a_segment(events: list[bytes], cut: int) -> None:
    data, ends = frame(pa.array(events, pa.large_binary()))
    whole = data.to_pybytes()[: ends[-1]]
    found, at = unframe(whole, "here")
    assert found.to_pylist() == events
    assert at.tolist() == ends.tolist()
    first, at = unframe(whole[:cut], "here")
    rest, _ = unframe(whole[at[-1] :], "here")
    assert first.to_pylist() + rest.to_pylist() == events


@pytest.mark.parametrize("data", [b"\0\0\0\1\0\0\0\0", b"\0\0\0\0\xff\0\0\0"])
def test_what_is_no_event_is_damage(data: bytes) -> None:
    with pytest.raises(CorruptionError):
        unframe(data, "here")


PLACES = {
    "": 0.24117842791623523,
    "a": 0.9433912753816884,
    "bb": 0.19316235551138639,
    "clé": 0.9419192180276461,
    "1234567": 0.5111486402769547,
    "12345678": 0.14490039121410514,
    "123456789": 0.5853919508491967,
    "x" * 40: 0.8821151231882733,
    "user-1": 0.21938282646659246,
    "日本語": 0.33619521178203393,
    "😀": 0.7750255912171164,
}
"""What ``HashHelper.seededWith("EventRouter").hashToRange`` of Pravega 0.13 says, in Java."""


def test_keys_go_where_pravegas_own_client_sends_them() -> None:
    assert dict(zip(PLACES, key_places(list(PLACES)).tolist(), strict=True)) == PLACES


def test_segments_have_the_names_that_stores_know() -> None:
    stream = StreamName.parse("shop/orders")
    assert stream.segment((2 << 32) + 7) == "shop/orders/7.#epoch.2"
    for wrong in ("orders", "/orders", "shop/", "a/b/c"):
        with pytest.raises(UsageError):
            StreamName.parse(wrong)


@given(st.integers(-(1 << 63), (1 << 63) - 1), st.text(), st.floats(allow_nan=False))
def test_messages_are_read_as_they_were_written(number: int, text: str, real: float) -> None:
    data = message((1, number), (2, text), (3, real), (1, 5))
    assert parse(data) == {1: [number, 5], 2: [text.encode()], 3: [real]}
    with pytest.raises(ProtocolViolation):
        parse(message((2, b"12345678"))[:-1])


def test_a_merged_segment_waits_for_all_that_it_follows() -> None:
    stream = ScaledStream({0: Position(5), 1: Position(9, {4: [1]}), 2: Position(0)})
    stream.end(2, {5: [0, 2]})
    assert stream.waits_for(4) == set()
    assert stream.waits_for(5) == {0}
    stream.end(0, {5: [0, 2], 6: [0, 7]})
    assert stream.waits_for(5) == set()
    assert stream.waits_for(6) == {7}, "also for one that is not known yet"
    assert stream.unknown == {4, 5, 6}


class HalfCreated:
    """A controller that knows a stream by name, and none of its segments yet, as it does while it creates one."""

    security = NO_SECURITY

    def exists(self, stream: StreamName) -> bool:
        return True

    def head(self, stream: StreamName) -> dict[int, int]:
        raise UsageError(f"Pravega found no such stream: {stream}")


def test_a_log_that_another_process_is_creating_is_looked_at_again() -> None:
    log = SideStream(cast(Controller, HalfCreated()), StreamName("shop", "orders"), "notes", SYSTEM_ENVIRONMENT)
    with pytest.raises(StorageError, match="it is being created or deleted") as caught:
        log.news()
    assert caught.value.is_transient
