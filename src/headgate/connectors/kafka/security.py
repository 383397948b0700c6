"""How a client proves who it is to a Kafka broker: TLS certificates, and SASL as PLAIN, SCRAM or OAUTHBEARER.

Secrets are never part of the configuration, which travels in plans: it says where they are found when a connection is
made, in the environment or in a file of the worker. SCRAM: RFC 5802 and 7677; OAUTHBEARER: RFC 7628.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import re
import ssl
from collections.abc import Generator
from dataclasses import dataclass, field
from typing import TypeAlias

from headgate.connectors.secret import is_secret_place, read_secret
from headgate.errors import UsageError
from headgate.model.config import check_switches

MECHANISMS = ("PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512", "OAUTHBEARER")

_ITERATIONS_MAX = 1_000_000
"""Of SCRAM: a broker that asks for more wants to keep the client busy."""

Exchange: TypeAlias = Generator[bytes, bytes, None]
"""Bytes to send and bytes received in turn; ends when the broker's proof, if there is one, was checked."""


@dataclass(frozen=True, slots=True)
class KafkaSecurity:
    """How to connect to brokers that demand TLS or a login.

    Attributes:
        tls: True connects over TLS. The broker's certificate and host name are checked.
        ca_file: the authority that signed the brokers' certificates, PEM; "" uses those that the system trusts.
        certificate_file, key_file: the client's own certificate, PEM, if brokers ask for one.
        mechanism: how to log in by SASL: ``"PLAIN"``, ``"SCRAM-SHA-256"``, ``"SCRAM-SHA-512"``, ``"OAUTHBEARER"``, or
            "" for no login.
        user: the user's name, for PLAIN and SCRAM.
        secret: where every worker finds the password, or the token for OAUTHBEARER: ``"env:NAME"`` or
            ``"file:/path"``. It is read again for each connection, so that a token may be renewed.
    """

    tls: bool = False
    ca_file: str = ""
    certificate_file: str = ""
    key_file: str = ""
    mechanism: str = ""
    user: str = ""
    secret: str = field(default="", repr=False)

    def __post_init__(self) -> None:
        check_switches("KafkaSecurity: ", tls=self.tls)
        if self.mechanism and self.mechanism not in MECHANISMS:
            known = ", ".join(MECHANISMS)
            raise UsageError(f"Kafka security has no mechanism {self.mechanism!r}; choose one of {known}")
        if self.mechanism and not is_secret_place(self.secret):
            raise UsageError(
                "Kafka security needs secret='env:NAME' or secret='file:/path', which says where the password or token "
                "is found; the secret itself must not be part of a program"
            )
        if self.mechanism and self.mechanism != "OAUTHBEARER" and not self.user:
            raise UsageError(f"Kafka security with mechanism {self.mechanism} needs user='...'")
        if not self.tls and (self.ca_file or self.certificate_file or self.key_file):
            raise UsageError("Kafka security names certificates and does not use TLS; add tls=True")

    def context(self) -> ssl.SSLContext | None:
        """Return what connections are wrapped with, or None without TLS.

        Raises:
            UsageError: a certificate cannot be used.
        """
        if not self.tls:
            return None
        try:
            context = ssl.create_default_context(cafile=self.ca_file or None)
            if self.certificate_file:
                context.load_cert_chain(self.certificate_file, self.key_file or None)
        except OSError as error:
            files = ", ".join(one for one in (self.ca_file, self.certificate_file, self.key_file) if one)
            raise UsageError(
                f"Kafka security cannot use {files}: {error.strerror or error}; give readable PEM files on every worker"
            ) from error
        return context

    def exchange(self, nonce: str) -> Exchange:
        """Return the exchange that logs in. ``nonce``: unpredictable text, for SCRAM.

        Raises:
            UsageError: the secret is not there.
        """
        secret = read_secret(self.secret, "Kafka")
        if self.mechanism == "PLAIN":
            return _one_message(b"\0" + self.user.encode() + b"\0" + secret.encode())
        if self.mechanism == "OAUTHBEARER":
            return _bearer(secret)
        return _scram(self.mechanism.removeprefix("SCRAM-").replace("-", "").lower(), self.user, secret, nonce)


NO_SECURITY = KafkaSecurity()


class LoginError(Exception):
    """The broker's part of an exchange is wrong: it does not know the password, or it is no broker."""


def _one_message(message: bytes) -> Exchange:
    yield message


def _bearer(token: str) -> Exchange:
    answer = yield f"n,,\x01auth=Bearer {token}\x01\x01".encode()
    if answer:
        yield b"\x01"  # after a failure, which the answer describes, the client has to say one thing more
        raise LoginError(answer.decode(errors="replace"))


def _scram(digest: str, user: str, password: str, nonce: str) -> Exchange:
    name = user.replace("=", "=3D").replace(",", "=2C")
    first = f"n={name},r={nonce}"
    server_first = (yield f"n,,{first}".encode()).decode(errors="replace")
    match = re.fullmatch(r"r=([^,]+),s=([A-Za-z0-9+/=]+),i=([0-9]{1,9})(?:,.*)?", server_first)
    if match is None or not match[1].startswith(nonce) or match[1] == nonce:
        raise LoginError("its answer is no SCRAM")
    iterations = int(match[3])
    if not 4096 <= iterations <= _ITERATIONS_MAX:
        raise LoginError(f"it asks for {iterations} iterations of SCRAM, not for 4096 to {_ITERATIONS_MAX}")
    salted = hashlib.pbkdf2_hmac(digest, password.encode(), base64.b64decode(match[2]), iterations)
    key = _mac(digest, salted, b"Client Key")
    final = f"c={base64.b64encode(b'n,,').decode()},r={match[1]}"
    signed = f"{first},{server_first},{final}".encode()
    signature = _mac(digest, hashlib.new(digest, key).digest(), signed)
    proof = base64.b64encode(bytes(a ^ b for a, b in zip(key, signature, strict=True))).decode()
    server_final = yield f"{final},p={proof}".encode()
    expected = base64.b64encode(_mac(digest, _mac(digest, salted, b"Server Key"), signed))
    if not hmac.compare_digest(server_final.partition(b",")[0], b"v=" + expected):
        raise LoginError("it does not know the password itself")


def _mac(digest: str, key: bytes, message: bytes) -> bytes:
    return hmac.digest(key, message, digest)
