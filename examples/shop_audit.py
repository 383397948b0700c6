"""A shop and a pipeline take stock at the same moment: each snapshot of the shop matches a checkpoint exactly.

    python examples/shop_audit.py sell /tmp/shop.db &
    headgate run examples/shop_audit.py -- /tmp/shop.db
    python examples/shop_audit.py audit /tmp/shop.db

The shop is a SQLite file with the sales of each till and the remaining stock. With every checkpoint, a hook takes stock
and puts a marker into the sales of each till, in one transaction. The source reads a till up to the marker, and sends
the barrier of the checkpoint there. So the sales that the pipeline had counted at a checkpoint and the stock that the
shop recorded for it add up to the initial stock, whatever is sold in the meantime and whichever process dies.
"""

import json
import random
import sqlite3
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pyarrow as pa

import headgate as hg
from headgate.connectors.base import CheckpointMarker, Source, SourceBatch, SourceContext, owner_of_split

TILLS, ARTICLES, AT_FIRST = 3, 5, 100_000
ROWS = 50
TABLES = """
create table if not exists sales (number integer primary key autoincrement, till text, article integer,
                                  quantity integer, checkpoint integer);
create table if not exists stock (article integer primary key, left integer);
create table if not exists stocktakings (checkpoint integer, article integer, left integer, is_completed integer);
create table if not exists counted (checkpoint integer, article integer, quantity integer);
create table if not exists ledger (name text primary key);
create table if not exists owners (owner text primary key, generation integer, life text);
create table if not exists closed (is_closed integer);
"""
SCHEMA = pa.schema([("article", pa.int64()), ("quantity", pa.int64())])


@contextmanager
def shop(path: str, how: str = "immediate") -> Iterator[sqlite3.Connection]:
    """Give a transaction of the shop's database."""
    connection = sqlite3.connect(path, isolation_level=None, timeout=60)
    try:
        connection.execute(f"begin {how}")
        yield connection
        connection.execute("commit")
    finally:
        connection.close()


def open_shop(path: str) -> None:
    """Fill the shelves, once."""
    connection = sqlite3.connect(path, timeout=60)
    connection.executescript(f"pragma journal_mode = wal; {TABLES}")
    connection.close()
    with shop(path) as db:
        full = [[article, AT_FIRST] for article in range(ARTICLES)]
        db.executemany("insert or ignore into stock values (?, ?)", full)


def sell(path: str, sales: int, seed: int = 0) -> None:
    """Sell something at some till."""
    rng = random.Random(seed)
    with shop(path) as db:
        for _ in range(sales):
            article, quantity = rng.randrange(ARTICLES), rng.randint(1, 3)
            till = f"till-{rng.randrange(TILLS)}"
            db.execute("insert into sales (till, article, quantity) values (?, ?, ?)", [till, article, quantity])
            db.execute("update stock set left = left - ? where article = ?", [quantity, article])


def close_shop(path: str) -> None:
    """Nothing is sold any more: the sales have an end."""
    with shop(path) as db:
        db.execute("insert into closed values (1)")


def claim(db: sqlite3.Connection, owner: str, generation: int) -> None:
    """Refuse a driver that was replaced."""
    row = db.execute("select generation from owners where owner = ?", [owner]).fetchone()
    if row is not None and row[0] > generation:
        raise hg.FencedError(f"the shop of {owner}", generation, row[0])
    known = "on conflict (owner) do update set generation = excluded.generation"
    db.execute(f"insert into owners (owner, generation) values (?, ?) {known}", [owner, generation])


def claimed(db: sqlite3.Connection, owner: str) -> hg.Fence | None:
    """Return who owns what was counted."""
    row = db.execute("select owner, generation, life from owners where owner = ?", [owner]).fetchone()
    return hg.Fence(*row) if row else None


