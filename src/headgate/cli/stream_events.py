"""``headgate streams write``, ``read``, ``tail``, ``copy`` and ``transactions``.

Events of a stream as lines of text.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from datetime import datetime
from enum import StrEnum
from pathlib import Path
from types import FrameType
from typing import IO, Annotated

import pyarrow as pa
import typer
from rich.table import Table

from headgate.cli.line_format import Format, batch_of_json, batch_of_lines, is_json, line_blocks, text_lines
from headgate.cli.options import CheckpointDirOption, MasterOption, ParallelismOption, QuietOption, check_pipeline_name
from headgate.cli.output import (
    ProgressBar,
    Terminal,
    duration_text,
    progress_bar,
    say,
    size_text,
    time_text,
    write_lines,
)
from headgate.cli.store import (
    ELSEWHERE,
    JsonLinesOption,
    Name,
    StoreOption,
    YesOption,
    confirm,
    open_store,
    print_result,
    refuse,
)
from headgate.environment import SYSTEM_CLOCK
from headgate.errors import HeadgateError, UsageError
from headgate.protocol.store.transactions import Status
from headgate.spark.stream_options import is_spark_owner
from headgate.store.catalogue.records import TransactionInfo
from headgate.store.follower import EARLIEST, LATEST, StreamFollower
from headgate.store.location import store_root
from headgate.store.store import Store
from headgate.store.streams import TEXT_SCHEMA, StreamCut
from headgate.store.transactions import SharedTransaction
from headgate.store.writer import StreamWriter

LINES_AT_A_TIME = 8_192
LISTENS_AGAIN = "1s"
"""Between two looks whether there was a Ctrl-C."""

Follow = Annotated[
    bool, typer.Option("--follow", "-f", help="Wait for new events until the stream is sealed; Ctrl-C ends it.")
]
Key = Annotated[str | None, typer.Option("--key", help="Only events with this value of the routing key.")]
FormatOption = Annotated[Format, typer.Option("--format", help="How to print events.")]
EventsJsonOption = Annotated[
    bool, typer.Option("--json", help="Print one JSON object per event, whatever the columns are.")
]


class Start(StrEnum):
    """Where reading begins."""

    EARLIEST = EARLIEST
    LATEST = LATEST


def read(
    name: Name,
    follow: Follow = False,
    limit: Annotated[int | None, typer.Option("--limit", "-n", help="Stop after this many events.")] = None,
    start: Annotated[Start, typer.Option("--start", help="Where to begin.")] = Start.EARLIEST,
    at: Annotated[
        datetime | None, typer.Option("--at", help="Begin with events that became visible at this local time or later.")
    ] = None,
    cut: Annotated[str | None, typer.Option("--cut", help="Begin at this cut, from 'headgate streams cut'.")] = None,
    until: Annotated[str | None, typer.Option("--end", help="End at this cut.")] = None,
    key: Key = None,
    format_: FormatOption = Format.AUTO,
    as_json: EventsJsonOption = False,
    store: StoreOption = None,
) -> None:
    """Print the events of a stream. Events of a routing key stay in order, even while the stream is scaled."""
    with open_store(store) as opened_store:
        if (at is not None) + (cut is not None) + (start is not Start.EARLIEST) > 1:
            raise UsageError("say where to begin once: --start, --at or --cut")
        if follow and until is not None:
            raise UsageError("--end says where to end, so it does not go with --follow")
        begin = at or (StreamCut.parse(cut) if cut is not None else start.value)
        end = LATEST if until is None else StreamCut.parse(until)
        follower = opened_store.follow(name, start=begin, end=None if follow else end, key=key)
        _print(follower, limit=limit, follow=follow, as_json=is_json(format_, follower.stream, as_json=as_json))


def tail(
    name: Name,
    follow: Follow = False,
    count: Annotated[int, typer.Option("--lines", "-n", min=0, help="How many events of each segment.")] = 10,
    key: Key = None,
    format_: FormatOption = Format.AUTO,
    as_json: EventsJsonOption = False,
    store: StoreOption = None,
) -> None:
    """Print the last events of each segment of a stream, and with -f all new events."""
    with open_store(store) as opened_store:
        begin = _last(opened_store, name, count)
        follower = opened_store.follow(name, start=begin, end=None if follow else LATEST, key=key)
        _print(follower, limit=None, follow=follow, as_json=is_json(format_, follower.stream, as_json=as_json))


def _last(store: Store, name: str, count: int) -> StreamCut:
    """Return the cut in front of the last events of the segments that take events."""
    stream = store.find(name)
    layout, extents = store.pipelines.layout_and_extents(stream)
    present = {segment.segment_id for segment in layout.present}
    begins = {
        number: max(extent.head, extent.end - count) if number in present else extent.end
        for number, extent in extents.items()
    }
    return StreamCut(stream.name, stream.stream_id, begins)


def _print(follower: StreamFollower, *, limit: int | None, follow: bool, as_json: bool) -> None:
    left = sys.maxsize if limit is None else limit
    with _ending_quietly(follow) as was_interrupted:
        while left > 0 and not follower.has_ended:
            found = follower.read(min(left, LINES_AT_A_TIME), timeout=LISTENS_AGAIN if follow else 0)
            if was_interrupted():
                raise KeyboardInterrupt
            if found is None:
                if not follow:
                    break
                continue
            left -= found.batch.num_rows
            write_lines(text_lines(found.batch, as_json=as_json))
            if follow:
                sys.stdout.flush()
        sys.stdout.flush()


@contextlib.contextmanager
def _ending_quietly(follow: bool) -> Iterator[Callable[[], bool]]:
    """End without an error after Ctrl-C, or when the reader of the output has gone.

    Yields whether there was a Ctrl-C: its exception is lost if it comes where Python or a library ignores exceptions,
    as in a finaliser, and SQLite makes another one of it in a callback.
    """
    interrupts: list[int] = []

    def interrupt(number: int, frame: FrameType | None) -> None:
        interrupts.append(number)
        raise KeyboardInterrupt

    is_ours = follow and threading.current_thread() is threading.main_thread()
    former = signal.signal(signal.SIGINT, interrupt) if is_ours else None
    try:
        yield lambda: bool(interrupts)
    except KeyboardInterrupt:
        if not follow:
            raise
        raise typer.Exit(0) from None
    except HeadgateError:
        if not interrupts:
            raise
        raise typer.Exit(0) from None
    except BrokenPipeError:
        with contextlib.suppress(OSError, ValueError):  # what is still to be written at the end has nowhere to go
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise typer.Exit(0) from None
    finally:
        if former is not None:
            signal.signal(signal.SIGINT, former)


def write(
    name: Name,
    files: Annotated[list[Path] | None, typer.Argument(help="Files; default: standard input.")] = None,
    format_: Annotated[Format, typer.Option("--format", help="What the input is.")] = Format.AUTO,
    create_: Annotated[bool, typer.Option("--create", help="Create a text stream when missing.")] = False,
    writer_id: Annotated[
        str,
        typer.Option(
            "--writer-id", help="Number the events: the same command with the same input writes only what is new."
        ),
    ] = "",
    as_json: JsonLinesOption = False,
    store: StoreOption = None,
) -> None:
    """Append the lines of files or of standard input. They are durable when the command says so.

    Equal routing keys stay in order. Without a routing key, only streams with one segment keep the order of lines. If a
    command with --writer-id was interrupted, repeat it with the whole input, which may have grown by whole lines: it
    writes only what is missing. Each input needs its own writer id.
    """
    with open_store(store, makes=create_) as opened_store:
        if create_:
            opened_store.create_stream(name, TEXT_SCHEMA, if_not_exists=True)
        info = opened_store.find(name)
        batch_of = batch_of_json if is_json(format_, info) else batch_of_lines
        writer = opened_store.writer(name, writer_id=writer_id, linger=None)
        there = writer.next_sequence - 1
        with writer, progress_bar(f"writing {name}", sum(map(_file_bytes, files or []))) as shown:
            count = 0
            for batch in _batches(files, lambda block: batch_of(block, info.schema), shown):
                new = batch.slice(max(0, there - count))
                _append(writer, new, is_numbered=bool(writer_id))
                if not files:
                    writer.flush()  # a pipe may be slow: do not keep its lines waiting
                count += batch.num_rows
        skipped = min(there, count)
        if as_json:
            typer.echo(json.dumps({"stream": name, "events": count - skipped, "already_there": skipped}))
            return
        again = f", {skipped:,} were there already" if skipped else ""
        say(f"{count - skipped:,} events written to {name}{again}", err=True)


def _append(writer: StreamWriter, batch: pa.RecordBatch, *, is_numbered: bool) -> None:
    """Append events; numbered ones one by one, because their number must not depend on how the input is cut up."""
    if not is_numbered:
        writer.append(batch)
        return
    for at in range(batch.num_rows):
        writer.append(batch.slice(at, 1))


def _batches(
    files: list[Path] | None, batch_of: Callable[[bytes], pa.RecordBatch], shown: ProgressBar
) -> Iterator[pa.RecordBatch]:
    for file in _inputs(files):
        with file:
            for block in line_blocks(file):
                yield batch_of(block)
                shown.advance(len(block))


def _inputs(files: list[Path] | None) -> Iterator[IO[bytes]]:
    if not files:
        yield sys.stdin.buffer
        return
    for path in files:
        try:
            file = path.open("rb")
        except OSError as error:
            raise UsageError(f"{path} cannot be read: {error.strerror}") from error
        yield file


def _file_bytes(path: Path) -> int:
    """Return the size of a file, 0 if it is none or has gone: reading it says so."""
    try:
        return path.stat().st_size if path.is_file() else 0
    except OSError:
        return 0


Copied = Annotated[
    str, typer.Argument(metavar="FROM", help="The stream to copy, or kafka:TOPIC, or pravega:SCOPE/STREAM.")
]
Target = Annotated[
    str,
    typer.Argument(
        metavar="TO",
        help="The stream to copy to, which is created if it does not exist, or kafka:TOPIC, or pravega:SCOPE/STREAM.",
    ),
]


def copy(
    name: Copied,
    target: Target,
    to_store: Annotated[
        str | None, typer.Option("--to-store", help="The store of TARGET, if it is another one; created if missing.")
    ] = None,
    cut: Annotated[
        str | None, typer.Option("--cut", help="Begin at this cut, for example the one of an earlier copy.")
    ] = None,
    until: Annotated[str | None, typer.Option("--end", help="End at this cut, instead of the present end.")] = None,
    key: Annotated[str | None, typer.Option("--key", help="Only events with this value of the routing key.")] = None,
    brokers: Annotated[str, typer.Option("--brokers", help="Brokers of Kafka, as HOST:PORT,…")] = "",
    security: Annotated[
        Path | None,
        typer.Option(
            "--kafka-security",
            envvar="HEADGATE_KAFKA_SECURITY",
            help="TOML file with the attributes of hg.KafkaSecurity, such as tls = true.",
        ),
    ] = None,
    partitions: Annotated[
        int, typer.Option("--partitions", min=0, help="Create a missing topic with so many partitions.")
    ] = 0,
    controller: Annotated[str, typer.Option("--controller", help="The controller of Pravega, as HOST:PORT.")] = "",
    segments: Annotated[
        int, typer.Option("--segments", min=0, help="Create a missing stream of Pravega with so many segments.")
    ] = 0,
    copy_name: Annotated[
        str,
        typer.Option("--name", help="Of the copy to or from Kafka or Pravega; another name begins at the beginning."),
    ] = "",
    checkpoint_dir: CheckpointDirOption = None,
    master: MasterOption = None,
    parallelism: ParallelismOption = None,
    quiet: QuietOption = False,
    as_json: JsonLinesOption = False,
    store: StoreOption = None,
) -> None:
    """Copy the events of a stream into another one, or between a stream and a topic of Kafka or a stream of Pravega.

    Events of a routing key stay in order. From stream to stream all of them become visible at once, or none. The
    command prints the cut at which it ended; with --cut the next copy begins there.

    A copy to or from Kafka or Pravega is a pipeline with checkpoints of its own, which ends when it has copied
    everything that was there when it began. The same command again copies what came since, each record once, also
    after it was interrupted or killed.
    """
    if name.startswith(ELSEWHERE) or target.startswith(ELSEWHERE):
        from headgate.cli import stream_copy

        own = {"--to-store": to_store, "--cut": cut, "--end": until, "--key": key}
        refuse(own, "for copies from stream to stream")
        made = stream_copy.copy_with(
            name,
            target,
            store_root(store),
            check_pipeline_name(copy_name or None) or "",
            brokers=brokers,
            security=security,
            partitions=partitions,
            controller=controller,
            segments=segments,
        )
        stream_copy.run(made, checkpoint_dir, master, parallelism, quiet=quiet, as_json=as_json)
        return
    refuse(
        {
            "--brokers": brokers,
            "--partitions": partitions,
            "--controller": controller,
            "--segments": segments,
            "--name": copy_name,
            "--dir": checkpoint_dir,
            "--parallelism": parallelism,
        },
        "for copies to or from Kafka or Pravega; name a topic as kafka:TOPIC, a stream of Pravega as "
        "pravega:SCOPE/STREAM",
    )
    with open_store(store) as source, open_store(store if to_store is None else to_store, makes=True) as other:
        if (source.root, name) == (other.root, target):
            raise UsageError(f"stream '{name}' is not copied into itself; name another one")
        info = source.describe(name)
        begin = EARLIEST if cut is None else StreamCut.parse(cut)
        end = LATEST if until is None else StreamCut.parse(until)
        follower = source.follow(name, start=begin, end=end, key=key)
        columns, segments = follower.stream.schema, info.segments_count
        other.create_stream(target, columns, segments=segments, routing_key=info.routing_key, if_not_exists=True)
        transaction = other.begin_shared(target)
        try:
            with progress_bar(f"copying {name}", info.size_bytes) as shown:
                count = _write(follower, transaction, shown)
            transaction.commit()
        except BaseException:
            with contextlib.suppress(HeadgateError):
                transaction.abort()
            raise
        ended = str(follower.cut())
        told = f"{count:,} events of {name} copied to {target}, up to {ended}"
        print_result(told, {"stream": name, "target": target, "events": count, "cut": ended}, as_json=as_json)


def _write(follower: StreamFollower, transaction: SharedTransaction, shown: ProgressBar) -> int:
    """Write what is read into the transaction; return how many events."""
    count = 0
    with transaction.writer("copy") as writer:
        for found in follower:
            writer.write(found.batch)
            count += found.batch.num_rows
            shown.advance(found.batch.nbytes)
    return count


app = typer.Typer(help="Transactions of a stream: what is open, prepared or decided.", no_args_is_help=True)

Id = Annotated[str, typer.Argument(help="Id of the transaction, as 'list' shows it; its beginning will do.")]


@app.command("list")
def list_(
    name: Annotated[str | None, typer.Argument(help="Only of this stream.")] = None,
    owner: Annotated[str | None, typer.Option("--owner", help="Only what this owner began.")] = None,
    all_: Annotated[bool, typer.Option("--all", help="Also what is committed or aborted.")] = False,
    as_json: JsonLinesOption = False,
    store: StoreOption = None,
) -> None:
    """List transactions that are open or prepared. One that a single process has open leaves no trace."""
    with open_store(store) as opened_store:
        if name is not None:
            opened_store.find(name)
        found = opened_store.list_transactions(owner=owner, stream=name)
        found = [info for info in found if all_ or not info.status.is_terminal]
        now_ms = SYSTEM_CLOCK.wall_ms()
        if as_json:
            for info in found:
                typer.echo(json.dumps(_facts(info, now_ms)))
            return
        if not found:
            say("no transactions" if all_ else "no open or prepared transactions")
            return
        table = Table("stream", "transaction", "state", "events", "size", "writers", "age", "lease left")
        for info in found:
            table.add_row(
                *(info.stream, info.name, _state(info), f"{info.events_count:,}", size_text(info.size_bytes)),
                str(len(info.participants) or ""),
                duration_text(_age_ms(info, now_ms)),
                _lease_left(info, now_ms),
            )
        Terminal().print(table)


@app.command("show")
def show(name: Name, transaction: Id, as_json: JsonLinesOption = False, store: StoreOption = None) -> None:
    """Show one transaction, and who writes to it."""
    with open_store(store) as opened_store:
        info, now_ms = _found(opened_store, name, transaction), SYSTEM_CLOCK.wall_ms()
        if as_json:
            typer.echo(json.dumps(_facts(info, now_ms)))
            return
        begun_ms = info.changed_ms if info.begun_ms is None else info.begun_ms
        facts = {
            "transaction": info.name,
            "owner": f"{info.owner}, epoch {info.epoch}",
            "state": f"{_state(info)} since {time_text(info.changed_ms)} UTC",
            "begun" if info.begun_ms is not None else "prepared": f"{time_text(begun_ms)} UTC",
            "events": f"{info.events_count:,}, {size_text(info.size_bytes)}",
            "lease left": _lease_left(info, now_ms),
        }
        table = Table(show_header=False, box=None)
        for label, value in facts.items():
            if value:
                table.add_row(label, value)
        console = Terminal()
        console.print(table)
        if info.participants:
            writers = Table("writer", "writes", "events")
            for who in info.participants:
                writers.add_row(who.name, f"{who.sequence:,}", f"{who.events_count:,}")
            console.print(writers)


@app.command("commit")
def commit(
    name: Name, transaction: Id, yes: YesOption = False, as_json: JsonLinesOption = False, store: StoreOption = None
) -> None:
    """Make the events of a prepared transaction visible, if its owner will not come back to decide it."""
    with open_store(store) as opened_store:
        info = _mine_to_decide(opened_store, name, transaction)
        if info.status is Status.OPEN:
            raise UsageError(
                f"transaction '{info.name}' of stream '{name}' is not prepared: processes may be writing to it; "
                "the program that knows when they are done commits it, or abort it"
            )
        if is_spark_owner(info.owner):
            raise UsageError(
                f"transaction '{info.name}' has the rows of one task of a Spark job, which commits those of all its "
                "tasks in one step; abort it if the job will not come back"
            )
        confirm(f"Make {info.events_count:,} events of {info.name} visible in {name}?", yes=yes, as_json=as_json)
        epoch = _epoch(opened_store, info)
        opened_store.commit_transactions([(name, info.name)], owner=info.owner, epoch=epoch)
        told = f"transaction {info.name} is committed: {info.events_count:,} events of {name}"
        print_result(told, {"stream": name, "id": info.name, "events": info.events_count}, as_json=as_json)


@app.command("abort")
def abort(
    name: Name, transaction: Id, yes: YesOption = False, as_json: JsonLinesOption = False, store: StoreOption = None
) -> None:
    """Drop the events of an open or prepared transaction. Its writers get an error."""
    with open_store(store) as opened_store:
        info = _mine_to_decide(opened_store, name, transaction)
        confirm(f"Drop {info.events_count:,} events of {info.name} for good?", yes=yes, as_json=as_json)
        opened_store.transactions.abort(name, info.name, owner=info.owner, epoch=_epoch(opened_store, info))
        told = f"transaction {info.name} is aborted"
        print_result(told, {"stream": name, "id": info.name, "events": info.events_count}, as_json=as_json)


@app.command("expire")
def expire(name: Name, as_json: JsonLinesOption = False, store: StoreOption = None) -> None:
    """Abort open transactions whose lease has expired. Processes that write to the stream do this themselves.

    Run it twice, half a lease apart: the first run only takes notes, so that no live transaction is aborted.
    """
    with open_store(store) as opened_store:
        gone = opened_store.expire_transactions(name)
        now_ms = SYSTEM_CLOCK.wall_ms()
        left = [info for info in opened_store.list_transactions(stream=name) if _is_overdue(info, now_ms)]
        told = [f"transaction {transaction} is aborted: its lease was over" for transaction in gone]
        for info in left:
            later = duration_text((info.lease_ms or 0) // 2)
            told.append(
                f"the lease of transaction {info.name} is over: a look in {later} aborts it, if it stays silent"
            )
        facts = {"stream": name, "aborted": gone, "overdue": [info.name for info in left]}
        print_result("\n".join(told) or f"no lease of stream {name} is over", facts, as_json=as_json)


def _found(store: Store, stream: str, name: str) -> TransactionInfo:
    """Return the transaction of this id, or the only one whose id begins so."""
    store.find(stream)
    found = store.list_transactions(stream=stream, prefix=name)
    exact = [info for info in found if info.name == name] or found
    if len(exact) == 1:
        return exact[0]
    if exact:
        raise UsageError(f"{len(exact)} transactions of stream '{stream}' begin with '{name}'; give more of the id")
    raise UsageError(
        f"stream '{stream}' knows no transaction '{name}': it was never begun there, or it was decided so long ago "
        "that its outcome is forgotten"
    )


def _mine_to_decide(store: Store, stream: str, name: str) -> TransactionInfo:
    """Return a transaction that may be decided by hand."""
    info = _found(store, stream, name)
    if store.pipelines.owner(info.owner).life is not None:
        raise UsageError(
            f"transaction '{info.name}' belongs to '{info.owner}', a pipeline, which decides by itself when it is "
            "started; one that never comes back is given up with: "
            f"headgate streams forget {info.owner} --abort-prepared"
        )
    return info


def _epoch(store: Store, info: TransactionInfo) -> int:
    """Return an epoch of its owner that is not fenced."""
    return max(info.epoch, store.pipelines.owner(info.owner).generation)


def _facts(info: TransactionInfo, now_ms: int) -> dict[str, object]:
    return {
        "stream": info.stream,
        "id": info.name,
        "owner": info.owner,
        "epoch": info.epoch,
        "state": info.status.value,
        "is_expired": info.is_expired,
        "events": info.events_count,
        "size_bytes": info.size_bytes,
        "begun_ms": info.begun_ms,
        "changed_ms": info.changed_ms,
        "age_ms": _age_ms(info, now_ms),
        "lease_ms": info.lease_ms,
        "lease_left_ms": None if info.due_ms is None else info.due_ms - now_ms,
        "participants": [
            {"name": who.name, "writes": who.sequence, "events": who.events_count} for who in info.participants
        ],
    }


def _state(info: TransactionInfo) -> str:
    return "aborted, its lease was over" if info.is_expired else info.status.value


def _age_ms(info: TransactionInfo, now_ms: int) -> int:
    """Return the time since it was begun, or, of one that a single process wrote, since its state changed."""
    return max(0, now_ms - (info.changed_ms if info.begun_ms is None else info.begun_ms))


def _is_overdue(info: TransactionInfo, now_ms: int) -> bool:
    return info.due_ms is not None and info.due_ms <= now_ms


def _lease_left(info: TransactionInfo, now_ms: int) -> str:
    if info.due_ms is None:
        return ""
    return "over" if _is_overdue(info, now_ms) else duration_text(info.due_ms - now_ms)
