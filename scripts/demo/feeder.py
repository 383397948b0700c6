"""Streams the lines of growing files into the store, in the order in which they appear.

The other way in is ``replay``, for files that are finished.
"""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pyarrow as pa

import headgate as hg
from headgate.store.streams import TEXT_SCHEMA

PERIOD_S = 0.05
CHUNK_BYTES = 4 << 20


class Feeder:
    """Follows files in a thread; ``fed_bytes`` says how much of each has become events."""

    def __init__(self, store: hg.Store, stream: str) -> None:
        self._writer = store.writer(stream, writer_id="demo-feeder")
        self._lock = threading.Lock()
        self._files: dict[Path, int] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="feeder", daemon=True)
        self._error: BaseException | None = None
        self.lines_count = 0

    def start(self) -> None:
        """Begin to follow."""
        self._thread.start()

    def follow(self, path: Path) -> None:
        """Take another file (it need not exist yet)."""
        with self._lock:
            self._files[path] = 0

    def fed_bytes(self) -> dict[Path, int]:
        """Return how many bytes of each file have become events; whole lines only."""
        with self._lock:
            return dict(self._files)

    def feed(self, lines: list[str]) -> None:
        """Append lines and wait until they are durable."""
        if lines:
            batch = pa.record_batch([pa.array(lines, pa.large_string())], schema=TEXT_SCHEMA)
            future = self._writer.append(batch)
            self._writer.flush()
            future.result()
            self.lines_count += len(lines)

    def finish(self) -> None:
        """Stop following; what is fed by then is the input.

        Raises:
            HeadgateError: feeding had failed.
        """
        self._stop.set()
        self._thread.join()
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        try:
            while not self._stop.is_set():
                for path in list(self.fed_bytes()):
                    self._step(path)
                time.sleep(PERIOD_S)
        except BaseException as error:
            self._error = error

    def _step(self, path: Path) -> None:
        at = self._files[path]
        if not path.exists() or path.stat().st_size <= at:
            return
        with path.open("rb") as file:
            file.seek(at)
            data = file.read(CHUNK_BYTES)
        data = data[: data.rfind(b"\n") + 1]
        lines = [line.removesuffix(b"\r").decode("utf-8", "replace") for line in data.split(b"\n")[:-1]]
        self.feed(lines)
        with self._lock:
            self._files[path] = at + len(data)
