"""Mutual challenge and response: both ends prove that they know the job's secret, without showing it.

One ``ClientHandshake`` and one ``ServerHandshake`` per connection; ``runtime.wire.connection`` moves their bytes.
``FrameMac`` then authenticates what one direction of the connection carries: AES-256-GMAC with the block's number as
nonce.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence
from enum import Enum, IntEnum

from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from headgate.errors import ProtocolViolation

HANDSHAKE_VERSION = 1
NONCE_BYTES = 32
SECRET_BYTES_MIN = 16

_MAGIC = b"HGHS"
_PROOF_BYTES = 32
_ACCEPTED = b"\x01"
_PREFIX_BYTES = len(_MAGIC) + 3
PREAUTH_BYTES_MAX = _PREFIX_BYTES + NONCE_BYTES + _PROOF_BYTES
"""Most bytes that either side reads in one step before the other is known."""
_NO_CERTIFICATE = bytes(32)


class Purpose(IntEnum):
    """What the connection is for; part of the proof, so that one kind cannot be passed off as the other."""

    CONTROL = 1
    DATA = 2
    STORE = 3


class Phase(Enum):
    """Where a handshake is, named by what it waits for."""

    HELLO = "hello of the other side"
    PROOF = "proof of the other side"
    VERDICT = "verdict of the server"
    COMPLETE = "nothing: both sides are known"
    FAILED = "nothing: the other side is refused"


LEGAL_PHASES: dict[Phase, frozenset[Phase]] = {
    Phase.HELLO: frozenset({Phase.PROOF, Phase.VERDICT, Phase.FAILED}),  # the server's next one, the client's
    Phase.PROOF: frozenset({Phase.COMPLETE, Phase.FAILED}),
    Phase.VERDICT: frozenset({Phase.COMPLETE, Phase.FAILED}),
    Phase.COMPLETE: frozenset({Phase.FAILED}),
    Phase.FAILED: frozenset({Phase.FAILED}),
}


class Handshake:
    """What both roles share: one step per fixed-size input."""

    def __init__(self, secret: bytes, purpose: Purpose, nonce: bytes, *, is_tls: bool = False) -> None:
        assert len(secret) >= SECRET_BYTES_MIN, "a secret is long enough not to be guessed"
        assert len(nonce) == NONCE_BYTES, "a nonce has its size"
        self._secret = secret
        self._nonce = nonce
        self._hello = _MAGIC + bytes([HANDSHAKE_VERSION, purpose, is_tls])
        self._certificate = _NO_CERTIFICATE
        self._phase = Phase.HELLO
        self._keys = b"", b""

    @property
    def phase(self) -> Phase:
        """Where the handshake is."""
        return self._phase

    @property
    def is_complete(self) -> bool:
        """Whether both sides are known to each other."""
        return self._phase is Phase.COMPLETE

    @property
    def keys(self) -> tuple[bytes, bytes]:
        """The keys of what the client and of what the server sends, when complete."""
        assert self.is_complete, "keys exist once the handshake is complete"
        return self._keys

    def bind(self, certificate: bytes) -> None:
        """Say what certificate (DER) the server has in the TLS session; before the server's proof is made or read."""
        assert self._phase is Phase.HELLO, "the certificate is part of proofs that were made already"
        self._certificate = hashlib.sha256(certificate).digest()

    @property
    def wanted_bytes(self) -> int:
        """How many bytes exactly the next ``receive`` takes (0 when complete or failed)."""
        raise NotImplementedError

    def receive(self, data: bytes) -> bytes:
        """Advance by exactly ``wanted_bytes`` bytes; return what must be sent now.

        Raises:
            ProtocolViolation: the other side is not one of ours; close the connection and say nothing.
        """
        if self._phase in (Phase.COMPLETE, Phase.FAILED) or len(data) != self.wanted_bytes:
            raise self._refuse(f"{len(data)} bytes while waiting for {self._phase.value}")
        answer = self._step(data)
        self._check()
        return answer

    def _step(self, data: bytes) -> bytes:
        raise NotImplementedError

    def _enter(self, phase: Phase) -> None:
        assert phase in LEGAL_PHASES[self._phase], f"{self._phase} does not lead to {phase}"
        self._phase = phase

    def _check(self) -> None:
        assert self._phase is not Phase.COMPLETE or all(self._keys), "a complete handshake has both keys"

    def _refuse(self, problem: str) -> ProtocolViolation:
        self._enter(Phase.FAILED)
        return ProtocolViolation(type(self).__name__, problem)

    def _check_hello(self, hello: bytes) -> None:
        if not hello.startswith(_MAGIC):
            raise self._refuse("the other side does not speak Headgate's protocol")
        if hello != self._hello:
            expected, found = tuple(self._hello[-3:]), tuple(hello[-3:])
            raise self._refuse(f"(version, purpose, TLS) is {found} there and {expected} here")

    def _check_proof(self, proof: bytes, expected: bytes) -> None:
        if not hmac.compare_digest(proof, expected):  # constant time
            raise self._refuse("the other side does not know this job's secret")

    def _proof(self, role: bytes, client_nonce: bytes, server_nonce: bytes) -> bytes:
        message = self._hello + role + client_nonce + server_nonce + self._certificate  # parts of fixed size
        return self._digest(message)

    def _voucher(self, client_nonce: bytes) -> bytes:
        return self._digest(self._hello + b"V" + client_nonce)

    def _derive_keys(self, client_nonce: bytes, server_nonce: bytes) -> None:
        self._keys = self._proof(b"c", client_nonce, server_nonce), self._proof(b"s", client_nonce, server_nonce)

    def _digest(self, message: bytes) -> bytes:
        return hmac.new(self._secret, message, hashlib.sha256).digest()


