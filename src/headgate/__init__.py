"""Headgate: exactly-once stream processing for Python, on Apache Spark.

Names are imported when they are first used, so that ``import headgate`` needs neither Spark nor Arrow.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from headgate.errors import HeadgateError
from headgate.public_names import PublicNames
from headgate.tracebacks import render_traceback

__version__ = "0.1.0"

HeadgateError._render_traceback_ = property(render_traceback)

PUBLIC_NAMES = {
    "headgate.api.async_store": (
        "AsyncGroupReader AsyncReaderGroup AsyncSharedTransaction AsyncStore AsyncStreamFollower "
        "AsyncStreamWriter AsyncTransactionWriter"
    ),
    "headgate.api.config": (
        "Checkpointing DeadLetter ExponentialDelay Fail FailureRate FixedDelay Memory NoRestart RocksDB Security"
    ),
    "headgate.api.streams.connected_streams": "ConnectedStreams",
    "headgate.api.dataframe_source": "DataFrameSource",
    "headgate.api.pipeline": "Pipeline",
    "headgate.api.sql.query": "sql",
    "headgate.api.state_access": (
        "EditedSavepoint NewSavepoint WrittenSavepoint edit_savepoint new_savepoint read_state "
        "read_state_batches state_catalog"
    ),
    "headgate.api.streams.stream": "KeyedStream Stream",
    "headgate.api.streams.windowed_stream": "Count Global Session Sliding Tumbling WindowedStream",
    "headgate.connectors.base": "ASK_AGAIN CoordinatorHook HookContext",
    "headgate.connectors.fenced_sink": "Fence",
    "headgate.connectors.files.file_sink": "FileSink",
    "headgate.connectors.files.line_source": "CsvFiles JsonLines TextFiles",
    "headgate.connectors.files.parquet": "ParquetFiles",
    "headgate.connectors.generator": "Choice Generator RowNumber Uniform",
    "headgate.connectors.hybrid": "Hybrid",
    "headgate.connectors.kafka.schemas.schema_registry": "SchemaRegistry",
    "headgate.connectors.kafka.connection": "KafkaSecurity",
    "headgate.connectors.kafka.sink": "KafkaSink",
    "headgate.connectors.lakes.delta": "Delta DeltaSink",
    "headgate.connectors.lakes.iceberg": "Iceberg IcebergSink",
    "headgate.connectors.kafka.source": "Kafka",
    "headgate.connectors.postgres.changes": "PostgresChanges",
    "headgate.connectors.postgres.query": "PostgresQuery",
    "headgate.connectors.ledger_sink": "LedgerOutput LedgerSink output_checkpoint",
    "headgate.connectors.memory": "Discard FromRows Print",
    "headgate.connectors.pravega.controller": "PravegaSecurity",
    "headgate.connectors.pravega.sink": "PravegaSink",
    "headgate.connectors.pravega.source": "Pravega",
    "headgate.connectors.postgres.sink": "PostgresSink",
    "headgate.connectors.sql.sink": "SqlSink",
    "headgate.connectors.streams": "GroupSource StreamSink StreamSource",
    "headgate.connectors.two_phase_sink": "TwoPhaseSink",
    "headgate.errors": (
        "BadRecord CorruptionError FencedError HeadgateError PipelineFailed ProtocolViolation StorageError "
        "TruncatedError UsageError"
    ),
    "headgate.model.progress": "PipelineHandle PipelineState Progress RunResult",
    "headgate.operators.async_map": "AsyncFunction",
    "headgate.operators.checkpoint_listeners": (
        "CheckpointListener CheckpointedFunction OperatorList PublishOnCheckpoint RestoreContext SnapshotContext "
        "UnionList"
    ),
    "headgate.operators.process.batch_aggregation": (
        "BatchAggregateFunction BatchAggregatingState BatchReducingState BatchStateHandle"
    ),
    "headgate.operators.process.batch_process": "BatchContext BatchProcessFunction BatchTimers FiredTimers",
    "headgate.operators.process.batch_state": "BatchListState BatchMapState BatchValueState Keys",
    "headgate.operators.process.broadcast_state": "BatchBroadcastState BroadcastState",
    "headgate.operators.process.connected_process": (
        "BatchBroadcastProcessFunction BatchCoProcessFunction BroadcastContext BroadcastProcessFunction "
        "CoProcessFunction"
    ),
    "headgate.operators.process.row_process": "ProcessContext ProcessFunction StateHandle",
    "headgate.operators.process.row_state": (
        "AggregateFunction AggregatingState ListState MapState ReducingState ValueState"
    ),
    "headgate.operators.process.timers": "Timer Timers",
    "headgate.operators.timestamps": "WatermarkGenerator",
    "headgate.operators.user_functions": "Counter",
    "headgate.operators.windows.window_trigger": "Trigger TriggerContext TriggerResult",
    "headgate.spark.state_source": "register_state_source",
    "headgate.spark.stream_format": "register_streams",
    "headgate.state.descriptors": "Evolution",
    "headgate.state.ttl": "TTL",
    "headgate.store.follower": "StreamEvents StreamFollower",
    "headgate.store.reader_groups": "CheckpointMarker GroupEvents GroupReader ReaderGroup",
    "headgate.store.store": "Store",
    "headgate.store.streams": "Retention Scaling StreamCut",
    "headgate.store.transactions": "SharedTransaction TransactionWriter",
}
"""The public names by module. A new one also needs an import below, for type checkers."""


def _hint(name: str) -> str:
    from headgate.api.unsupported import name_hint

    return name_hint(name, _names.all)


_names = PublicNames(__name__, PUBLIC_NAMES, _hint)

if TYPE_CHECKING:
    from headgate.api.async_store import AsyncGroupReader as AsyncGroupReader
    from headgate.api.async_store import AsyncReaderGroup as AsyncReaderGroup
    from headgate.api.async_store import AsyncSharedTransaction as AsyncSharedTransaction
    from headgate.api.async_store import AsyncStore as AsyncStore
    from headgate.api.async_store import AsyncStreamFollower as AsyncStreamFollower
    from headgate.api.async_store import AsyncStreamWriter as AsyncStreamWriter
    from headgate.api.async_store import AsyncTransactionWriter as AsyncTransactionWriter
    from headgate.api.config import Checkpointing as Checkpointing
    from headgate.api.config import DeadLetter as DeadLetter
    from headgate.api.config import ExponentialDelay as ExponentialDelay
    from headgate.api.config import Fail as Fail
    from headgate.api.config import FailureRate as FailureRate
    from headgate.api.config import FixedDelay as FixedDelay
    from headgate.api.config import Memory as Memory
    from headgate.api.config import NoRestart as NoRestart
    from headgate.api.config import RocksDB as RocksDB
    from headgate.api.config import Security as Security
    from headgate.api.dataframe_source import DataFrameSource as DataFrameSource
    from headgate.api.pipeline import Pipeline as Pipeline
    from headgate.api.sql.query import sql as sql
    from headgate.api.state_access import EditedSavepoint as EditedSavepoint
    from headgate.api.state_access import NewSavepoint as NewSavepoint
    from headgate.api.state_access import WrittenSavepoint as WrittenSavepoint
    from headgate.api.state_access import edit_savepoint as edit_savepoint
    from headgate.api.state_access import new_savepoint as new_savepoint
    from headgate.api.state_access import read_state as read_state
    from headgate.api.state_access import read_state_batches as read_state_batches
    from headgate.api.state_access import state_catalog as state_catalog
    from headgate.api.streams.connected_streams import ConnectedStreams as ConnectedStreams
    from headgate.api.streams.stream import KeyedStream as KeyedStream
    from headgate.api.streams.stream import Stream as Stream
    from headgate.api.streams.windowed_stream import Count as Count
    from headgate.api.streams.windowed_stream import Global as Global
    from headgate.api.streams.windowed_stream import Session as Session
    from headgate.api.streams.windowed_stream import Sliding as Sliding
    from headgate.api.streams.windowed_stream import Tumbling as Tumbling
    from headgate.api.streams.windowed_stream import WindowedStream as WindowedStream
    from headgate.connectors.base import ASK_AGAIN as ASK_AGAIN
    from headgate.connectors.base import CoordinatorHook as CoordinatorHook
    from headgate.connectors.base import HookContext as HookContext
    from headgate.connectors.fenced_sink import Fence as Fence
    from headgate.connectors.files.file_sink import FileSink as FileSink
    from headgate.connectors.files.line_source import CsvFiles as CsvFiles
    from headgate.connectors.files.line_source import JsonLines as JsonLines
    from headgate.connectors.files.line_source import TextFiles as TextFiles
    from headgate.connectors.files.parquet import ParquetFiles as ParquetFiles
    from headgate.connectors.generator import Choice as Choice
    from headgate.connectors.generator import Generator as Generator
    from headgate.connectors.generator import RowNumber as RowNumber
    from headgate.connectors.generator import Uniform as Uniform
    from headgate.connectors.hybrid import Hybrid as Hybrid
    from headgate.connectors.kafka.connection import KafkaSecurity as KafkaSecurity
    from headgate.connectors.kafka.schemas.schema_registry import SchemaRegistry as SchemaRegistry
    from headgate.connectors.kafka.sink import KafkaSink as KafkaSink
    from headgate.connectors.kafka.source import Kafka as Kafka
    from headgate.connectors.lakes.delta import Delta as Delta
    from headgate.connectors.lakes.delta import DeltaSink as DeltaSink
    from headgate.connectors.lakes.iceberg import Iceberg as Iceberg
    from headgate.connectors.lakes.iceberg import IcebergSink as IcebergSink
    from headgate.connectors.ledger_sink import LedgerOutput as LedgerOutput
    from headgate.connectors.ledger_sink import LedgerSink as LedgerSink
    from headgate.connectors.ledger_sink import output_checkpoint as output_checkpoint
    from headgate.connectors.memory import Discard as Discard
    from headgate.connectors.memory import FromRows as FromRows
    from headgate.connectors.memory import Print as Print
    from headgate.connectors.postgres.changes import PostgresChanges as PostgresChanges
    from headgate.connectors.postgres.query import PostgresQuery as PostgresQuery
    from headgate.connectors.postgres.sink import PostgresSink as PostgresSink
    from headgate.connectors.pravega.controller import PravegaSecurity as PravegaSecurity
    from headgate.connectors.pravega.sink import PravegaSink as PravegaSink
    from headgate.connectors.pravega.source import Pravega as Pravega
    from headgate.connectors.sql.sink import SqlSink as SqlSink
    from headgate.connectors.streams import GroupSource as GroupSource
    from headgate.connectors.streams import StreamSink as StreamSink
    from headgate.connectors.streams import StreamSource as StreamSource
    from headgate.connectors.two_phase_sink import TwoPhaseSink as TwoPhaseSink
    from headgate.errors import BadRecord as BadRecord
    from headgate.errors import CorruptionError as CorruptionError
    from headgate.errors import FencedError as FencedError
    from headgate.errors import HeadgateError as HeadgateError
    from headgate.errors import PipelineFailed as PipelineFailed
    from headgate.errors import ProtocolViolation as ProtocolViolation
    from headgate.errors import StorageError as StorageError
    from headgate.errors import TruncatedError as TruncatedError
    from headgate.errors import UsageError as UsageError
    from headgate.model.progress import PipelineHandle as PipelineHandle
    from headgate.model.progress import PipelineState as PipelineState
    from headgate.model.progress import Progress as Progress
    from headgate.model.progress import RunResult as RunResult
    from headgate.operators.async_map import AsyncFunction as AsyncFunction
    from headgate.operators.checkpoint_listeners import CheckpointedFunction as CheckpointedFunction
    from headgate.operators.checkpoint_listeners import CheckpointListener as CheckpointListener
    from headgate.operators.checkpoint_listeners import OperatorList as OperatorList
    from headgate.operators.checkpoint_listeners import PublishOnCheckpoint as PublishOnCheckpoint
    from headgate.operators.checkpoint_listeners import RestoreContext as RestoreContext
    from headgate.operators.checkpoint_listeners import SnapshotContext as SnapshotContext
    from headgate.operators.checkpoint_listeners import UnionList as UnionList
    from headgate.operators.process.batch_aggregation import BatchAggregateFunction as BatchAggregateFunction
    from headgate.operators.process.batch_aggregation import BatchAggregatingState as BatchAggregatingState
    from headgate.operators.process.batch_aggregation import BatchReducingState as BatchReducingState
    from headgate.operators.process.batch_aggregation import BatchStateHandle as BatchStateHandle
    from headgate.operators.process.batch_process import BatchContext as BatchContext
    from headgate.operators.process.batch_process import BatchProcessFunction as BatchProcessFunction
    from headgate.operators.process.batch_process import BatchTimers as BatchTimers
    from headgate.operators.process.batch_process import FiredTimers as FiredTimers
    from headgate.operators.process.batch_state import BatchListState as BatchListState
    from headgate.operators.process.batch_state import BatchMapState as BatchMapState
    from headgate.operators.process.batch_state import BatchValueState as BatchValueState
    from headgate.operators.process.batch_state import Keys as Keys
    from headgate.operators.process.broadcast_state import BatchBroadcastState as BatchBroadcastState
    from headgate.operators.process.broadcast_state import BroadcastState as BroadcastState
    from headgate.operators.process.connected_process import (
        BatchBroadcastProcessFunction as BatchBroadcastProcessFunction,
    )
    from headgate.operators.process.connected_process import BatchCoProcessFunction as BatchCoProcessFunction
    from headgate.operators.process.connected_process import BroadcastContext as BroadcastContext
    from headgate.operators.process.connected_process import BroadcastProcessFunction as BroadcastProcessFunction
    from headgate.operators.process.connected_process import CoProcessFunction as CoProcessFunction
    from headgate.operators.process.row_process import ProcessContext as ProcessContext
    from headgate.operators.process.row_process import ProcessFunction as ProcessFunction
    from headgate.operators.process.row_process import StateHandle as StateHandle
    from headgate.operators.process.row_state import AggregateFunction as AggregateFunction
    from headgate.operators.process.row_state import AggregatingState as AggregatingState
    from headgate.operators.process.row_state import ListState as ListState
    from headgate.operators.process.row_state import MapState as MapState
    from headgate.operators.process.row_state import ReducingState as ReducingState
    from headgate.operators.process.row_state import ValueState as ValueState
    from headgate.operators.process.timers import Timer as Timer
    from headgate.operators.process.timers import Timers as Timers
    from headgate.operators.timestamps import WatermarkGenerator as WatermarkGenerator
    from headgate.operators.user_functions import Counter as Counter
    from headgate.operators.windows.window_trigger import Trigger as Trigger
    from headgate.operators.windows.window_trigger import TriggerContext as TriggerContext
    from headgate.operators.windows.window_trigger import TriggerResult as TriggerResult
    from headgate.spark.state_source import register_state_source as register_state_source
    from headgate.spark.stream_format import register_streams as register_streams
    from headgate.state.descriptors import Evolution as Evolution
    from headgate.state.ttl import TTL as TTL
    from headgate.store.follower import StreamEvents as StreamEvents
    from headgate.store.follower import StreamFollower as StreamFollower
    from headgate.store.reader_groups import CheckpointMarker as CheckpointMarker
    from headgate.store.reader_groups import GroupEvents as GroupEvents
    from headgate.store.reader_groups import GroupReader as GroupReader
    from headgate.store.reader_groups import ReaderGroup as ReaderGroup
    from headgate.store.store import Store as Store
    from headgate.store.streams import Retention as Retention
    from headgate.store.streams import Scaling as Scaling
    from headgate.store.streams import StreamCut as StreamCut
    from headgate.store.transactions import SharedTransaction as SharedTransaction
    from headgate.store.transactions import TransactionWriter as TransactionWriter
else:
    __all__ = [*_names.all, "__version__"]


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used."""
    return _names.load(name)


def __dir__() -> list[str]:
    return [*_names.all, "__version__"]
