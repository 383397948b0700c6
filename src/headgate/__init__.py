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
from headgate.tracebacks import render_traceback

HeadgateError._render_traceback_ = property(render_traceback)

if TYPE_CHECKING:
    from headgate.api.async_readers import AsyncGroupReader, AsyncReaderGroup, AsyncStreamFollower
    from headgate.api.async_store import AsyncSharedTransaction, AsyncStore, AsyncStreamWriter, AsyncTransactionWriter
    from headgate.api.config import (
        Checkpointing,
        DeadLetter,
        ExponentialDelay,
        Fail,
        FailureRate,
        FixedDelay,
        Memory,
        NoRestart,
        RocksDB,
        Security,
    )
    from headgate.api.connected_streams import ConnectedStreams
    from headgate.api.dataframe_source import DataFrameSource
    from headgate.api.pipeline import Pipeline
    from headgate.api.savepoint_writer import (
        EditedSavepoint,
        NewSavepoint,
        WrittenSavepoint,
        edit_savepoint,
        new_savepoint,
    )
    from headgate.api.state_reader import read_state, read_state_batches, state_catalog
    from headgate.api.stream import KeyedStream, Session, Sliding, Stream, Tumbling, WindowedStream
    from headgate.connectors.fenced_sink import Fence
    from headgate.connectors.files.file_sink import FileSink
    from headgate.connectors.files.line_source import JsonLines, TextFiles
    from headgate.connectors.files.parquet import ParquetFiles
    from headgate.connectors.generator import Choice, Generator, RowNumber, Uniform
    from headgate.connectors.hooks import ASK_AGAIN, CoordinatorHook, HookContext
    from headgate.connectors.ledger_sink import LedgerOutput, LedgerSink, output_checkpoint
    from headgate.connectors.memory import Discard, FromRows, Print
    from headgate.connectors.streams import GroupSource, StreamSink, StreamSource
    from headgate.connectors.two_phase_sink import TwoPhaseSink
    from headgate.model.progress import PipelineHandle, PipelineState, Progress, RunResult
    from headgate.operators.checkpoint_listeners import (
        CheckpointedFunction,
        CheckpointListener,
        PublishOnCheckpoint,
        RestoreContext,
        SnapshotContext,
    )
    from headgate.operators.operator_state import OperatorList, UnionList
    from headgate.operators.process.batch_aggregation import (
        BatchAggregateFunction,
        BatchAggregatingState,
        BatchReducingState,
        BatchStateHandle,
    )
    from headgate.operators.process.batch_process import BatchContext, BatchProcessFunction, BatchTimers, FiredTimers
    from headgate.operators.process.batch_state import BatchListState, BatchMapState, BatchValueState, Keys
    from headgate.operators.process.broadcast_process import (
        BatchBroadcastProcessFunction,
        BroadcastContext,
        BroadcastProcessFunction,
    )
    from headgate.operators.process.broadcast_state import BatchBroadcastState, BroadcastState
    from headgate.operators.process.row_process import ProcessContext, ProcessFunction, StateHandle
    from headgate.operators.process.row_state import (
        AggregateFunction,
        AggregatingState,
        ListState,
        MapState,
        ReducingState,
        ValueState,
    )
    from headgate.operators.process.timers import Timer, Timers
    from headgate.spark.state_source import register_state_source
    from headgate.spark.stream_format import register_streams
    from headgate.state.evolution import Evolution
    from headgate.state.ttl import TTL
    from headgate.store.follower import StreamEvents, StreamFollower
    from headgate.store.group_reader import CheckpointMarker, GroupEvents, GroupReader
    from headgate.store.policies import Retention, Scaling
    from headgate.store.reader_groups import ReaderGroup
    from headgate.store.shared_transactions import SharedTransaction, TransactionWriter
    from headgate.store.store import Store
    from headgate.store.streams import StreamCut

__version__ = "0.1.0"

