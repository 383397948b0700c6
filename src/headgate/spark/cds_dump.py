"""Makes the class data archive from which Spark's JVM starts (see ``cds_archive``).

``headgate prepare`` does so, and so does a process in the background after a run on this machine that had none.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from headgate.environment import SYSTEM_CLOCK
from headgate.errors import HeadgateError, PipelineFailed, UsageError
from headgate.model.config import Access
from headgate.spark.cds_archive import BEGINNING, archive_file, names_archive, stamp
from headgate.spark.prerequisites import JVM_OPTIONS
from headgate.storage.fsync import sync_directory
from headgate.storage.local import make_directories
from headgate.storage.local_directories import ProcessDirectory
from headgate.storage.permissions import FILE_MODES

OTHERS_MAX = 2
"""Archives of other Javas and Sparks that stay beside the newest; each has about 150 MB."""

WAIT_S = 600
"""For a JVM that dumps its classes."""

SETTING = "HEADGATE_PREPARE"
NEVER = "never"
"""The environment variable, and its value with which nothing is prepared in the background."""

AGAIN_S = 86_400.0
"""Between two tries in the background: what failed will fail again, and runs that end at one moment need one file."""

LOWEST_PRIORITY = 19

COMMAND = (sys.executable, "-P", "-m", "headgate.spark.cds_dump")
_begun: list[subprocess.Popen[bytes]] = []
"""Kept: Python warns of the end of one that it still knows to run."""


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
    from headgate.spark.session import make_session

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


def main() -> None:
    """Make the archive beside everything else that the machine does, and say nothing."""
    os.nice(LOWEST_PRIORITY)
    with suppress(HeadgateError):
        make_archive()


if __name__ == "__main__":
    main()
