"""What a command tells its user once on a machine, because it helps and must not be in the way (OM17).

Told at the end of a run on a terminal, and never again: whoever wants it knows it then.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress

from headgate.spark.class_archive import archive_file, is_own
from headgate.spark.masters import read_master
from headgate.storage.local import make_directories
from headgate.storage.user_state import user_state_directory

PREPARE = "tip: 'headgate prepare' lets pipelines start sooner on this machine (it keeps a file of 150 MB in {})"


def prepare_tip(master: str | None, environ: Mapping[str, str], *, is_terminal: bool) -> str | None:
    """Return what is to be told of ``headgate prepare`` after a run on ``master``; None: nothing, or no more.

    Of several commands that end at the same moment one is given it. Where nothing can be remembered, nothing is told.
    """
    url = master or environ.get("HEADGATE_MASTER") or "local"
    if not is_terminal or not read_master(url).is_local:
        return None
    file = archive_file(environ)
    if file is None or is_own(file) or not _is_first("told-of-prepare"):
        return None
    return PREPARE.format(file.parent)


def _is_first(name: str) -> bool:
    with suppress(OSError, RuntimeError):
        directory = user_state_directory()
        make_directories(directory)
        os.close(os.open(directory / name, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
        return True
    return False
