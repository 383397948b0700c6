"""How to connect to a Pravega that demands TLS or a login. Counterpart: ``access`` does so to segment stores."""

from __future__ import annotations

import base64
import ssl
from dataclasses import dataclass, field
from pathlib import Path

from headgate.connectors.secret import is_secret_place, read_secret
from headgate.errors import UsageError
from headgate.model.config import check_switches


@dataclass(frozen=True, slots=True)
class PravegaSecurity:
    """How to connect to a Pravega that demands TLS or a login.

    Attributes:
        tls: True connects over TLS, to the controller and to segment stores. Certificates and host names are checked.
        ca_file: the authority that signed the certificates, PEM; "" uses those that the system trusts.
        user: the user's name, for a login with a password; "": the secret is a token, for ``Bearer``.
        secret: where every worker finds the password or token: ``"env:NAME"`` or ``"file:/path"``; "": no login. It
            is read again for each call, so that it may be renewed.
    """

    tls: bool = False
    ca_file: str = ""
    user: str = ""
    secret: str = field(default="", repr=False)

    def __post_init__(self) -> None:
        check_switches("PravegaSecurity: ", tls=self.tls)
        if self.secret and not is_secret_place(self.secret):
            raise UsageError(
                "Pravega security needs secret='env:NAME' or secret='file:/path', which says where the password or "
                "token is found; the secret itself must not be part of a program"
            )
        if self.user and not self.secret:
            raise UsageError("Pravega security with user= needs secret=, which says where the password is found")
        if self.ca_file and not self.tls:
            raise UsageError("Pravega security names an authority and does not use TLS; add tls=True")

    def context(self) -> ssl.SSLContext | None:
        """Return what connections to segment stores are wrapped with, or None without TLS.

        Raises:
            UsageError: the authority cannot be used.
        """
        if not self.tls:
            return None
        try:
            return ssl.create_default_context(cafile=self.ca_file or None)
        except OSError as error:
            raise self._unusable(error) from error

    def authority(self) -> bytes | None:
        """Return the certificates that the controller's may be signed by, PEM; None: those of the package grpcio.

        Raises:
            UsageError: the authority cannot be used.
        """
        path = self.ca_file or ssl.get_default_verify_paths().cafile
        try:
            return None if path is None else Path(path).read_bytes()
        except OSError as error:
            raise self._unusable(error) from error

    def login(self) -> tuple[tuple[str, str], ...]:
        """Return what is sent with each call of the controller.

        Raises:
            UsageError: the secret is not there.
        """
        if not self.secret:
            return ()
        secret = read_secret(self.secret, "Pravega")
        if not self.user:
            return (("authorization", f"Bearer {secret}"),)
        return (("authorization", "Basic " + base64.b64encode(f"{self.user}:{secret}".encode()).decode()),)

    def _unusable(self, error: OSError) -> UsageError:
        why = error.strerror or error
        return UsageError(
            f"Pravega security cannot use {self.ca_file}: {why}; give a readable PEM file on every worker"
        )


NO_SECURITY = PravegaSecurity()
