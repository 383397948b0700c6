"""Headgate: exactly-once stream processing for Python, on Apache Spark.

Names are imported when they are first used, so that ``import headgate`` needs neither Spark nor Arrow.
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

from headgate.errors import (
    BadRecord,
    CorruptionError,
    FencedError,
    HeadgateError,
    PipelineFailed,
    ProtocolViolation,
    StorageError,
    TruncatedError,
    UsageError,
)
from headgate.user_line import render_traceback

HeadgateError._render_traceback_ = property(render_traceback)

if TYPE_CHECKING:
    from headgate.api.aio.groups import AsyncReaderGroup
    from headgate.api.aio.reading import AsyncGroupReader, AsyncStreamFollower
    from headgate.api.aio.store import AsyncStore
    from headgate.api.aio.writing import AsyncSharedTransaction, AsyncStreamWriter, AsyncTransactionWriter
    from headgate.api.config import (
        Checkpointing,
        DeadLetter,
        ExponentialDelay,
        Fail,
        FailureRate,
        FixedDelay,
        NoRestart,
    )
    from headgate.api.connected import ConnectedStreams
    from headgate.api.dataframes import DataFrameSource
    from headgate.api.pipeline import Pipeline
    from headgate.api.security import Security
    from headgate.api.state import Memory, RocksDB
    from headgate.api.stored_state import read_state, read_state_batches, state_catalog
    from headgate.api.stream import KeyedStream, Stream, WindowedStream
    from headgate.api.windows import Session, Sliding, Tumbling
    from headgate.api.written_state import (
        EditedSavepoint,
        NewSavepoint,
        WrittenSavepoint,
        edit_savepoint,
        new_savepoint,
    )
    from headgate.connectors.custom.fence import Fence
    from headgate.connectors.custom.ledger import LedgerSink, output_checkpoint
    from headgate.connectors.custom.output import LedgerOutput
    from headgate.connectors.custom.two_phase import TwoPhaseSink
    from headgate.connectors.files.parquet import ParquetFiles
    from headgate.connectors.files.sink import FileSink
    from headgate.connectors.files.source import JsonLines, TextFiles
    from headgate.connectors.generator import Choice, Generator, RowNumber, Uniform
    from headgate.connectors.hooks import ASK_AGAIN, CoordinatorHook, HookContext
    from headgate.connectors.memory import Discard, FromRows, Print
    from headgate.connectors.streams import GroupSource, StreamSink, StreamSource
    from headgate.model.progress import PipelineHandle, PipelineState, Progress, RunResult
    from headgate.operators.checkpointed.functions import (
        CheckpointedFunction,
        CheckpointListener,
        RestoreContext,
        SnapshotContext,
    )
    from headgate.operators.checkpointed.lists import OperatorList, UnionList
    from headgate.operators.checkpointed.publishing import PublishOnCheckpoint
    from headgate.operators.process.batch_aggregating import BatchAggregateFunction, BatchAggregatingState
    from headgate.operators.process.batch_reducing import BatchReducingState, BatchStateHandle
    from headgate.operators.process.batch_states import BatchListState, BatchMapState, BatchValueState, Keys
    from headgate.operators.process.batch_timers import BatchTimers, FiredTimers
    from headgate.operators.process.broadcast_states import BatchBroadcastState, BroadcastState
    from headgate.operators.process.broadcasting import (
        BatchBroadcastProcessFunction,
        BroadcastContext,
        BroadcastProcessFunction,
    )
    from headgate.operators.process.by_batch import BatchContext, BatchProcessFunction
    from headgate.operators.process.combining import AggregateFunction, AggregatingState, ReducingState
    from headgate.operators.process.functions import ProcessContext, ProcessFunction, StateHandle
    from headgate.operators.process.keyed_states import ListState, MapState, ValueState
    from headgate.operators.process.timers import Timer, Timers
    from headgate.spark.state_source import register_state_source
    from headgate.spark.stream_format import register_streams
    from headgate.state.evolution import Evolution
    from headgate.state.ttl import TTL
    from headgate.store.cuts import StreamCut
    from headgate.store.following import StreamEvents, StreamFollower
    from headgate.store.group_reader import CheckpointMarker, GroupEvents, GroupReader
    from headgate.store.reader_groups import ReaderGroup
    from headgate.store.retention import Retention
    from headgate.store.scaling import Scaling
    from headgate.store.shared_transaction import SharedTransaction
    from headgate.store.store import Store
    from headgate.store.transaction_writer import TransactionWriter

__version__ = "0.1.0"

_HOMES = {
    "headgate.api.aio.groups": ("AsyncReaderGroup",),
    "headgate.api.aio.reading": ("AsyncGroupReader", "AsyncStreamFollower"),
    "headgate.api.aio.store": ("AsyncStore",),
    "headgate.api.aio.writing": ("AsyncSharedTransaction", "AsyncStreamWriter", "AsyncTransactionWriter"),
    "headgate.api.config": (
        "Checkpointing",
        "DeadLetter",
        "ExponentialDelay",
        "Fail",
        "FailureRate",
        "FixedDelay",
        "NoRestart",
    ),
    "headgate.api.connected": ("ConnectedStreams",),
    "headgate.api.dataframes": ("DataFrameSource",),
    "headgate.api.pipeline": ("Pipeline",),
    "headgate.api.security": ("Security",),
    "headgate.api.state": ("Memory", "RocksDB"),
    "headgate.api.stored_state": ("read_state", "read_state_batches", "state_catalog"),
    "headgate.api.stream": ("KeyedStream", "Stream", "WindowedStream"),
    "headgate.api.windows": ("Session", "Sliding", "Tumbling"),
    "headgate.api.written_state": (
        "EditedSavepoint",
        "NewSavepoint",
        "WrittenSavepoint",
        "edit_savepoint",
        "new_savepoint",
    ),
    "headgate.connectors.files.source": ("JsonLines", "TextFiles"),
    "headgate.connectors.custom.fence": ("Fence",),
    "headgate.connectors.custom.ledger": ("LedgerSink", "output_checkpoint"),
    "headgate.connectors.custom.output": ("LedgerOutput",),
    "headgate.connectors.custom.two_phase": ("TwoPhaseSink",),
    "headgate.connectors.files.sink": ("FileSink",),
    "headgate.connectors.generator": ("Choice", "Generator", "RowNumber", "Uniform"),
    "headgate.connectors.hooks": ("ASK_AGAIN", "CoordinatorHook", "HookContext"),
    "headgate.connectors.memory": ("Discard", "FromRows", "Print"),
    "headgate.connectors.files.parquet": ("ParquetFiles",),
    "headgate.connectors.streams": ("GroupSource", "StreamSink", "StreamSource"),
    "headgate.model.progress": ("PipelineHandle", "PipelineState", "Progress", "RunResult"),
    "headgate.operators.checkpointed.functions": (
        "CheckpointListener",
        "CheckpointedFunction",
        "RestoreContext",
        "SnapshotContext",
    ),
    "headgate.operators.checkpointed.lists": ("OperatorList", "UnionList"),
    "headgate.operators.checkpointed.publishing": ("PublishOnCheckpoint",),
    "headgate.operators.process.batch_aggregating": ("BatchAggregateFunction", "BatchAggregatingState"),
    "headgate.operators.process.batch_reducing": ("BatchReducingState", "BatchStateHandle"),
    "headgate.operators.process.batch_states": ("BatchListState", "BatchMapState", "BatchValueState", "Keys"),
    "headgate.operators.process.batch_timers": ("BatchTimers", "FiredTimers"),
    "headgate.operators.process.by_batch": ("BatchContext", "BatchProcessFunction"),
    "headgate.operators.process.combining": ("AggregateFunction", "AggregatingState", "ReducingState"),
    "headgate.operators.process.functions": ("ProcessContext", "ProcessFunction", "StateHandle"),
    "headgate.operators.process.keyed_states": ("ListState", "MapState", "ValueState"),
    "headgate.operators.process.broadcast_states": ("BatchBroadcastState", "BroadcastState"),
    "headgate.operators.process.broadcasting": (
        "BatchBroadcastProcessFunction",
        "BroadcastContext",
        "BroadcastProcessFunction",
    ),
    "headgate.operators.process.timers": ("Timer", "Timers"),
    "headgate.spark.state_source": ("register_state_source",),
    "headgate.spark.stream_format": ("register_streams",),
    "headgate.state.evolution": ("Evolution",),
    "headgate.state.ttl": ("TTL",),
    "headgate.store.cuts": ("StreamCut",),
    "headgate.store.following": ("StreamEvents", "StreamFollower"),
    "headgate.store.group_reader": ("CheckpointMarker", "GroupEvents", "GroupReader"),
    "headgate.store.reader_groups": ("ReaderGroup",),
    "headgate.store.retention": ("Retention",),
    "headgate.store.scaling": ("Scaling",),
    "headgate.store.shared_transaction": ("SharedTransaction",),
    "headgate.store.store": ("Store",),
    "headgate.store.transaction_writer": ("TransactionWriter",),
}
_FOR_EACH_RECORD = "headgate.operators."
"""What users' functions call in the workers, for each record."""

