"""What the simulator runs takes clocks, chance, threads and its names from outside (decision 0011)."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import headgate
from headgate.sim.coverage_table import NOT_YET

SOURCE = Path(headgate.__file__).parent
ROOMS = ("model", "protocol", "codec", "storage", "store", "state", "operators", "connectors", "runtime")
"""What the simulator runs of the product, but for the building of pipelines."""

FROM_OUTSIDE = {
    "time": None,
    "secrets": None,
    "uuid": {"uuid1", "uuid4", "getnode"},
    "random": None,
    "socket": {"gethostname", "create_server", "create_connection"},
    "os": {"getpid", "urandom", "getrandom", "times"},
    "threading": {"Thread", "Event", "Condition", "Timer", "Lock", "RLock", "Semaphore", "get_ident"},
    "concurrent.futures": {"ThreadPoolExecutor", "ProcessPoolExecutor"},
    "datetime": {"datetime.now", "datetime.utcnow", "datetime.today", "date.today"},
}
"""By module: what is not for anybody to take by himself. None: all of it."""

EXCEPTIONS = {
    "codec/decodable.py": "its lock is held while a library looks at a type: the simulator does not park there",
    "runtime/surroundings.py": "it is the operating system of the runtime",
    "runtime/wire/spill.py": "its locks are held across files of the process, where the simulator does not park",
    "runtime/wire/channels.py": "its lock is held across a spill at most (see spill)",
    "runtime/driver/pipeline_lock.py": "thin: a lock of the file system, and signals between processes",
    "storage/local.py": "thin: names temporary files of the file system",
    "storage/local_files.py": "names temporary files; its lock is held across calls of the file system, no parking",
    "storage/object_store.py": "thin: draws names where storage is real",
    "storage/hdfs.py": "thin: threads, names and the process of a client of servers that the simulator has none of",
    "connectors/files/file_committer.py": "threads publish only where each request travels: no storage of files in it",
    "connectors/files/object_reader.py": "its threads fetch from object stores, of which the simulator has none",
    "connectors/lookup.py": "its threads ask databases, of which the simulator has none",
    "storage/memory.py": "its lock is never held across anything that blocks; draws names for tests",
    "store/chunks.py": "draws names where a store is given nothing else to draw them with",
    "store/catalogue/sqlite.py": "its lock is held across a transaction in memory: the simulator does not park there",
    "store/catalogue/sql.py": "thin: a lock of the file system",
    "store/server/server.py": "thin: a lock of the file system, and a number that is drawn once",
}

SERVERS = ("store/catalogue/postgresql",)
"""Talk to servers that the simulator has none of: no seed runs them, as the table of coverage says."""


def taken(text: str) -> set[str]:
    """Return what a module takes by itself."""
    tree = ast.parse(text)
    modules: dict[str, str] = {}
    names: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            modules |= {alias.asname or alias.name: alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            names |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    found = set()
    for node in ast.walk(tree):
        whole = ast.unparse(node) if isinstance(node, ast.Attribute | ast.Name) else ""
        first, _, rest = whole.partition(".")
        origin = modules.get(first) or names.get(first, "")
        found.add(f"{origin}.{rest}" if rest else origin)
    return {name for name in found if is_from_outside(name)}


def is_from_outside(name: str) -> bool:
    for module, members in FROM_OUTSIDE.items():
        member = name.removeprefix(f"{module}.")
        if member != name and (members is None or member in members):
            return True
    return False


def test_what_the_simulator_runs_takes_its_surroundings_from_outside() -> None:
    found = {}
    for room in ROOMS:
        for path in sorted((SOURCE / room).rglob("*.py")):
            name = str(path.relative_to(SOURCE))
            if name not in EXCEPTIONS and not name.startswith(SERVERS):
                found[name] = sorted(taken(path.read_text(encoding="utf-8")))
    assert len(found) > 200
    assert {name: what for name, what in found.items() if what} == {}


def test_exceptions_are_few_and_there() -> None:
    assert all((SOURCE / name).is_file() for name in EXCEPTIONS)
    assert len(EXCEPTIONS) <= 20
    assert {room.rstrip("/") for room in SERVERS} <= set(NOT_YET)


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("import time\nnow = time.monotonic()", "time.monotonic"),
        ("import time as t\nnow = t.perf_counter_ns()", "time.perf_counter_ns"),
        ("from time import sleep\nsleep(1)", "time.sleep"),
        ("def f(clock=time.monotonic): ...\nimport time", "time.monotonic"),
        ("import os\npid = os.getpid()", "os.getpid"),
        ("import secrets\nname = secrets.token_hex(8)", "secrets.token_hex"),
        ("import random\nnumber = random.random()", "random.random"),
        ("from uuid import uuid4\nname = uuid4()", "uuid.uuid4"),
        ("import socket\nhost = socket.gethostname()", "socket.gethostname"),
        (
            "from concurrent.futures import ThreadPoolExecutor\npool = ThreadPoolExecutor()",
            "concurrent.futures.ThreadPoolExecutor",
        ),
        ("from datetime import datetime\nnow = datetime.now()", "datetime.datetime.now"),
    ],
)
def test_what_is_taken_is_found(text: str, name: str) -> None:
    assert taken(text) == {name}


@pytest.mark.parametrize(
    "text",
    [
        "import os\nsize = os.path.getsize('a')",
        "import socket\ndef f(connection: socket.timeout): ...",
        "from datetime import datetime\nday = datetime(2020, 1, 1)",
        "from concurrent.futures import Future\none = Future()",
    ],
)
def test_what_anybody_may_use_is_left_alone(text: str) -> None:
    assert taken(text) == set()
