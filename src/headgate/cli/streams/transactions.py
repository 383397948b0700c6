"""``headgate streams transactions``: list open and prepared transactions, and commit or abort them by hand.

Never decides for a pipeline.
"""

from __future__ import annotations

import json
from typing import Annotated

import typer
from rich.table import Table

from headgate.cli.output import Terminal, duration_text, say, size_text, time_text
from headgate.cli.streams.common import JsonOption, Name, StoreOption, YesOption, confirm, open_store, print_result
from headgate.environment import SYSTEM_CLOCK
from headgate.errors import UsageError
from headgate.protocol.store.transactions import Status
from headgate.spark.stream_options import is_spark_owner
from headgate.store.catalogue.records import TransactionInfo
from headgate.store.store import Store

app = typer.Typer(help="Transactions of a stream: what is open, prepared or decided.", no_args_is_help=True)

Id = Annotated[str, typer.Argument(help="Id of the transaction, as 'list' shows it; its beginning will do.")]


@app.command("list")
def list_(
    name: Annotated[str | None, typer.Argument(help="Only of this stream.")] = None,
    owner: Annotated[str | None, typer.Option("--owner", help="Only what this owner began.")] = None,
    all_: Annotated[bool, typer.Option("--all", help="Also what is committed or aborted.")] = False,
    as_json: JsonOption = False,
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
def show(name: Name, transaction: Id, as_json: JsonOption = False, store: StoreOption = None) -> None:
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
    name: Name, transaction: Id, yes: YesOption = False, as_json: JsonOption = False, store: StoreOption = None
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
    name: Name, transaction: Id, yes: YesOption = False, as_json: JsonOption = False, store: StoreOption = None
) -> None:
    """Drop the events of an open or prepared transaction. Its writers get an error."""
    with open_store(store) as opened_store:
        info = _mine_to_decide(opened_store, name, transaction)
        confirm(f"Drop {info.events_count:,} events of {info.name} for good?", yes=yes, as_json=as_json)
        opened_store.transactions.abort(name, info.name, owner=info.owner, epoch=_epoch(opened_store, info))
        told = f"transaction {info.name} is aborted"
        print_result(told, {"stream": name, "id": info.name, "events": info.events_count}, as_json=as_json)


@app.command("expire")
def expire(name: Name, as_json: JsonOption = False, store: StoreOption = None) -> None:
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
