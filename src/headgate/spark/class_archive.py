"""The class data archive (CDS) from which Spark's JVM starts: it saves half of a start's processor time.

``headgate prepare``, or a process in the background after a run without one, makes the file for this Java and this
Spark in the user's cache directory; starts use it where it is. It is code that runs, so it must be this user's
alone. Nothing depends on it: a JVM that it does not fit goes on without. Imports no PySpark.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from headgate.environment import SYSTEM_CLOCK
from headgate.spark.prerequisites import JVM_OPTIONS, spark_home
from headgate.storage.local_files import make_directories, user_cache_directory

BEGINNING = "spark-classes-"
_OTHERS_MAY_WRITE = stat.S_IWGRP | stat.S_IWOTH

SETTING = "HEADGATE_PREPARE"
NEVER = "never"
"""The environment variable, and its value with which nothing is prepared in the background."""

AGAIN_S = 86_400.0
"""Between two tries in the background: what failed will fail again, and runs that end at one moment need one file."""

COMMAND = (sys.executable, "-P", "-m", "headgate.spark.class_dump")
_begun: list[subprocess.Popen[bytes]] = []
"""Kept: Python warns of the end of one that it still knows to run."""


def archive_file(environ: Mapping[str, str]) -> Path | None:
    """Return where the file is for the Java and the Spark that ``environ`` leads to; None if one of them is missing."""
    home = environ.get("JAVA_HOME")
    java = shutil.which(str(Path(home) / "bin" / "java") if home else "java", path=environ.get("PATH"))
    spark = spark_home(environ)
    if java is None or spark is None:
        return None
    binary, jars = Path(java).resolve(), Path(spark).resolve() / "jars"
    stamps = [stamp(path) for path in (binary, binary.parents[1] / "lib" / "server" / "libjvm.so", jars)]
    key = hashlib.sha256(repr((str(binary), str(jars), stamps)).encode()).hexdigest()
    with suppress(RuntimeError):  # this user has no home
        return user_cache_directory() / f"{BEGINNING}{key[:16]}.jsa"
    return None


def stamp(path: Path) -> tuple[int, int]:
    """Return what a new installation changes; the JVM looks itself whether a file fits."""
    try:
        found = path.stat()
    except OSError:
        return 0, 0
    return found.st_size, found.st_mtime_ns


def archive_options() -> list[str]:
    """Return what tells a JVM to use the file; nothing if there is none, or one that others could have written."""
    file = archive_file(os.environ)
    return options_with(file) if file is not None and is_trusted(file) else []


def java_options(given: str) -> str:
    """Return the options ``given`` for a JVM after those for the file, of which the user's own win."""
    mine = [] if names_archive(given) else archive_options()
    return " ".join([*mine, given] if given else mine)


def names_archive(given: str) -> bool:
    """Whether the options ``given`` for a JVM say from which archive it starts, or which one it makes."""
    return "SharedArchiveFile" in given or "ArchiveClassesAtExit" in given


def options_with(file: Path) -> list[str]:
    """Return what tells a JVM to use ``file`` if it fits, without a word if it does not."""
    return [f'"-XX:SharedArchiveFile={file}"', "-Xshare:auto", "-Xlog:cds=off", "-Xlog:cds+dynamic=off"]


def is_trusted(file: Path) -> bool:
    """Return whether ``file`` exists, and only this user can have written it."""
    try:
        found, directory = os.lstat(file), os.stat(file.parent)
    except OSError:
        return False
    is_alone = all(one.st_uid == os.geteuid() and not one.st_mode & _OTHERS_MAY_WRITE for one in (found, directory))
    return stat.S_ISREG(found.st_mode) and is_alone


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
