"""The class data archive (CDS) from which Spark's JVM starts: it saves half of a start's processor time.

``headgate prepare`` makes the file for this Java and this Spark in the user's cache directory; starts use it where it
is (OM12). It is code that runs, so it must be this user's alone. Nothing depends on it: a JVM that it does not fit
goes on without. Imports no PySpark.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import stat
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from headgate.errors import PipelineFailed, UsageError
from headgate.model.config import Access
from headgate.spark.prerequisites import JVM_OPTIONS, spark_home
from headgate.storage.fsync import sync_directory
from headgate.storage.local import make_directories
from headgate.storage.local_directories import ProcessDirectory, user_cache_directory
from headgate.storage.permissions import FILE_MODES

BEGINNING = "spark-classes-"
_OTHERS_MAY_WRITE = stat.S_IWGRP | stat.S_IWOTH

OTHERS_MAX = 2
"""Archives of other Javas and Sparks that stay beside the newest; each has about 150 MB."""

WAIT_S = 600
"""For a JVM that dumps its classes."""


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


def make_archive() -> Path:
    """Make the archive for this Java and this Spark, and remove the oldest of the others.

    It gets its name when it is whole and durable. Two that make it at the same time are in each other's way as little
    as a JVM that uses the old one.

    Raises:
        UsageError: there is no Java or no home, or it cannot be written.
        PipelineFailed: Spark could not start, or Java wrote nothing.
    """
    file = archive_file(os.environ)
    if file is None:
        raise UsageError("there is no Java, no Spark or no home directory; 'headgate doctor' says which")
    try:
        make_directories(file.parent)
        making = ProcessDirectory(file.parent / "making")
        try:
            made = making.path / file.name
            dump_archive(made)
            os.chmod(made, FILE_MODES[Access.OWNER])
            with open(made, "rb") as whole:
                os.fsync(whole.fileno())
            made.replace(file)
            sync_directory(file.parent)
        finally:
            making.remove()
        _remove_oldest(file)
    except OSError as error:
        why = error.strerror or error
        raise UsageError(f"{file} cannot be written: {why}; choose another XDG_CACHE_HOME") from None
    return file


def dump_archive(made: Path, *options: str) -> None:
    """Start a JVM that runs a job as those of pipelines, and dumps the classes that it loaded to ``made`` at its end.

    Raises:
        UsageError, PipelineFailed: see ``make_archive``.
    """
    from headgate.spark.launcher import warm_up
    from headgate.spark.session import make_session  # imports the settings of a JVM, which import this module

    with _jvm_options(*options, f'"-XX:ArchiveClassesAtExit={made}"', "-Xlog:disable"):
        session = make_session("prepare", 2, "local[2]")
        warm_up(session, 2)
    jvm: subprocess.Popen[bytes] = session.sparkContext._gateway.proc
    session.stop()
    assert jvm.stdin is not None
    jvm.stdin.close()
    try:
        status = jvm.wait(WAIT_S)
    except subprocess.TimeoutExpired:
        jvm.kill()
        status = jvm.wait()
    if status != 0 or not made.exists():
        raise PipelineFailed("Java has not written down the classes that it loaded; is there room on the disk?")


@contextmanager
def _jvm_options(*options: str) -> Iterator[None]:
    """Replace the options of JVMs that are started within this block."""
    given = os.environ.pop(JVM_OPTIONS, None)
    os.environ[JVM_OPTIONS] = " ".join(options)
    try:
        yield
    finally:
        del os.environ[JVM_OPTIONS]
        if given is not None:
            os.environ[JVM_OPTIONS] = given


def _remove_oldest(newest: Path) -> None:
    others = [path for path in newest.parent.glob(f"{BEGINNING}*.jsa") if path != newest]
    for path in sorted(others, key=lambda path: stamp(path)[1])[: max(0, len(others) - OTHERS_MAX)]:
        path.unlink(missing_ok=True)
