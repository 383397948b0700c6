from __future__ import annotations

import subprocess
import sys

import pytest

import headgate

NAMES = """
ASK_AGAIN AggregateFunction AggregatingState AsyncGroupReader AsyncReaderGroup AsyncSharedTransaction AsyncStore
AsyncStreamFollower AsyncStreamWriter AsyncTransactionWriter BadRecord BatchAggregateFunction BatchAggregatingState
BatchBroadcastProcessFunction BatchBroadcastState BatchContext BatchListState BatchMapState BatchProcessFunction
BatchReducingState BatchStateHandle BatchTimers BatchValueState BroadcastContext BroadcastProcessFunction
BroadcastState CheckpointListener CheckpointMarker CheckpointedFunction Checkpointing Choice ConnectedStreams
CoordinatorHook CorruptionError DataFrameSource DeadLetter Discard EditedSavepoint Evolution ExponentialDelay Fail
FailureRate Fence FencedError FileSink FiredTimers FixedDelay FromRows Generator GroupEvents GroupReader
GroupSource HeadgateError HookContext JsonLines KeyedStream Keys LedgerOutput LedgerSink ListState MapState Memory
NewSavepoint NoRestart OperatorList ParquetFiles Pipeline PipelineFailed PipelineHandle PipelineState Print
ProcessContext ProcessFunction Progress ProtocolViolation PublishOnCheckpoint ReaderGroup ReducingState
RestoreContext Retention RocksDB RowNumber RunResult Scaling Security Session SharedTransaction Sliding
SnapshotContext StateHandle StorageError Store Stream StreamCut StreamEvents StreamFollower StreamSink StreamSource
TTL TextFiles Timer Timers TransactionWriter TruncatedError Tumbling TwoPhaseSink Uniform UnionList UsageError
ValueState WindowedStream WrittenSavepoint __version__ edit_savepoint new_savepoint output_checkpoint read_state
read_state_batches register_state_source register_streams state_catalog
"""


def test_the_public_names_are_these() -> None:
    assert sorted(headgate.__all__) == sorted(NAMES.split())


@pytest.mark.parametrize("name", NAMES.split())
def test_every_public_name_can_be_imported(name: str) -> None:
    assert getattr(headgate, name) is not None


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no name 'Pipelin'"):
        headgate.Pipelin  # noqa: B018


def test_importing_headgate_imports_neither_spark_nor_arrow_nor_polars() -> None:
    code = "import sys, headgate; print(sorted({'pyspark', 'pyarrow', 'polars', 'numpy'} & set(sys.modules)))"
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert told.stdout.strip() == "[]"


def test_building_a_pipeline_does_not_import_spark() -> None:
    code = (
        "import sys, headgate as hg; p = hg.Pipeline('p'); p.source(hg.FromRows([{'n': 1}])).sink(hg.Discard()); "
        "p.definition(); print('pyspark' in sys.modules)"
    )
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert told.stdout.strip() == "False"
