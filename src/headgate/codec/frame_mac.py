"""Authenticates what one direction of a connection carries: AES-256-GMAC with the block's number as nonce.

Counterpart: ``runtime.wire.connection``, which keeps one for each direction; the keys come from ``codec.handshake``.
Rule SE13: docs/spec/connections.md. The number makes a block that is repeated, left out or moved as wrong as one that
is changed. Never encrypts: that is TLS's task. A key must never be used by two of these.
"""

from __future__ import annotations

from collections.abc import Sequence

from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

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
