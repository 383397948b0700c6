"""Every error crosses process boundaries whole, and says what to do."""

from __future__ import annotations

import copy
import inspect
import pickle  # noqa: TID251  our own errors, from this very process

import pytest

from headgate import errors
from headgate.errors import (
    BadRecord,
    BringOutputBack,
    CorruptionError,
    FencedError,
    GoBackPast,
    HeadgateError,
    OutputDenied,
    PipelineFailed,
    ProtocolViolation,
    StorageError,
    TruncatedError,
    UnknownFormat,
    UsageError,
    with_remedy,
)

EXAMPLES: list[HeadgateError] = [
    HeadgateError("something"),
    UsageError("the pipeline has no sink"),
    PipelineFailed("it failed 3 times", "Traceback: ...", is_for_good=True),
    BadRecord("parse", "not JSON", "app.log byte 12", "'{'"),
    ProtocolViolation("Aligner", "second barrier", ("one", "two")),
    CorruptionError("log/1", 8, "checksum 1", "2"),
    UnknownFormat("log/1", 8, "format version 9 or less", "10"),
    OutputDenied("out", 7, "it is gone"),
    FencedError("pipeline p", 3, 4),
    StorageError("put", "log/1", "no space", is_transient=False),
    TruncatedError("app/logs", 1, 20, 1_520),
]

TEXTS = {
    UsageError: "the pipeline has no sink",
    PipelineFailed: "it failed 3 times\nTraceback: ...",
    BadRecord: "operator 'parse' refused a record at app.log byte 12: not JSON; the record is '{'. Correct the input, "
    "or divert such records with Pipeline(bad_records=DeadLetter(sink)).",
    ProtocolViolation: "Aligner: second barrier; its last events:\n    one\n    two",
    CorruptionError: "log/1 is damaged at byte 8: expected checksum 1, found 2",
    UnknownFormat: "log/1 is not in a format that this release of Headgate reads: expected format version 9 or less, "
    "found 10; use the release that wrote it, if one did, or restore the file from a copy",
    OutputDenied: "sink 'out' cannot commit the output of checkpoint 7: it is gone; starting again cannot help: bring "
    "back what is missing there, restore another checkpoint (headgate run PROGRAM --restore PLACE --go-back-past 7), "
    "or start over, which deletes all output: headgate run PROGRAM --fresh",
    FencedError: "pipeline p: generation 3 was replaced by generation 4",
    StorageError: "cannot put log/1: no space",
    TruncatedError: "segment 1 of stream 'app/logs' begins at position 1520 now, and events from position 20 were "
    "wanted: 1,500 events were truncated and are gone",
}


def test_every_class_has_an_example() -> None:
    classes = {c for _, c in inspect.getmembers(errors, inspect.isclass) if c.__module__ == errors.__name__}
    raised = {c for c in classes if issubclass(c, BaseException)}  # the others are remedies
    assert {type(e) for e in EXAMPLES} == raised
    assert all(issubclass(c, HeadgateError) for c in raised)


@pytest.mark.parametrize("error", EXAMPLES, ids=lambda e: type(e).__name__)
def test_an_error_survives_pickling_and_copying(error: HeadgateError) -> None:
    for again in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert type(again) is type(error)
        assert (again.args, vars(again), str(again)) == (error.args, vars(error), str(error))


def test_what_a_user_can_do_crosses_process_boundaries_too() -> None:
    again = pickle.loads(pickle.dumps(with_remedy(PipelineFailed("no"), GoBackPast(9))))
    assert again.remedy == GoBackPast(9)
    assert UsageError("no").remedy is None
    assert OutputDenied("out", 7, "it is gone").remedy == BringOutputBack()


@pytest.mark.parametrize("error", EXAMPLES[1:], ids=lambda e: type(e).__name__)
def test_an_error_says_what_happened(error: HeadgateError) -> None:
    assert str(error) == TEXTS[type(error)]


def test_optional_parts_leave_no_trace_in_the_text() -> None:
    assert str(PipelineFailed("it failed")) == "it failed"
    assert str(ProtocolViolation("Aligner", "second barrier")) == "Aligner: second barrier"
    assert str(BadRecord("n", "p", "", "r")).startswith("operator 'n' refused a record: p;")
    assert StorageError("get", "x", "y").is_transient


def test_a_target_that_refuses_access_is_not_called_one_that_lost_output() -> None:
    refused = OutputDenied("out", 7, "access denied", is_refused=True)
    assert str(refused) == (
        "sink 'out' cannot commit the output of checkpoint 7: access denied; starting again cannot help before that "
        "is mended"
    )
    assert pickle.loads(pickle.dumps(refused)).remedy is None