class Stocktaking(hg.CoordinatorHook, hg.CheckpointListener):
    """Takes stock with every checkpoint, and marks in the sales when that was."""

    def __init__(self, path: str) -> None:
        self.path = path

    def open(self, context: hg.HookContext) -> None:
        """Remember who asks."""
        self.owner, self.generation = f"{context.pipeline}/{context.hook}", context.generation

    def trigger(self, checkpoint_id: int) -> bytes:
        """Take stock and mark the sales: one transaction, so no sale is in between."""
        with shop(self.path) as db:
            claim(db, self.owner, self.generation)
            db.execute("insert into stocktakings select ?, article, left, 0 from stock", [checkpoint_id])
            tills = [[f"till-{till}", checkpoint_id] for till in range(TILLS)]
            db.executemany("insert into sales (till, checkpoint) values (?, ?)", tills)
            (left,) = db.execute("select sum(left) from stock").fetchone()
            return json.dumps({"left": left}).encode()

    def restore(self, checkpoint_id: int, data: bytes | None) -> None:
        """Keep the stocktakings of completed checkpoints; no marker of another one is met any more."""
        with shop(self.path) as db:
            claim(db, self.owner, self.generation)
            db.execute("update stocktakings set is_completed = 1 where checkpoint = ?", [checkpoint_id])
            db.execute("delete from stocktakings where checkpoint > ? or not is_completed", [checkpoint_id])
            db.execute("delete from sales where checkpoint is not null")

    def reset(self) -> None:
        """Nothing was counted yet."""
        self.restore(0, None)

    def notify_checkpoint_complete(self, checkpoint_id: int) -> None:
        """The pipeline holds its half: the two can be compared."""
        with shop(self.path) as db:
            db.execute("update stocktakings set is_completed = 1 where checkpoint = ?", [checkpoint_id])
            db.execute("delete from sales where checkpoint <= ?", [checkpoint_id])

    def notify_checkpoint_aborted(self, checkpoint_id: int) -> None:
        """Nobody holds the other half."""
        with shop(self.path) as db:
            db.execute("delete from stocktakings where checkpoint = ?", [checkpoint_id])
            db.execute("delete from sales where checkpoint = ?", [checkpoint_id])


class Sales(Source):
    """The sales of a shop; each till is a split. One that is not ``cut`` by markers passes over them."""

    def __init__(self, path: str, *, cut: bool = True) -> None:
        self.path = path
        self.cut = cut

    def schema(self) -> pa.Schema:
        """Return the columns of a sale."""
        return SCHEMA

    def identity(self) -> str:
        """Positions are numbers of sales."""
        return f"sales of {self.path}"

    def coordinator_hook(self) -> hg.CoordinatorHook | None:
        """Return what puts the markers there that the reader looks for."""
        return Stocktaking(self.path) if self.cut else None

    def without_hook(self) -> "Sales":
        """Return a source of the same sales for runs that only look at them."""
        return Sales(self.path, cut=False)

    def open(self, context: SourceContext) -> "SalesReader":
        """Return a reader of the tills that belong to this subtask."""
        tills = [
            f"till-{till}"
            for till in range(TILLS)
            if owner_of_split(till, context.parallelism) == context.subtask_index
        ]
        return SalesReader(self, tills, context.positions or {})


class SalesReader:
    """Reads each till up to the next marker, and stands still there."""

    def __init__(self, source: Sales, tills: Sequence[str], positions: dict[str, bytes]) -> None:
        self.path = source.path
        markers = "" if source.cut else "and checkpoint is null"
        self.query = f"select * from sales where till = ? and number > ? {markers} order by number limit {ROWS}"
        self.position = {till: int(positions.get(till, b"0")) for till in tills}
        self.ended: set[str] = set()
        self.still: set[str] = set()

    def splits(self) -> Sequence[str]:
        """Return the tills that may sell more."""
        return [till for till in self.position if till not in self.ended]

    def poll(self) -> SourceBatch | CheckpointMarker | None:
        """Return sales of one till, or that its marker is met."""
        with shop(self.path, "deferred") as db:
            is_closed = db.execute("select 1 from closed").fetchone() is not None
            for till in self.splits():
                if till in self.still:
                    continue
                rows = db.execute(self.query, [till, self.position[till]]).fetchall()
                found = self.read(till, rows, is_closed)
                if found is not None:
                    return found
        return None

    def read(self, till: str, rows: list, is_closed: bool) -> SourceBatch | CheckpointMarker | None:
        """Return what ``rows`` begin with; markers behind the last sale of a closed till are not waited for."""
        if is_closed and len(rows) < ROWS and all(row[4] is not None for row in rows):
            self.ended.add(till)
            return SourceBatch(till, pa.RecordBatch.from_pylist([], SCHEMA), None, True)
        if rows and rows[0][4] is not None:
            self.position[till] = rows[0][0]
            self.still.add(till)
            return CheckpointMarker(till, rows[0][4])
        sales = []
        for number, _, article, quantity, checkpoint in rows:
            if checkpoint is not None:
                break
            sales.append({"article": article, "quantity": quantity})
            self.position[till] = number
        if not sales:
            return None
        # Tills that are read in turn: what was read goes to the end.
        self.position[till] = self.position.pop(till)
        return SourceBatch(till, pa.RecordBatch.from_pylist(sales, SCHEMA))

    def read_on(self, splits: Sequence[str]) -> None:
        """Go on behind the markers of these tills."""
        self.still -= set(splits)

    def is_finished(self) -> bool:
        """Whether all tills are closed and read."""
        return not self.splits()

    def positions(self) -> dict[str, bytes]:
        """Return the number of the last sale or marker of each till."""
        return {till: b"%d" % number for till, number in self.position.items()}

    def wakeup_ms(self) -> int:
        """Look for news that often."""
        return 5

    def close(self) -> None:
        """Nothing is open."""


