"""The process that workers are forked from: what its children can do, and what its import path leaves out."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pyspark
import pytest

HOME = Path(pyspark.__file__).parent

CHILDREN = r"""
    import os, sys, traceback
    from headgate.spark import python_daemon as daemon

    daemon.prepare()
    loaded = set(sys.modules)
    ours = {name for name in loaded if name.startswith("headgate.")}

    def child():
        import numpy as np
        import polars as pl
        import pyarrow as pa
        import pyarrow.compute as pc

        random = np.random.randint(1 << 62)
        frame = pl.DataFrame({"key": np.arange(300_000) % 7, "value": np.arange(300_000)})
        counts = frame.lazy().group_by("key").agg(pl.len(), pl.col("value").sum()).collect()
        assert counts["len"].sum() == 300_000 and counts["value"].sum() == sum(range(300_000))
        order = pc.sort_indices(pa.array(np.arange(300_000)[::-1]))
        assert order[0].as_py() == 299_999
        assert {name for name in sys.modules if name.startswith("headgate.")} == ours
        os.write(1, b"%d\n" % random)  # one write: the children share the pipe

    children = []
    for _ in range(3):
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                child()
                status = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(status)
        children.append(pid)
    sys.exit(any(os.waitpid(pid, 0)[1] for pid in children))
"""

PATH = """
    import sys
    from headgate.spark import python_daemon as daemon

    given = {given!r}
    sys.path[:0] = given
    sys.path_importer_cache[given[0] + "/pyspark"] = None
    daemon.drop_archives_from_path()
    print([entry for entry in given if entry in sys.path], [c for c in sys.path_importer_cache if given[0] in c])
"""

THREADS = """
    import signal
    from pathlib import Path

    import pyspark.daemon
    from headgate.spark import python_daemon as daemon

    def manager():
        for status in Path("/proc/self/task").glob("*/status"):
            lines = dict(line.split(":\\t", 1) for line in status.read_text().splitlines())
            print(lines["Name"], int(lines["SigBlk"], 16) >> (signal.SIGTERM - 1) & 1, sep=":")

    pyspark.daemon.manager = manager
    daemon.main()
"""


def _python(program: str) -> str:
    result = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, timeout=300, check=False
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.mark.long
def test_children_compute_with_the_imported_libraries_and_draw_different_random_numbers() -> None:
    drawn = _python(CHILDREN).split()
    assert len(drawn) == 3
    assert len(set(drawn)) == 3


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells which signals a thread blocks")
def test_no_thread_of_the_daemon_takes_sigterm() -> None:  # Spark's handler would hang up on every worker
    threads = _python(THREADS).split("\n")[:-1]
    assert len(threads) > 1, "imported libraries have threads of their own"
    assert [thread for thread in threads if not thread.endswith(":1")] == []


def test_the_archive_of_the_installed_pyspark_and_sparks_core_leave_the_import_path() -> None:
    archive, core = f"{HOME}/python/lib/pyspark.zip", f"{HOME}/jars/spark-core_2.13-4.0.0.jar"
    py4j, users = f"{HOME}/python/lib/py4j-0.10.9-src.zip", "/somewhere/users.zip"
    assert _python(PATH.format(given=[archive, core, py4j, users])).strip() == f"{[py4j, users]} []"


def test_the_archive_of_another_pyspark_stays() -> None:
    other = "/opt/spark/python/lib/pyspark.zip"
    assert _python(PATH.format(given=[other])).strip() == f"{[other]} ['{other}/pyspark']"
