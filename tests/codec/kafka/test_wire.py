"""Requests and answers of Kafka: tables in both directions, bytes of a real broker, and whatever bytes there may be."""

from __future__ import annotations

import dataclasses
import struct
import typing
from typing import Annotated, Any
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headgate.codec.kafka import messages
from headgate.codec.kafka.messages import (
    ApiVersions,
    DescribeTransactions,
    EndTxn,
    EndTxnAnswer,
    Fetch,
    FetchAnswer,
    FinalizedFeature,
    InitProducerId,
    Produce,
    ProducePartition,
    ProduceTopic,
    SaslHandshake,
    TransactionDescription,
)
from headgate.codec.kafka.wire import (
    RETRIABLE,
    Answer,
    ErrorCode,
    Fixed,
    Nested,
    Parts,
    Reader,
    Request,
    Since,
    Sized,
    UuidType,
    decode_answer,
    encode_request,
    unsigned_varint,
)
from headgate.errors import ProtocolViolation

REQUESTS = [
    one for one in vars(messages).values() if isinstance(one, type) and issubclass(one, Request) and one is not Request
]
VERSIONED = [(one, version) for one in REQUESTS for version in one.VERSIONS]


def values_of(hint: Any, version: int) -> st.SearchStrategy[Any]:
    """Draw a value of a field with this annotation."""
    marks: tuple[Any, ...] = ()
    if typing.get_origin(hint) is Annotated:
        hint, marks = hint.__origin__, hint.__metadata__
    since = next((mark.version for mark in marks if isinstance(mark, Since)), 0)
    if since > version:
        return st.nothing()
    for mark in marks:
        if isinstance(mark, Fixed):
            bits = 8 * mark.form.size
            is_bool = mark.form.format == ">?"
            return st.booleans() if is_bool else st.integers(-(1 << bits - 1), (1 << bits - 1) - 1)
        if isinstance(mark, Sized):
            return st.text(max_size=40) if mark.is_text else st.binary(max_size=40)
        if isinstance(mark, UuidType):
            return st.uuids()
    if typing.get_origin(hint) is tuple:
        return st.lists(values_of(typing.get_args(hint)[0], version), max_size=3).map(tuple)
    if dataclasses.is_dataclass(hint):
        return of_table(hint, version)
    (inner,) = (one for one in typing.get_args(hint) if one is not type(None))
    return st.none() | values_of(inner, version)


def of_table(table: Any, version: int) -> st.SearchStrategy[Any]:
    """Draw a message; fields that the version lacks have their defaults."""
    hints = typing.get_type_hints(table, include_extras=True)
    drawn = {field.name: values_of(hints[field.name], version) for field in dataclasses.fields(table)}
    return st.builds(table, **{name: strategy for name, strategy in drawn.items() if not strategy.is_empty})


def written(value: Any, version: int, is_flexible: bool) -> bytes:
    parts: Parts = []
    Nested(type(value)).write(parts, value, version, is_flexible)
    return b"".join(parts)


def outcome(request: Request[Any], version: int, data: bytes) -> Answer | ProtocolViolation:
    """Return the answer, or how it is refused."""
    try:
        return decode_answer(request, version, data)  # type: ignore[no-any-return]
    except ProtocolViolation as error:
        return error


@pytest.mark.long
@pytest.mark.parametrize(("request_class", "version"), VERSIONED, ids=lambda one: getattr(one, "__name__", str(one)))
@given(data=st.data())
def test_every_message_comes_back_as_it_was(
    request_class: type[Request[Any]], version: int, data: st.DataObject
) -> None:
    is_flexible = version >= request_class.FLEXIBLE
    for table in (request_class, request_class.ANSWER):
        message = data.draw(of_table(table, version))
        reader = Reader(written(message, version, is_flexible), "a message")
        assert Nested(table).read(reader, version, is_flexible) == message
        assert reader.left == 0


@pytest.mark.long
@pytest.mark.parametrize(("request_class", "version"), VERSIONED, ids=lambda one: getattr(one, "__name__", str(one)))
@given(data=st.data())
def test_damaged_answers_are_one_clear_error(
    request_class: type[Request[Any]], version: int, data: st.DataObject
) -> None:
    is_flexible = version >= request_class.FLEXIBLE
    answer = data.draw(of_table(request_class.ANSWER, version))
    header = b"\0\0\0\1" + (b"\0" if is_flexible and request_class.HAS_TAGS_IN_ANSWER else b"")
    raw = bytearray(header + written(answer, version, is_flexible))
    for _ in range(data.draw(st.integers(1, 3))):
        raw[data.draw(st.integers(4, len(raw) - 1))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(4, len(raw)))
    asked = data.draw(of_table(request_class, version))
    found = outcome(asked, version, bytes(raw[:cut]))
    assert type(found) is request_class.ANSWER or "malformed at byte" in str(found)


@given(st.sampled_from(VERSIONED), st.binary(max_size=200), st.data())
def test_any_bytes_are_an_answer_or_refused(
    of: tuple[type[Request[Any]], int], raw: bytes, data: st.DataObject
) -> None:
    asked = data.draw(of_table(*of))
    found = outcome(asked, of[1], raw)
    assert isinstance(found, Answer) or "malformed" in str(found)


