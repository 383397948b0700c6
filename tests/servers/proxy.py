"""A wire between a client and a server that can be cut, also just in front of an answer."""

from __future__ import annotations

import contextlib
import socket
import threading


class Wire:
    """Passes on what comes to ``port`` to another port of the loopback, as long as it is not cut.

    Whoever is done shuts a socket down; it is closed when nobody can be about to use it: its number becomes another
    one's, whose bytes would be taken.
    """

    def __init__(self, target: int) -> None:
        self._target = target
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        self._pairs: list[tuple[socket.socket, socket.socket]] = []
        self._lose = b""
        self._loses_given = False
        self._unheard: set[socket.socket] = set()
        self.lost_count = 0
        self.asked_bytes = 0
        """What clients have sent so far, whoever of them for whatever reason."""
        self._accepting = threading.Thread(target=self._accept, daemon=True)
        self._accepting.start()

    def lose_answer(self, question: bytes, *, is_given: bool = False) -> None:
        """The next question with these bytes gets through; its answer does not, and the connection is gone.

        ``is_given``: not before the server has answered, so that it has been carried out by then.
        """
        self._lose, self._loses_given = question, is_given

    def cut(self) -> None:
        """Every connection is gone; new ones are taken."""
        pairs, self._pairs = self._pairs, []
        for pair in pairs:
            self._end(*pair)

    def close(self) -> None:
        self._end(self._listener)
        self._accepting.join()
        self.cut()

    def _accept(self) -> None:
        with self._listener, contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                try:
                    server = socket.create_connection(("127.0.0.1", self._target))
                except OSError:
                    client.close()
                    continue
                self._pairs.append((client, server))
                threading.Thread(target=self._pass, args=(client, server), daemon=True).start()

    def _pass(self, client: socket.socket, server: socket.socket) -> None:
        with client, server:
            answering = threading.Thread(target=self._answer, args=(server, client), daemon=True)
            answering.start()
            self._ask(client, server)
            answering.join()

    def _ask(self, client: socket.socket, server: socket.socket) -> None:
        with contextlib.suppress(OSError):
            is_lost = False
            while data := client.recv(65_536):
                self.asked_bytes += len(data)
                if self._lose and self._lose in data:
                    self._lose, self.lost_count, is_lost = b"", self.lost_count + 1, True
                    if self._loses_given:
                        self._unheard.add(server)
                    else:
                        client.shutdown(socket.SHUT_WR)  # whatever the server says now is not heard
                server.sendall(data)  # what follows, too: a question comes in several parts
            if not is_lost:
                server.shutdown(socket.SHUT_WR)

    def _answer(self, server: socket.socket, client: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while (data := server.recv(65_536)) and server not in self._unheard:
                client.sendall(data)
        self._end(server, client)

    def _end(self, *ends: socket.socket) -> None:
        for end in ends:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
