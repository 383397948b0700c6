"""Syntax trees that are whole, whatever is parsed at the same time.

CPython before 3.11.8 and 3.12.2 counts how deep a tree is in one place for all that are being made (gh-106905): when a
garbage collection runs Python code in between, as Hypothesis' callback does, and that formats a traceback or lets a
thread do so, the first parse ends with SystemError. Here one is made at a time, and nothing is collected meanwhile.
"""

from __future__ import annotations

import ast
import gc
import sys
import threading
from typing import Any

MENDED = ((3, 11, 8), (3, 12, 2))
"""The first release of each series that counts for each tree by itself; all later series do."""

plain_parse = ast.parse
_one_at_a_time = threading.RLock()


def guard_parsing(version: tuple[int, ...] = sys.version_info[:3]) -> None:
    """Have ``ast.parse`` make one tree at a time, for all that call it: pytest, Hypothesis, ``inspect``, tracebacks."""
    if any(mended[:2] == version[:2] and version < mended for mended in MENDED):
        ast.parse = _parse  # type: ignore[assignment]


def _parse(*args: Any, **kwargs: Any) -> ast.AST:
    with _one_at_a_time:
        was_enabled = gc.isenabled()
        gc.disable()
        try:
            return plain_parse(*args, **kwargs)
        finally:
            if was_enabled:
                gc.enable()