def test_lengths_allocate_nothing() -> None:
    """An answer of a few bytes that announces two billion topics is refused at once."""
    raw = b"\0\0\0\1\0" + b"\0\0\0\0" + b"\0\0" + b"\0\0\0\0" + unsigned_varint(2**31)
    with pytest.raises(ProtocolViolation, match="a length of 2147483647 with 0 bytes left"):
        decode_answer(Fetch(-1, 0, 1, 1, 1, 0, -1, ()), 13, raw)


def test_numbers_of_lengths_are_short() -> None:
    reader = Reader(b"\xff\xff\xff\xff\xff\x01", "an answer")
    with pytest.raises(ProtocolViolation, match="more than five bytes"):
        reader.unsigned_varint()


# -- bytes that a broker of Kafka 4.3.1 sent or took -------------------------------------------------------------------


def test_bytes_of_requests() -> None:
    def sent(request: Request[Any], version: int) -> str:
        return b"".join(encode_request(request, version, 7, "me")).hex()

    begin = "001a 0005 00000007 0002 6d65 00".replace(" ", "")
    assert sent(EndTxn("tid", 5, 3, True), 5) == f"0000001d{begin}04746964000000000000000500030100"
    handshake = "00000017 0011 0001 00000007 0002 6d65 000b 4f415554484245415245 52".replace(" ", "")
    assert sent(SaslHandshake("OAUTHBEARER"), 1) == handshake.replace("00000017", "00000019", 1)
    assert sent(InitProducerId("t", 60_000), 4) == (
        "0000001f 0016 0004 00000007 0002 6d65 00 0274 0000ea60 ffffffffffffffff ffff 00".replace(" ", "").replace(
            "0000001f", "0000001e", 1
        )
    )
    assert sent(InitProducerId("t", 60_000, enable_2pc=True), 6).endswith("ffff010000")


def test_records_are_sent_in_pieces_that_are_not_copied() -> None:
    piece = bytearray(b"records")
    request = Produce(None, -1, 1000, (ProduceTopic("t", (ProducePartition(0, [b"head", piece]),)),))
    parts = encode_request(request, 12, 1, "me")
    assert any(part is piece for part in parts)
    data = b"".join(parts)
    assert struct.unpack(">i", data[:4]) == (len(data) - 4,)
    assert unsigned_varint(12) + b"headrecords" in data


def test_an_answer_about_features() -> None:
    raw = bytes.fromhex(
        "00000001 0000 02 0012 0000 0004 00 00000000 02 01 08 0000000000000024 02 1a"
        " 02 14 7472616e73616374696f6e2e76657273696f6e 0002 0002 00".replace(" ", "")
    )
    answer = decode_answer(ApiVersions("h", "1"), 3, raw)
    assert [(one.api_key, one.min_version, one.max_version) for one in answer.api_keys] == [(18, 0, 4)]
    assert answer.finalized_features == (FinalizedFeature("transaction.version", 2, 2),)
    assert answer.finalized_features_epoch == 36


def test_an_answer_about_a_transaction() -> None:
    raw = bytes.fromhex(
        "00000009 00 00000000 02 0000 0474696400".replace(" ", "").removesuffix("00")
        + "084f6e676f696e67 0000ea60 0000019aad8e2000 00000000000003e8 0005 02 0274 02 00000001 00 00 00".replace(
            " ", ""
        )
    )
    answer = decode_answer(DescribeTransactions(("tid",)), 0, raw)
    (state,) = answer.transaction_states
    assert state == TransactionDescription(
        0, "tid", "Ongoing", 60_000, 0x19AAD8E2000, 1000, 5, (messages.TransactionPartitions("t", (1,)),)
    )


def test_older_versions_lack_the_later_fields() -> None:
    raw = b"\0\0\0\1\0" + b"\0\0\0\0" + b"\0\0" + b"\0"
    assert decode_answer(EndTxn("t", 1, 1, True), 3, raw) == EndTxnAnswer(0, 0, -1, -1)
    with pytest.raises(ProtocolViolation, match="EndTxn of version 5 is malformed"):
        decode_answer(EndTxn("t", 1, 1, True), 5, raw)


def test_unknown_tagged_fields_are_skipped() -> None:
    answer = FetchAnswer(0, 0, 0, ())
    raw = b"\0\0\0\1\0" + written(answer, 13, True)[:-1] + b"\x02" + b"\x05\x03abc" + b"\x09\x00"
    assert decode_answer(Fetch(-1, 0, 1, 1, 1, 0, -1, ()), 13, raw) == answer


def test_ids_of_topics_are_uuids() -> None:
    parts: Parts = []
    UuidType().write(parts, UUID(int=1), 0, True)
    assert b"".join(parts) == bytes(15) + b"\1"


def test_codes_of_later_releases_are_errors() -> None:
    assert ErrorCode(31_999) is ErrorCode.UNKNOWN_SERVER_ERROR
    assert ErrorCode.NONE not in RETRIABLE
    assert ErrorCode.UNKNOWN_SERVER_ERROR not in RETRIABLE
