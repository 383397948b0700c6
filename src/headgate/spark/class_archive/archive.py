"""The class data archive (CDS) from which Spark's JVM starts: it saves half of a start's processor time.

``dump`` makes the file for this Java and this Spark in the user's cache directory; starts use it where it is. It is
code that runs, so it must be this user's alone. Nothing depends on it: a JVM that it does not fit goes on
without. Imports no PySpark.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import stat
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from headgate.spark.prerequisites import spark_home
from headgate.storage.local_directories import user_cache_directory

BEGINNING = "spark-classes-"
_OTHERS_MAY_WRITE = stat.S_IWGRP | stat.S_IWOTH


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