class ClientHandshake(Handshake):
    """The side that connected. Send ``start()`` first."""

    @property
    def wanted_bytes(self) -> int:
        """How many bytes exactly the next ``receive`` takes."""
        sizes = {Phase.HELLO: PREAUTH_BYTES_MAX, Phase.VERDICT: len(_ACCEPTED)}
        return sizes.get(self._phase, 0)

    def start(self) -> bytes:
        """Return the first bytes to send."""
        return self._hello + self._nonce + self._voucher(self._nonce)

    def _step(self, data: bytes) -> bytes:
        if self._phase is Phase.VERDICT:
            if data != _ACCEPTED:
                raise self._refuse("the server did not accept")
            self._enter(Phase.COMPLETE)
            return b""
        server_nonce = data[_PREFIX_BYTES:-_PROOF_BYTES]
        self._check_hello(data[:_PREFIX_BYTES])
        self._check_proof(data[-_PROOF_BYTES:], self._proof(b"S", self._nonce, server_nonce))
        self._enter(Phase.VERDICT)
        self._derive_keys(self._nonce, server_nonce)
        return self._proof(b"C", self._nonce, server_nonce)


class ServerHandshake(Handshake):
    """The side that accepted; it waits for the other to begin."""

    def __init__(self, secret: bytes, purpose: Purpose, nonce: bytes, *, is_tls: bool = False) -> None:
        super().__init__(secret, purpose, nonce, is_tls=is_tls)
        self._expected = b""
        self.client_nonce = b""

    def can_begin(self, data: bytes | bytearray) -> bool:
        """Return whether ``data`` may begin a client's first message; a server closes the connection otherwise."""
        return data[:_PREFIX_BYTES] == self._hello[: len(data)]

    @property
    def wanted_bytes(self) -> int:
        """How many bytes exactly the next ``receive`` takes."""
        sizes = {Phase.HELLO: PREAUTH_BYTES_MAX, Phase.PROOF: _PROOF_BYTES}
        return sizes.get(self._phase, 0)

    def _step(self, data: bytes) -> bytes:
        if self._phase is Phase.PROOF:
            self._check_proof(data, self._expected)
            self._enter(Phase.COMPLETE)
            return _ACCEPTED
        self._check_hello(data[:_PREFIX_BYTES])
        client_nonce = self.client_nonce = data[_PREFIX_BYTES:-_PROOF_BYTES]
        self._check_proof(data[-_PROOF_BYTES:], self._voucher(client_nonce))
        self._derive_keys(client_nonce, self._nonce)
        self._expected = self._proof(b"C", client_nonce, self._nonce)
        self._enter(Phase.PROOF)
        return self._hello + self._nonce + self._proof(b"S", client_nonce, self._nonce)


TAG_BYTES = 16
_NONCE_BYTES = 12
_JOINED_BYTES_MAX = 1 << 15
"""Up to here it is faster to join the parts of a block and make one call."""


class FrameMac:
    """Tags block after block."""

    def __init__(self, key: bytes) -> None:
        self._one_call = AESGCM(key)
        self._algorithm = algorithms.AES(key)
        self._number = 0

    def tag(self, parts: Sequence[memoryview]) -> bytes:
        """Return the tag of the next block, the concatenation of ``parts``."""
        nonce = self._nonce()
        # before the block is tagged: a number that serves twice, because one failed, would give the key away
        self._number += 1
        if len(parts) == 1:
            return self._one_call.encrypt(nonce, b"", parts[0])
        if sum(map(len, parts)) <= _JOINED_BYTES_MAX:
            return self._one_call.encrypt(nonce, b"", b"".join(parts))
        cipher = Cipher(self._algorithm, modes.GCM(nonce)).encryptor()
        for part in parts:
            cipher.authenticate_additional_data(part)
        cipher.finalize()
        return cipher.tag

    def _nonce(self) -> bytes:
        return self._number.to_bytes(_NONCE_BYTES, "big")
