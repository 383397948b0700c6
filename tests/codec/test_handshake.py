"""The handshake lets in who knows the secret, on both sides, and nobody else."""

from __future__ import annotations

import hmac

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headgate.codec.handshake import (
    NONCE_BYTES,
    PREAUTH_BYTES_MAX,
    ClientHandshake,
    Phase,
    Purpose,
    ServerHandshake,
)
from headgate.errors import ProtocolViolation

SECRET = b"s" * 32


def client(secret: bytes = SECRET, purpose: Purpose = Purpose.DATA) -> ClientHandshake:
    return ClientHandshake(secret, purpose, b"c" * NONCE_BYTES)


def server(secret: bytes = SECRET, purpose: Purpose = Purpose.DATA) -> ServerHandshake:
    return ServerHandshake(secret, purpose, b"n" * NONCE_BYTES)


def test_two_sides_with_the_same_secret_let_each_other_in() -> None:
    one, other = client(), server()
    verdict = other.receive(one.receive(other.receive(one.start())))
    assert (one.receive(verdict), one.phase, other.phase) == (b"", Phase.COMPLETE, Phase.COMPLETE)
    assert one.wanted_bytes == other.wanted_bytes == 0


def test_the_secret_never_travels() -> None:
    one, other = client(), server()
    sent = [one.start()]
    sent.append(other.receive(sent[-1]))
    sent.append(one.receive(sent[-1]))
    assert not any(SECRET[:8] in piece for piece in sent)


def test_a_client_refuses_a_server_without_the_secret() -> None:
    one = client()
    with pytest.raises(ProtocolViolation, match="does not know this job's secret"):
        one.receive(server().receive(client().start())[:-32] + b"\0" * 32)
    assert one.phase is Phase.FAILED


def test_proofs_are_compared_in_constant_time_and_in_no_other_way(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[tuple[bytes, bytes]] = []

    def compare(one: bytes, other: bytes) -> bool:
        compared.append((one, other))
        return True  # whatever they are: nothing else looks at them

    monkeypatch.setattr(hmac, "compare_digest", compare)
    one, other = client(), server()
    other.receive(one.start())
    other.receive(b"\0" * other.wanted_bytes)
    assert other.is_complete
    assert compared[-1][0] == b"\0" * 32 != compared[-1][1]


def test_a_server_refuses_a_client_without_the_secret() -> None:
    other = server()
    other.receive(client().start())
    with pytest.raises(ProtocolViolation, match="does not know this job's secret"):
        other.receive(b"\0" * other.wanted_bytes)
    assert not other.is_complete


def test_a_proof_cannot_be_reflected_to_its_author() -> None:
    other = server()
    answer = other.receive(client().start())
    with pytest.raises(ProtocolViolation, match="secret"):
        other.receive(answer[-32:])


def test_a_first_message_without_the_secret_is_refused_at_once() -> None:
    other = server()
    with pytest.raises(ProtocolViolation, match="does not know this job's secret"):
        other.receive(client(b"x" * 32).start())
    with pytest.raises(ProtocolViolation, match="purpose"):
        ServerHandshake(SECRET, Purpose.DATA, b"n" * NONCE_BYTES, is_tls=True).receive(client().start())


def test_the_beginning_of_another_protocol_is_recognised_by_its_first_byte() -> None:
    other = server()
    assert other.can_begin(b"")
    assert all(other.can_begin(client().start()[:size]) for size in range(80))
    assert not other.can_begin(b"G")
    assert not other.can_begin(b"HGHS\x02")


def test_both_sides_have_the_same_keys_one_for_each_direction_and_new_ones_each_time() -> None:
    one, other = client(), server()
    one.receive(other.receive(one.receive(other.receive(one.start()))))
    assert one.keys == other.keys
    later = ServerHandshake(SECRET, Purpose.DATA, b"m" * NONCE_BYTES)
    again = client()
    again.receive(later.receive(again.receive(later.receive(again.start()))))
    assert len({*one.keys, *again.keys}) == 4


def test_a_server_with_another_certificate_than_the_session_s_is_refused() -> None:
    one, other = client(), server()
    one.bind(b"the certificate of somebody in between")
    other.bind(b"the server's certificate")
    with pytest.raises(ProtocolViolation, match="does not know this job's secret"):
        one.receive(other.receive(one.start()))


def test_a_recorded_proof_is_worthless_for_another_nonce() -> None:
    one, other = client(), server()
    proof = one.receive(other.receive(one.start()))
    later = ServerHandshake(SECRET, Purpose.DATA, b"m" * NONCE_BYTES)
    later.receive(one.start())
    with pytest.raises(ProtocolViolation, match="secret"):
        later.receive(proof)


def test_a_data_connection_is_not_let_in_as_a_control_connection() -> None:
    with pytest.raises(ProtocolViolation, match="purpose"):
        server(purpose=Purpose.CONTROL).receive(client(purpose=Purpose.DATA).start())


def test_a_foreign_protocol_is_refused_and_the_machine_is_dead_after_it() -> None:
    other = server()
    with pytest.raises(ProtocolViolation, match="does not speak"):
        other.receive(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n".ljust(other.wanted_bytes, b"x"))
    with pytest.raises(ProtocolViolation, match="refused"):
        other.receive(client().start())


@given(st.lists(st.binary(max_size=PREAUTH_BYTES_MAX), min_size=1, max_size=4))
def test_random_bytes_never_get_in(pieces: list[bytes]) -> None:
    for machine in (client(), server()):
        with pytest.raises(ProtocolViolation):  # noqa: PT012 (which piece is refused depends on its size)
            for piece in [*pieces, b""]:
                machine.receive(piece)
        assert not machine.is_complete


@given(st.integers(0, 2), st.data())
def test_any_flipped_bit_keeps_both_sides_apart(step: int, data: st.DataObject) -> None:
    one, other = client(), server()
    message = one.start()
    with pytest.raises(ProtocolViolation):  # noqa: PT012 (who notices depends on the step)
        for index, receiver in enumerate((other, one, other)):
            if index == step:
                damaged = bytearray(message)
                bit = data.draw(st.integers(0, len(message) * 8 - 1))
                damaged[bit // 8] ^= 1 << (bit % 8)
                message = bytes(damaged)
            message = receiver.receive(message)
    assert not other.is_complete
