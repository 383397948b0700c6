"""Makes the class data archive from which Spark's JVM starts (see ``class_archive``).

``headgate prepare`` does so, and so does a process in the background after a run on this machine that had none.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from headgate.errors import HeadgateError, PipelineFailed, UsageError
from headgate.model.config import Access
from headgate.spark.class_archive import BEGINNING, archive_file, stamp
from headgate.spark.prerequisites import JVM_OPTIONS
from headgate.storage.local_files import FILE_MODES, ProcessDirectory, make_directories, sync_directory

OTHERS_MAX = 2
"""Archives of other Javas and Sparks that stay beside the newest; each has about 150 MB."""

WAIT_S = 600
"""For a JVM that dumps its classes."""

LOWEST_PRIORITY = 19


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
    from headgate.spark.launcher import warm_up, warm_up_sql
    from headgate.spark.session import make_context

    with _jvm_options(*options, f'"-XX:ArchiveClassesAtExit={made}"', "-Xlog:disable"):
        context = make_context("prepare", 2, "local[2]")
        warm_up(context, 2)
        warm_up_sql(context)
    jvm: subprocess.Popen[bytes] = context._gateway.proc
    context.stop()
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


def main() -> None:
    """Make the archive beside everything else that the machine does, and say nothing."""
    os.nice(LOWEST_PRIORITY)
    with suppress(HeadgateError):
        make_archive()


if __name__ == "__main__":
    main()
