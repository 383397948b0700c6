"""Where a program's own modules are, and how the workers of local Spark come to import them."""

from __future__ import annotations

import os
from pathlib import Path


def program_place(target: str) -> str:
    """Return the directory in which a program's own modules are: the file's, or the working directory of a module."""
    path = Path(target)
    return str(path.resolve().parent) if target.endswith(".py") or path.is_file() else os.getcwd()


def with_directory(directory: str, path: str) -> str:
    """Return the import path ``path`` with ``directory`` in it; as the first one, if it was not there."""
    if directory in path.split(os.pathsep):
        return path
    return os.pathsep.join(part for part in (directory, path) if part)
