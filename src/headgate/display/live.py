"""What changes while it is looked at in a notebook: shown anew until it has ended, by a thread that ends with it.

Does without IPython where there is none. What goes wrong while something is shown is nobody's failure (ND4).
"""

from __future__ import annotations

import logging
import sys
import threading
from collections import deque
from collections.abc import Callable
from typing import Any, TypeAlias

from headgate.threads import DaemonThread

PERIOD_S = 0.5
DISPLAYS_MAX = 4
"""Of one thing: older ones stay as they are (ND5)."""
LAST_LOOK_S = 2.0

Shown: TypeAlias = dict[str, str]
"""What is shown, by kind of content: ``text/html``, ``text/plain``."""


def in_notebook() -> bool:
    """Whether this code runs in a kernel, whose front end shows HTML and takes updates. Imports nothing."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return getattr(shell, "kernel", None) is not None


class LiveDisplay:
    """Shows one thing in as many cells as ask for it, until it has ended."""

    def __init__(self, look: Callable[[], Shown], ended: Callable[[float], bool]) -> None:
        """Nothing is shown yet.

        Args:
            look: returns what is to be seen now; from any thread.
            ended: waits so many seconds for the end, and returns whether it has come.
        """
        self._look, self._ended = look, ended
        self._lock = threading.Lock()
        self._displays: deque[Any] = deque(maxlen=DISPLAYS_MAX)
        self._seen: Shown = {}
        self._thread: DaemonThread | None = None

    def show(self) -> None:
        """Show it in the cell that runs. Needs a kernel."""
        from IPython.display import display

        with self._lock:
            self._seen = self._look()
            self._displays.append(display(self._seen, raw=True, display_id=True))
            if self._thread is None or not self._thread.is_alive():
                self._thread = DaemonThread(target=self._follow, name="headgate-display", daemon=True)
                self._thread.start()

    def close(self) -> None:
        """It has ended: wait until its end is seen, before the cell that waited for it is over."""
        thread = self._thread
        if thread is not None:
            thread.join(LAST_LOOK_S)

    def _follow(self) -> None:
        while not self._ended(PERIOD_S):
            self._update()
        self._update()

    def _update(self) -> None:
        try:
            with self._lock:
                now = self._look()
                displays = list(self._displays) if now != self._seen else []
                self._seen = now
            for shown in displays:
                shown.update(now, raw=True)
        except Exception:
            logging.getLogger("headgate").debug("a display could not be updated", exc_info=True)
