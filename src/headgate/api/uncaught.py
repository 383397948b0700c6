"""Headgate's own errors, where nobody catches them: one sentence, as ``headgate run`` says it, and no traceback.

For ``python program.py``. Whoever has a hook of their own keeps it. ``HEADGATE_TRACEBACK=1`` shows everything.
"""

from __future__ import annotations

import os
import sys
import traceback
from pathlib import Path
from types import TracebackType

import headgate
from headgate.errors import HeadgateError

VARIABLE = "HEADGATE_TRACEBACK"

_PACKAGE = Path(headgate.__file__).parent


def speak_plainly() -> None:
    """Have this process say errors of Headgate's in a sentence, unless somebody else decides what it says."""
    if sys.excepthook is sys.__excepthook__ and not os.environ.get(VARIABLE):
        sys.excepthook = say


def say(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Print ``error`` with the user's line that led to it; one that is not Headgate's with everything, as ever."""
    if not isinstance(error, HeadgateError) or sys.stderr is None:
        sys.__excepthook__(kind, error, trace)
        return
    print(f"Error: {error}{_where(trace)}", file=sys.stderr)


def _where(trace: TracebackType | None) -> str:
    """Return the innermost line outside the package: it built or started what was wrong."""
    lines = [f for f in traceback.extract_tb(trace) if not Path(f.filename).is_relative_to(_PACKAGE)]
    return f"\n  {lines[-1].filename}, line {lines[-1].lineno}: {lines[-1].line}" if lines else ""