class Counted(hg.LedgerSink):
    """Writes what was counted, with the checkpoint that covers it."""

    transient_errors = (sqlite3.OperationalError,)

    def __init__(self, path: str) -> None:
        self.path = path

    def claim(self, fence: hg.Fence) -> None:
        """Refuse older generations, and other pipelines of the same name, from now on."""
        with shop(self.path) as db:
            fence.refuse_if_replaced_by(claimed(db, fence.owner))
            row = [fence.owner, fence.generation, fence.life]
            db.execute("insert or replace into owners values (?, ?, ?)", row)

    def claimed(self, owner: str) -> hg.Fence | None:
        """Return who owns what was counted."""
        with shop(self.path, "deferred") as db:
            return claimed(db, owner)

    def all_claimed(self) -> Iterable[hg.Fence]:
        """Return who owns all that was counted here."""
        with shop(self.path, "deferred") as db:
            return [hg.Fence(*row) for row in db.execute("select owner, generation, life from owners")]

    def publish(self, outputs: Sequence[hg.LedgerOutput], fence: hg.Fence) -> None:
        """Write what was counted and the names, or nothing."""
        with shop(self.path) as db:
            claim(db, fence.owner, fence.generation)
            for output in outputs:
                if db.execute("insert or ignore into ledger values (?)", [output.name]).rowcount:
                    for batch in output:
                        rows = [(output.checkpoint, row["article"], row["quantity"]) for row in batch.to_pylist()]
                        db.executemany("insert into counted values (?, ?, ?)", rows)


def audit(path: str) -> dict[int, int]:
    """Return, by checkpoint, how many pieces are missing or too many; all of them must be 0."""
    with shop(path, "deferred") as db:
        wanted = "select checkpoint, article, left from stocktakings where is_completed"
        sums = "select coalesce(sum(quantity), 0) from counted where checkpoint <= ? and article = ?"
        found: dict[int, int] = {}
        for checkpoint, article, left in db.execute(wanted).fetchall():
            (counted,) = db.execute(sums, [checkpoint, article]).fetchone()
            found[checkpoint] = found.get(checkpoint, 0) + abs(AT_FIRST - left - counted)
    return found


def pipeline(path: str | None = None) -> hg.Pipeline:
    """Return the pipeline; ``headgate run`` calls this."""
    where = str(Path(path or (sys.argv[1] if len(sys.argv) > 1 else "shop.db")).absolute())
    open_shop(where)
    p = hg.Pipeline("shop-audit", checkpointing=hg.Checkpointing(interval="1s"))
    p.source(Sales(where), name="sales").rebalance().sink(Counted(where), name="counted")
    return p


def main(command: str, path: str) -> None:
    """Sell for some seconds, or compare."""
    if command == "audit":
        for checkpoint, pieces in sorted(audit(path).items()):
            print(f"checkpoint {checkpoint}: {pieces} pieces of difference")
        return
    open_shop(path)
    for second in range(100):
        sell(path, 20, second)
        time.sleep(0.1)
    close_shop(path)


if __name__ == "__main__":
    main(*sys.argv[1:])
