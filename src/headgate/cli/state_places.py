"""What a word means that ``headgate state`` is given: a place, or a pipeline of the checkpoint directory (RS14)."""

from __future__ import annotations

import os

from headgate.storage.backends import absolute_location, local_directory


def located(path: str, directory: str) -> str:
    """Return where ``path`` is: what it says, unless it is a word that only means a pipeline in ``directory``."""
    if not path or "/" in path or "\\" in path:
        return path
    here = local_directory(absolute_location(path))
    if here is None or any(os.path.exists(here / name) for name in ("savepoint", "log")):
        return path
    return f"{absolute_location(directory).rstrip('/')}/{path}"
