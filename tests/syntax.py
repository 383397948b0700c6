"""Syntax trees of our own files, for tests that judge the text of the code."""

from __future__ import annotations

import ast
import gc


def parsed(text: str) -> ast.Module:
    """Return the tree of a module, whatever the garbage collector or another thread parses meanwhile.

    CPython before 3.11.8 and 3.12.2 counts how deep a tree is in one place for all that are being made (gh-106905):
    when a collection runs Python code in between, as Hypothesis' callback does, and that formats a traceback or lets a
    thread do so, the first parse ends with SystemError. Without collections nothing comes in between.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        return ast.parse(text)
    finally:
        if was_enabled:
            gc.enable()
