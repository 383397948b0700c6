"""Has a process of its own make the class data archive of ``dump``, after a run on a machine that had none."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from headgate.environment import SYSTEM_CLOCK
from headgate.spark.class_archive.archive import archive_file, names_archive
from headgate.spark.prerequisites import JVM_OPTIONS
from headgate.storage.local import make_directories

SETTING = "HEADGATE_PREPARE"
NEVER = "never"
"""The environment variable, and its value with which nothing is prepared in the background."""

AGAIN_S = 86_400.0
"""Between two tries in the background: what failed will fail again, and runs that end at one moment need one file."""

COMMAND = (sys.executable, "-P", "-m", "headgate.spark.class_archive.dump")
_begun: list[subprocess.Popen[bytes]] = []
"""Kept: Python warns of the end of one that it still knows to run."""


def prepare_in_background(environ: Mapping[str, str]) -> bool:
    """Have a process of its own make the archive; return whether it has begun. It outlives this process.

    Nothing begins where there is an archive, where options of the user's name one, with ``HEADGATE_PREPARE=never``, or
    within a day of the last try.
    """
    file = archive_file(environ)
    if file is None or environ.get(SETTING) == NEVER or names_archive(environ.get(JVM_OPTIONS, "")):
        return False
    with suppress(OSError):  # nothing depends on it
        if not file.exists() and _is_due(tried_mark(file)):
            kept = {name: value for name, value in environ.items() if not name.startswith("HEADGATE_")}
            nothing = subprocess.DEVNULL
            _begun.append(
                subprocess.Popen(
                    COMMAND,
                    cwd=file.parent,
                    env=kept,
                    stdin=nothing,
                    stdout=nothing,
                    stderr=nothing,
                    start_new_session=True,
                )
            )
            return True
    return False


def tried_mark(file: Path) -> Path:
    """Return the file that is there since a process in the background began to make the archive ``file``."""
    return file.with_suffix(".tried")


def _is_due(tried: Path) -> bool:
    """Whether this is the first try, or the last one is long ago; it is noted."""
    make_directories(tried.parent)
    try:
        os.close(os.open(tried, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
    except FileExistsError:
        if abs(SYSTEM_CLOCK.wall_ms() / 1000 - tried.stat().st_mtime) < AGAIN_S:  # else the clock was set back
            return False
        os.utime(tried)
    return True
