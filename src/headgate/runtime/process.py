"""The surroundings of a real process: the operating system's threads, clocks and sockets."""

from __future__ import annotations

import os
import queue
import random
import secrets
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from headgate.clock import SystemClock


class DaemonThread(threading.Thread):
    """A thread that knows whether it is the one that asks."""

    @property
    def is_current(self) -> bool:
        """Whether the caller runs in it."""
        return threading.current_thread() is self


class Process(SystemClock):
    """This process (see ``Surroundings``)."""

    def __init__(self) -> None:
        self.random = random.Random()

    @property
    def process_id(self) -> int:
        """Asked each time: a fork has another one."""
        return os.getpid()

    @property
    def host(self) -> str:
        """Asked each time: it may be changed."""
        return socket.gethostname()

    def sleep(self, seconds: float) -> None:
        """Pause this thread."""
        time.sleep(seconds)

    def token(self, size_bytes: int) -> bytes:
        """From the system's source of secrets."""
        return secrets.token_bytes(size_bytes)

    def lock(self) -> threading.Lock:
        """See ``Surroundings``."""
        return threading.Lock()

    def event(self) -> threading.Event:
        """See ``Surroundings``."""
        return threading.Event()

    def condition(self) -> threading.Condition:
        """See ``Surroundings``."""
        return threading.Condition()

    def queue(self) -> queue.SimpleQueue[Any]:
        """See ``Surroundings``."""
        return queue.SimpleQueue()

    def thread(self, target: Callable[..., None], name: str, *arguments: Any) -> DaemonThread:
        """See ``Surroundings``."""
        return DaemonThread(target=target, args=arguments, name=name, daemon=True)

    def pool(self, size: int, name: str) -> ThreadPoolExecutor:
        """See ``Surroundings``."""
        return ThreadPoolExecutor(size, thread_name_prefix=name)

    def listen(self, host: str, port: int) -> socket.socket:
        """See ``Surroundings``."""
        return socket.create_server((host, port), backlog=128)

    def connect(self, host: str, port: int, timeout_seconds: float) -> socket.socket:
        """See ``Surroundings``."""
        return socket.create_connection((host, port), timeout=timeout_seconds)

    def exit(self, code: int) -> None:
        """See ``Surroundings``."""
        os._exit(code)


PROCESS = Process()
