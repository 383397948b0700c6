"""Short tracebacks: an error's sentence and the line of the user's program that led to it.

Used in notebooks (``HeadgateError._render_traceback_``) and, for ``python program.py``, as ``sys.excepthook``.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable
from types import TracebackType

from headgate import errors
from headgate.errors import HeadgateError
from headgate.plain_text import printable

TRACEBACK_VARIABLE = "HEADGATE_TRACEBACK"
"""Set to anything, it shows whole tracebacks."""

_OWN = os.path.dirname(os.path.abspath(__file__)) + os.sep
_FRAMES_OF_TOOLS = frozenset({"typer", "click", "IPython", "ipykernel", "_pytest", "pluggy"})
"""Packages that call what the user wrote, and are in the traceback before it."""


def wants_full_traceback() -> bool:
    """Return whether the user wants whole tracebacks."""
    return bool(os.environ.get(TRACEBACK_VARIABLE))


def user_line(trace: TracebackType | None) -> str:
    """Return the innermost line of the user's own code, indented below a line break; "" if there is none.

    A line in an installed package counts if no other line is the user's: a program may be installed, too.
    """
    import sysconfig  # not needed before there is an error

    paths = sysconfig.get_paths()
    system = tuple(paths[name] + os.sep for name in ("stdlib", "platstdlib", "scripts"))
    installed = tuple(path + os.sep for path in _installed(paths))
    mine = ""
    packaged = ""
    for frame in traceback.extract_tb(trace):
        file = frame.filename
        if file.startswith((_OWN, "<frozen ")) or (file == "<string>" and frame.name != "<module>"):
            continue
        if file.startswith(installed):
            package = next(file[len(path) :] for path in installed if file.startswith(path))
            packaged = packaged if package.split(os.sep)[0] in _FRAMES_OF_TOOLS else _shown(frame)
        elif not file.startswith(system):
            mine = _shown(frame)
    return mine or packaged


def render_traceback(error: errors.HeadgateError) -> Callable[[], list[str]]:
    """Return what IPython calls for the traceback in a notebook: the sentence and the user's line.

    Raises:
        AttributeError: the user wants the whole traceback.
    """
    if wants_full_traceback():
        raise AttributeError("_render_traceback_")
    kind = next(kind for kind in type(error).__mro__ if kind.__module__ == errors.__name__)
    return lambda: f"{kind.__name__}: {error}{user_line(error.__traceback__)}".split("\n")


def _installed(paths: dict[str, str]) -> list[str]:
    """Return the directories of installed packages, the longest first: one may be in another."""
    import site

    found = {paths["purelib"], paths["platlib"], *site.getsitepackages(), site.getusersitepackages()}
    return sorted(found, key=len, reverse=True)


def _shown(frame: traceback.FrameSummary) -> str:
    is_cell = frame.filename.startswith("<ipython-input-") or f"{os.sep}ipykernel_" in frame.filename
    place = "cell" if is_cell and "IPython" in sys.modules else frame.filename
    line = f": {frame.line}" if frame.line else ""
    return f"\n  {place}, line {frame.lineno}{line}"


def install_excepthook() -> None:
    """Print Headgate's errors as one sentence, unless the process already has an excepthook."""
    if sys.excepthook is sys.__excepthook__ and not wants_full_traceback():
        sys.excepthook = print_error


def print_error(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Print an error of Headgate with the user's line that led to it, any other one with its traceback."""
    if not isinstance(error, HeadgateError) or sys.stderr is None:
        sys.__excepthook__(kind, error, trace)
        return
    print(printable(f"Error: {error}{user_line(trace)}"), file=sys.stderr)
