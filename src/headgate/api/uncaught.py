"""Headgate's own errors, where nobody catches them: one sentence, as ``headgate run`` says it, and no traceback.

For ``python program.py``. Whoever has a hook of their own keeps it. ``HEADGATE_TRACEBACK=1`` shows everything.
Counterpart: ``HeadgateError._render_traceback_``, for notebooks.
"""

from __future__ import annotations

import sys
from types import TracebackType

from headgate.errors import HeadgateError
from headgate.plain_text import printable
from headgate.user_line import user_line, wants_everything


def speak_plainly() -> None:
    """Have this process say errors of Headgate's in a sentence, unless somebody else decides what it says."""
    if sys.excepthook is sys.__excepthook__ and not wants_everything():
        sys.excepthook = say


def say(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Print ``error`` with the user's line that led to it; one that is not Headgate's with everything, as ever."""
    if not isinstance(error, HeadgateError) or sys.stderr is None:
        sys.__excepthook__(kind, error, trace)
        return
    print(printable(f"Error: {error}{user_line(trace)}"), file=sys.stderr)