_HOMES = {
    "headgate.api.async_readers": (
        "AsyncGroupReader",
        "AsyncReaderGroup",
        "AsyncStreamFollower",
    ),
    "headgate.api.async_store": (
        "AsyncSharedTransaction",
        "AsyncStore",
        "AsyncStreamWriter",
        "AsyncTransactionWriter",
    ),
    "headgate.api.config": (
        "Checkpointing",
        "DeadLetter",
        "ExponentialDelay",
        "Fail",
        "FailureRate",
        "FixedDelay",
        "Memory",
        "NoRestart",
        "RocksDB",
        "Security",
    ),
    "headgate.api.connected_streams": ("ConnectedStreams",),
    "headgate.api.dataframe_source": ("DataFrameSource",),
    "headgate.api.pipeline": ("Pipeline",),
    "headgate.api.savepoint_writer": (
        "EditedSavepoint",
        "NewSavepoint",
        "WrittenSavepoint",
        "edit_savepoint",
        "new_savepoint",
    ),
    "headgate.api.state_reader": (
        "read_state",
        "read_state_batches",
        "state_catalog",
    ),
    "headgate.api.stream": (
        "KeyedStream",
        "Session",
        "Sliding",
        "Stream",
        "Tumbling",
        "WindowedStream",
    ),
    "headgate.connectors.fenced_sink": ("Fence",),
    "headgate.connectors.files.file_sink": ("FileSink",),
    "headgate.connectors.files.line_source": (
        "JsonLines",
        "TextFiles",
    ),
    "headgate.connectors.files.parquet": ("ParquetFiles",),
    "headgate.connectors.generator": (
        "Choice",
        "Generator",
        "RowNumber",
        "Uniform",
    ),
    "headgate.connectors.hooks": (
        "ASK_AGAIN",
        "CoordinatorHook",
        "HookContext",
    ),
    "headgate.connectors.ledger_sink": (
        "LedgerOutput",
        "LedgerSink",
        "output_checkpoint",
    ),
    "headgate.connectors.memory": (
        "Discard",
        "FromRows",
        "Print",
    ),
    "headgate.connectors.streams": (
        "GroupSource",
        "StreamSink",
        "StreamSource",
    ),
    "headgate.connectors.two_phase_sink": ("TwoPhaseSink",),
    "headgate.model.progress": (
        "PipelineHandle",
        "PipelineState",
        "Progress",
        "RunResult",
    ),
    "headgate.operators.checkpoint_listeners": (
        "CheckpointListener",
        "CheckpointedFunction",
        "PublishOnCheckpoint",
        "RestoreContext",
        "SnapshotContext",
    ),
    "headgate.operators.operator_state": (
        "OperatorList",
        "UnionList",
    ),
    "headgate.operators.process.batch_aggregation": (
        "BatchAggregateFunction",
        "BatchAggregatingState",
        "BatchReducingState",
        "BatchStateHandle",
    ),
    "headgate.operators.process.batch_process": (
        "BatchContext",
        "BatchProcessFunction",
        "BatchTimers",
        "FiredTimers",
    ),
    "headgate.operators.process.batch_state": (
        "BatchListState",
        "BatchMapState",
        "BatchValueState",
        "Keys",
    ),
    "headgate.operators.process.broadcast_process": (
        "BatchBroadcastProcessFunction",
        "BroadcastContext",
        "BroadcastProcessFunction",
    ),
    "headgate.operators.process.broadcast_state": (
        "BatchBroadcastState",
        "BroadcastState",
    ),
    "headgate.operators.process.row_process": (
        "ProcessContext",
        "ProcessFunction",
        "StateHandle",
    ),
    "headgate.operators.process.row_state": (
        "AggregateFunction",
        "AggregatingState",
        "ListState",
        "MapState",
        "ReducingState",
        "ValueState",
    ),
    "headgate.operators.process.timers": (
        "Timer",
        "Timers",
    ),
    "headgate.spark.state_source": ("register_state_source",),
    "headgate.spark.stream_format": ("register_streams",),
    "headgate.state.evolution": ("Evolution",),
    "headgate.state.ttl": ("TTL",),
    "headgate.store.follower": (
        "StreamEvents",
        "StreamFollower",
    ),
    "headgate.store.group_reader": (
        "CheckpointMarker",
        "GroupEvents",
        "GroupReader",
    ),
    "headgate.store.policies": (
        "Retention",
        "Scaling",
    ),
    "headgate.store.reader_groups": ("ReaderGroup",),
    "headgate.store.shared_transactions": (
        "SharedTransaction",
        "TransactionWriter",
    ),
    "headgate.store.store": ("Store",),
    "headgate.store.streams": ("StreamCut",),
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
        from headgate.api.unsupported import name_hint

        raise AttributeError(f"headgate has no name '{name}'{name_hint(name, __all__)}")
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