_CHECKED: set[str] = set()
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}

__all__ = [
    "ASK_AGAIN",
    "TTL",
    "AggregateFunction",
    "AggregatingState",
    "AsyncGroupReader",
    "AsyncReaderGroup",
    "AsyncSharedTransaction",
    "AsyncStore",
    "AsyncStreamFollower",
    "AsyncStreamWriter",
    "AsyncTransactionWriter",
    "BadRecord",
    "BatchAggregateFunction",
    "BatchAggregatingState",
    "BatchBroadcastProcessFunction",
    "BatchBroadcastState",
    "BatchContext",
    "BatchListState",
    "BatchMapState",
    "BatchProcessFunction",
    "BatchReducingState",
    "BatchStateHandle",
    "BatchTimers",
    "BatchValueState",
    "BroadcastContext",
    "BroadcastProcessFunction",
    "BroadcastState",
    "CheckpointListener",
    "CheckpointMarker",
    "CheckpointedFunction",
    "Checkpointing",
    "Choice",
    "ConnectedStreams",
    "CoordinatorHook",
    "CorruptionError",
    "DataFrameSource",
    "DeadLetter",
    "Discard",
    "EditedSavepoint",
    "Evolution",
    "ExponentialDelay",
    "Fail",
    "FailureRate",
    "Fence",
    "FencedError",
    "FileSink",
    "FiredTimers",
    "FixedDelay",
    "FromRows",
    "Generator",
    "GroupEvents",
    "GroupReader",
    "GroupSource",
    "HeadgateError",
    "HookContext",
    "JsonLines",
    "KeyedStream",
    "Keys",
    "LedgerOutput",
    "LedgerSink",
    "ListState",
    "MapState",
    "Memory",
    "NewSavepoint",
    "NoRestart",
    "OperatorList",
    "ParquetFiles",
    "Pipeline",
    "PipelineFailed",
    "PipelineHandle",
    "PipelineState",
    "Print",
    "ProcessContext",
    "ProcessFunction",
    "Progress",
    "ProtocolViolation",
    "PublishOnCheckpoint",
    "ReaderGroup",
    "ReducingState",
    "RestoreContext",
    "Retention",
    "RocksDB",
    "RowNumber",
    "RunResult",
    "Scaling",
    "Security",
    "Session",
    "SharedTransaction",
    "Sliding",
    "SnapshotContext",
    "StateHandle",
    "StorageError",
    "Store",
    "Stream",
    "StreamCut",
    "StreamEvents",
    "StreamFollower",
    "StreamSink",
    "StreamSource",
    "TextFiles",
    "Timer",
    "Timers",
    "TransactionWriter",
    "TruncatedError",
    "Tumbling",
    "TwoPhaseSink",
    "Uniform",
    "UnionList",
    "UsageError",
    "ValueState",
    "WindowedStream",
    "WrittenSavepoint",
    "__version__",
    "edit_savepoint",
    "new_savepoint",
    "output_checkpoint",
    "read_state",
    "read_state_batches",
    "register_state_source",
    "register_streams",
    "state_catalog",
]


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used."""
    module = _HOME_OF.get(name)
    if module is None:
        from headgate.api.not_yet import why_no_name

        raise AttributeError(f"headgate has no name '{name}'{why_no_name(name, __all__)}")
    value = getattr(importlib.import_module(module), name)
    _check_calls()
    globals()[name] = value = getattr(sys.modules[module], name)
    return value


def _check_calls() -> None:
    """Have all public names that are imported by now say in a sentence what is wrong with a call."""
    from headgate.call_errors import checked_call, checked_calls, hide_internals

    for module in [module for module in _HOMES if module in sys.modules and module not in _CHECKED]:
        _CHECKED.add(module)
        for name in _HOMES[module]:
            value = getattr(sys.modules[module], name)
            if not isinstance(value, type):
                if callable(value):
                    setattr(sys.modules[module], name, checked_call(value))
            elif module.startswith(_FOR_EACH_RECORD):
                hide_internals(value)
            else:
                checked_calls(value)


def __dir__() -> list[str]:
    return sorted(__all__)
