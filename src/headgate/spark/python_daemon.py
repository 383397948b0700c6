"""The process from which Spark forks the Python workers, with all imports of a worker done once, before the fork.

Imports are most of the time between the loss of a worker and the first record of its replacement. Counterpart:
``spark.session`` names this module as ``spark.python.daemon.module`` of the sessions that it makes. Spark's own daemon
imports nothing before it forks, because imported libraries may start threads, which a child does not have; those
imported here start none that computes (allocators and Polars have one each for cleaning up, and do without it).
"""

from __future__ import annotations

import gc
import importlib
import importlib.machinery
import os
import pkgutil
import signal
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from headgate.public_names import garbage_kept
from headgate.spark.early_daemon import hand_over, take_over

MODULES = (
    "pyspark.worker",
    "polars",
    "headgate.spark.worker_main",
    "headgate.runtime.worker.worker",
    "headgate.storage.urls",
    "headgate.store.catalogue.sql",
)
PACKAGES = ("headgate.operators", "headgate.connectors")
"""What a worker imports on its way to the first record, directly or through its pipeline's operators."""

OPTIONAL = ("pandas", "headgate.storage.object_store")
"""What it may import, if it is installed: pyarrow looks for pandas as soon as a list becomes an array."""


def main() -> None:
    """Fork workers on Spark's request until Spark ends."""
    block_sigterm()
    if len(sys.argv) > 1 and sys.argv[1].startswith(os.sep):  # begun beside the JVM; Spark names a module
        if not take_over(sys.argv[1], prepare):
            return
    else:
        drop_archives_from_path()
        if hand_over():
            return
        prepare()
    from pyspark.daemon import manager

    from headgate.spark.worker_main import WATCH

    WATCH.begin()
    manager()


def block_sigterm() -> None:
    """Block SIGTERM: the end of a service sends it to all of its processes, and the last checkpoint needs them.

    Before any thread begins: the system gives the signal to any one that does not block it, and Spark's handler then
    runs in the main thread all the same and hangs up on every worker. Spark ends this process by closing its input, and
    each child with SIGKILL. Children are what they are without this: those that become workers of a pipeline keep it
    out themselves (``spark.worker_main``).
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    os.register_at_fork(after_in_child=_take_sigterm)


def _take_sigterm() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # not the handler of the parent, which ends all its children
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])


def drop_archives_from_path() -> None:
    """Take archives off the import path: Spark's core, and PySpark where the same files are installed.

    Every task begins with ``importlib.invalidate_caches``, for which Python reads the directory of each archive again,
    once for each package in it: that takes longer than all imports.
    """
    pyspark = [entry for entry in sys.path if Path(entry).name == "pyspark.zip"]
    dropped = [entry for entry in sys.path if Path(entry).name.startswith("spark-core_")]
    spec = importlib.machinery.PathFinder.find_spec("pyspark", [e for e in sys.path if e not in pyspark])
    if spec is not None and spec.origin is not None:
        home = Path(spec.origin).resolve().parent
        dropped += [entry for entry in pyspark if home in Path(entry).resolve().parents]
    sys.path[:] = [entry for entry in sys.path if entry not in dropped]
    for cached in [c for c in sys.path_importer_cache if c.startswith(tuple(dropped))]:
        del sys.path_importer_cache[cached]


def prepare() -> None:
    """Import everything, and keep what all children would share from being shared."""
    with garbage_kept():
        for name in (*MODULES, *_modules_of_packages()):
            importlib.import_module(name)
        for name in OPTIONAL:
            with suppress(ImportError):
                importlib.import_module(name)
        import numpy as np
    gc.freeze()  # a child's collector need not touch, and so copy, these pages; there is hardly any garbage in them
    os.register_at_fork(after_in_child=np.random.seed)  # from the system's entropy, as an import would


def _modules_of_packages() -> Iterator[str]:
    for name in PACKAGES:
        package = importlib.import_module(name)
        yield from (module.name for module in pkgutil.iter_modules(package.__path__, f"{name}."))


if __name__ == "__main__":
    main()
