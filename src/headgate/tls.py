"""TLS: which connections use it, and with which certificate.

Used by ``connection`` and ``listener``; ``stream`` carries the bytes. Source: docs/spec/connections.md.
Without certificates of the user each listening process makes its own. No authority needs to sign it, because the
handshake proves with the job's secret which certificate the server has (``codec.handshake``). Never falls
back to a connection without TLS.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import ipaddress
import socket
import ssl
import tempfile
from pathlib import Path

from headgate.dataclass import dataclass
from headgate.errors import UsageError
from headgate.model.config import SecurityConfig

_VALID = datetime.datetime(2020, 1, 1), datetime.datetime(2120, 1, 1)
"""Of a certificate that lives as long as its process; its dates are never checked."""
_PEM_BEGIN = "-----BEGIN CERTIFICATE-----"
_PEM_END = "-----END CERTIFICATE-----"


@dataclass(frozen=True, slots=True)
class TlsServer:
    """What a listener needs: a context, and its own certificate (DER)."""

    context: ssl.SSLContext
    certificate: bytes


class Tls:
    """The TLS of one process, as its user configured it."""

    def __init__(self, config: SecurityConfig | None = None) -> None:
        self._config = config or SecurityConfig()

    def applies_to(self, host: str) -> bool:
        """Return whether connections to ``host`` run over TLS. Both ends ask with the same text."""
        return not is_loopback(host) if self._config.tls is None else self._config.tls

    def server(self, host: str) -> TlsServer | None:
        """Return the TLS of a listener on ``host``, if it runs over TLS.

        Raises:
            UsageError: the user's certificate cannot be used.
        """
        return self._server if self.applies_to(host) else None

    def client(self, host: str) -> ssl.SSLContext | None:
        """Return the context for connecting to ``host``, if that runs over TLS.

        Raises:
            UsageError: the user's authority cannot be used.
        """
        return self._client if self.applies_to(host) else None

    @functools.cached_property
    def _server(self) -> TlsServer:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        config = self._config
        if not config.certificate_file:
            key, certificate = _made_certificate()
            with tempfile.NamedTemporaryFile() as file:  # Python reads keys from files only; this one is 0600
                file.write(key + certificate)
                file.flush()
                context.load_cert_chain(file.name)
            return TlsServer(context, ssl.PEM_cert_to_DER_cert(certificate.decode()))
        try:
            context.load_cert_chain(config.certificate_file, config.key_file)
            text = Path(config.certificate_file).read_text()
            first = text[text.index(_PEM_BEGIN) : text.index(_PEM_END) + len(_PEM_END)]  # its own; a chain may follow
            return TlsServer(context, ssl.PEM_cert_to_DER_cert(first))
        except (OSError, ValueError) as error:
            raise _unusable("certificate_file", config.certificate_file, error) from error

    @functools.cached_property
    def _client(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.check_hostname = False  # the proof says more: this very certificate belongs to this job
        if not self._config.ca_file:
            context.verify_mode = ssl.CERT_NONE
            return context
        try:
            context.load_verify_locations(self._config.ca_file)
        except OSError as error:
            raise _unusable("ca_file", self._config.ca_file, error) from error
        return context


@functools.lru_cache(maxsize=256)  # asked for each connection, of few hosts
def is_loopback(host: str) -> bool:
    """Return whether ``host`` is a loopback address as it stands. Names are not resolved: each machine may differ."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def shut_down(stream: socket.socket) -> None:
    """End a connection from another thread, below TLS: the TLS state belongs to the thread that reads and writes."""
    with contextlib.suppress(OSError):
        if isinstance(stream, ssl.SSLSocket):
            socket.socket.shutdown(stream, socket.SHUT_RDWR)
        else:
            stream.shutdown(socket.SHUT_RDWR)


def _made_certificate() -> tuple[bytes, bytes]:
    """Return a new key and a certificate that it signed itself, as PEM."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "headgate")])
    builder = x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
    signed = builder.not_valid_before(_VALID[0]).not_valid_after(_VALID[1]).sign(key, hashes.SHA256())
    plain = serialization.NoEncryption()
    return (
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, plain),
        signed.public_bytes(serialization.Encoding.PEM),
    )


def _unusable(what: str, path: str, error: Exception) -> UsageError:
    reason = getattr(error, "strerror", None) or str(error)
    return UsageError(f"security {what} {path} cannot be used: {reason}; give a readable PEM file on every machine")
