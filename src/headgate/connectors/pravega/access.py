"""How the segment stores of one stream are reached: over TLS or not, with a token that the controller gives."""

from __future__ import annotations

import socket
import ssl

from headgate.connectors.pravega.controller import Controller, StreamName
from headgate.environment import Environment
from headgate.errors import StorageError

CONNECT_MS = 10_000

TOKEN_MS = 30_000
"""So long a token is used; the controller makes them for ten minutes, unless it is configured otherwise."""


class Access:
    """Makes connections for one stream. Without a login there are no tokens."""

    def __init__(
        self, client: Controller, stream: StreamName, environment: Environment, *, only_reads: bool = False
    ) -> None:
        """``only_reads``: the user needs no right to write the stream."""
        self.environment, self._only_reads = environment, only_reads
        self._client, self._stream = client, stream
        self._context = client.security.context()
        self._token, self._until_ms = "", 0

    def connect(self, host: str, port: int, name: str) -> socket.socket:
        """Return a connection to a store.

        Raises:
            StorageError: it is not reached, or its certificate is not trusted, which does not pass.
        """
        try:
            plain: socket.socket = self.environment.connect(host, port, CONNECT_MS / 1000)
            if self._context is None:
                return plain
            try:
                return self._context.wrap_socket(plain, server_hostname=host)
            except BaseException:
                plain.close()
                raise
        except ssl.SSLCertVerificationError as error:
            raise StorageError("reach", name, error.verify_message, is_transient=False) from error
        except OSError as error:
            raise StorageError("reach", name, str(error)) from error

    def token(self) -> str:
        """Return the token of a request.

        Raises:
            StorageError, UsageError: the controller does not give one.
        """
        if not self._client.security.secret:
            return ""
        now_ms = self.environment.monotonic_ms()
        if not self._token or now_ms >= self._until_ms:
            self._token, self._until_ms = self._client.token(self._stream, self._only_reads), now_ms + TOKEN_MS
        return self._token

    def forget_token(self) -> None:
        """A store has refused the token: ask for another one."""
        self._token = ""
