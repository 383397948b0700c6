"""Two sinks for SQLite as users may write them: one prepares its output in the target, one keeps it in checkpoints.

Both write records of ``number`` and ``text`` into the table ``numbers``, each record once, whichever process dies. The
conformance kit tests both of them (``tests/connectors/test_two_phase_sink.py``).
"""

import sqlite3
from collections.abc import Iterable, Sequence

import pyarrow as pa

import headgate as hg

TABLES = """
create table if not exists numbers (number integer, text text, owner text);
create table if not exists waiting (name text, number integer, text text);
create table if not exists ledger (name text primary key);
create table if not exists owners (owner text primary key, generation integer, life text);
"""


def connect(path: str) -> sqlite3.Connection:
    """Return a connection to the target, whose tables are there."""
    connection = sqlite3.connect(path, isolation_level=None, timeout=30, check_same_thread=False)
    connection.executescript(TABLES)
    return connection


def claimed(connection: sqlite3.Connection, owner: str) -> hg.Fence | None:
    """Return who owns the sink."""
    row = connection.execute("select owner, generation, life from owners where owner = ?", [owner]).fetchone()
    return hg.Fence(*row) if row else None


def refuse_if_replaced(connection: sqlite3.Connection, fence: hg.Fence) -> None:
    """Raise if a newer generation, or another pipeline of the same name, owns the sink."""
    fence.refuse_if_replaced_by(claimed(connection, fence.owner))


class SqliteTarget:
    """Remembers who owns a sink, and refuses all others."""

    transient_errors: tuple[type[Exception], ...] = (sqlite3.OperationalError,)

    def __init__(self, path: str) -> None:
        self.path = path

    def claim(self, fence: hg.Fence) -> None:
        """Remember who owns the sink from now on."""
        with connect(self.path) as target:
            target.execute("begin immediate")
            refuse_if_replaced(target, fence)
            row = [fence.owner, fence.generation, fence.life]
            target.execute("insert or replace into owners values (?, ?, ?)", row)

    def claimed(self, owner: str) -> hg.Fence | None:
        """Return who owns the sink."""
        with connect(self.path) as target:
            return claimed(target, owner)

    def all_claimed(self) -> Iterable[hg.Fence]:
        """Return who owns all sinks that write to these tables."""
        with connect(self.path) as target:
            return [hg.Fence(*row) for row in target.execute("select owner, generation, life from owners")]

    def remove_output(self, fence: hg.Fence) -> None:
        """Remove everything: the pipeline starts over."""
        with connect(self.path) as target:
            target.execute("begin immediate")
            refuse_if_replaced(target, fence)
            target.execute("delete from numbers where owner = ?", [fence.owner])
            target.execute("delete from ledger where substr(name, 1, ?) = ?", [len(fence.owner) + 1, f"{fence.owner}-"])


class SqliteSink(SqliteTarget, hg.TwoPhaseSink[sqlite3.Connection]):
    """Prepared records wait in a table of their own, under the name of their transaction."""

    def begin(self, name: str, schema: pa.Schema) -> sqlite3.Connection:
        """Collect in memory, so that writers do not wait for each other."""
        connection = sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)
        connection.executescript(TABLES)
        return connection

    def write(self, transaction: sqlite3.Connection, batch: pa.RecordBatch) -> None:
        """Add records."""
        rows = zip(*batch.to_pydict().values(), strict=True)
        transaction.executemany("insert into numbers values (?, ?, null)", rows)

    def prepare(self, transaction: sqlite3.Connection, name: str, fence: hg.Fence) -> None:
        """Have them wait in the target."""
        rows = transaction.execute("select ?, number, text from numbers", [name]).fetchall()
        with connect(self.path) as target:
            target.execute("begin immediate")
            refuse_if_replaced(target, fence)
            target.execute("delete from waiting where name = ?", [name])  # a try whose answer was lost
            target.executemany("insert into waiting values (?, ?, ?)", rows)

    def prepared(self, owner: str) -> Iterable[str]:
        """Return what waits, ours and that of others."""
        with connect(self.path) as target:
            return [name for (name,) in target.execute("select distinct name from waiting")]

    def commit(self, names: Sequence[str], fence: hg.Fence) -> None:
        """Move what waits into the table that readers see, all of it in one transaction."""
        with connect(self.path) as target:
            target.execute("begin immediate")
            refuse_if_replaced(target, fence)
            for name in names:
                if target.execute("select 1 from ledger where name = ?", [name]).fetchone():
                    continue
                moved = "insert into numbers select number, text, ? from waiting where name = ?"
                if target.execute(moved, [fence.owner, name]).rowcount == 0:
                    raise hg.UsageError(f"{name} is neither prepared nor committed in {self.path}")
                target.execute("delete from waiting where name = ?", [name])
                target.execute("insert into ledger values (?)", [name])

    def abort(self, name: str, fence: hg.Fence) -> None:
        """Nobody waits for it any more."""
        with connect(self.path) as target:
            target.execute("begin immediate")
            refuse_if_replaced(target, fence)
            target.execute("delete from waiting where name = ?", [name])

    def committed(self, owner: str) -> Iterable[str]:
        """Return what is in the ledger, ours and that of others."""
        with connect(self.path) as target:
            return [name for (name,) in target.execute("select name from ledger")]

    def forget(self, names: Sequence[str]) -> None:
        """Keep the ledger small."""
        with connect(self.path) as target:
            target.executemany("delete from ledger where name = ?", [[name] for name in names])

    def close(self, transaction: sqlite3.Connection) -> None:
        """Free the memory."""
        transaction.close()


class SqliteLedgerSink(SqliteTarget, hg.LedgerSink):
    """Records stay in the checkpoint until it is completed, and come with their name into one transaction."""

    def publish(self, outputs: Sequence[hg.LedgerOutput], fence: hg.Fence) -> None:
        """Write records and names, or nothing."""
        with connect(self.path) as target:
            target.execute("begin immediate")
            refuse_if_replaced(target, fence)
            for output in outputs:
                if target.execute("insert or ignore into ledger values (?)", [output.name]).rowcount:
                    for batch in output:  # read from the checkpoint, one after the other
                        rows = zip(*batch.to_pydict().values(), strict=True)
                        mine = f"insert into numbers values (?, ?, '{fence.owner}')"
                        target.executemany(mine, rows)

    def forget(self, owner: str, before: int) -> None:
        """Keep the ledger small."""
        with connect(self.path) as target:
            names = [name for (name,) in target.execute("select name from ledger") if name.startswith(f"{owner}-")]
            old = [[name] for name in names if hg.output_checkpoint(name) < before]
            target.executemany("delete from ledger where name = ?", old)
