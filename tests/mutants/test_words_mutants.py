"""Mutants that let words decide: what is cancelled or given up by a sentence, what is a channel by its name."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import pytest
from tests.codec import test_foreign_bytes, test_messages
from tests.mutants.harness import Mutant, assert_caught, patched
from tests.operators import test_timestamps
from tests.protocol import test_machine_stories
from tests.protocol.supervision import test_supervisor
from tests.runtime.wire import test_control
from tests.storage import test_backends

from headgate.codec import log_entry, messages, savepoint
from headgate.model.failure import Failure, FailureKind
from headgate.operators import timestamps
from headgate.protocol import machine
from headgate.protocol.supervision.restart import Restarts
from headgate.protocol.watermarks import ChannelOrigin
from headgate.runtime.wire.control import Loss, WorkerConnection
from headgate.storage.faulty import FaultyStorage


@contextmanager
def a_failure_is_judged_by_its_words() -> Iterator[None]:
    def is_hopeless(self: Any, failure: Failure) -> bool:
        return "user-function" not in failure.reason

    with patched(Restarts, "_is_hopeless", is_hopeless):
        yield


@contextmanager
def silence_is_only_a_word() -> Iterator[None]:
    lose = WorkerConnection.lose
    with patched(WorkerConnection, "lose", lambda self, loss: lose(self, Loss(loss.reason))):
        yield


@contextmanager
def a_name_makes_a_channel() -> Iterator[None]:
    with patched(timestamps, "_is_channel", lambda origin: str(origin).startswith("channel-")):
        yield


@contextmanager
def what_version_0_1_wrote_is_splits_only() -> Iterator[None]:
    with patched(timestamps, "_origin_of", lambda name: name):
        yield


@contextmanager
def a_story_holds_everything() -> Iterator[None]:
    with patched(machine.Machine, "story", property(lambda self: tuple(map(repr, self._story)))):
        yield


@contextmanager
def a_wrapped_storage_is_not_swept() -> Iterator[None]:
    with patched(FaultyStorage, "sweep_unfinished", lambda self, prefix="": 0):
        yield


@contextmanager
def what_a_message_carries_has_any_number() -> Iterator[None]:
    with patched(messages, "check_ids", lambda *numbers: None):
        yield


@contextmanager
def what_a_message_carries_has_any_round() -> Iterator[None]:
    with patched(messages, "check_rounds", lambda *rounds: None):
        yield


@contextmanager
def what_a_message_carries_is_of_any_subtask() -> Iterator[None]:
    with patched(messages, "check_subtask", lambda subtask: None):
        yield


@pytest.mark.parametrize(
    ("mutant", "kind", "event", "wrong"),
    [
        (what_a_message_carries_has_any_number, "probe-returned", test_messages.RETURNED, {"count": -1}),
        (what_a_message_carries_has_any_round, "entrance-ended", test_messages.ENDED, {"highest_round": 1 << 30}),
        (what_a_message_carries_is_of_any_subtask, "decline", test_messages.DECLINED, {"subtask": test_messages.LONG}),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_message_that_carries_anything_is_caught(
    mutant: Mutant, kind: str, event: dict[str, object], wrong: dict[str, object]
) -> None:  # CN10
    test = test_messages.test_an_event_of_a_machine_is_as_bounded_as_any_field
    test(kind, event, [wrong])
    assert_caught(mutant, test, kind, event, [wrong])


def test_a_story_that_holds_everything_is_caught() -> None:
    test = test_machine_stories.test_the_story_of_a_machine_has_keys_and_causes_and_a_bounded_size
    assert_caught(a_story_holds_everything, test)


def test_a_wrapped_storage_that_is_not_swept_is_caught(tmp_path: Path) -> None:
    test = test_backends.test_a_storage_with_faults_sweeps_what_its_inner_one_left
    assert_caught(a_wrapped_storage_is_not_swept, test, tmp_path)


def test_a_failure_that_is_judged_by_its_words_is_caught() -> None:  # G14
    test = test_supervisor.test_what_is_done_about_a_failure_goes_by_its_kind_and_not_by_its_words
    test(FailureKind.REPLACED)
    assert_caught(a_failure_is_judged_by_its_words, test, FailureKind.REPLACED)


def test_silence_that_is_only_a_word_is_caught() -> None:  # G7, G14
    assert_caught(silence_is_only_a_word, test_control.test_a_silent_worker_is_lost_within_the_time_out)


def test_a_name_that_makes_a_channel_is_caught() -> None:  # W9
    assert_caught(a_name_makes_a_channel, test_timestamps.test_a_split_that_is_named_like_a_channel_is_a_split)


def test_forgetting_how_channels_were_written_is_caught() -> None:  # W17
    test = test_timestamps.test_the_times_that_version_0_1_wrote_are_read
    assert_caught(what_version_0_1_wrote_is_splits_only, test)
    assert str(ChannelOrigin(test_timestamps.CHANNELS[1].channel)) == "channel-1"


@pytest.mark.parametrize(
    ("codec", "head", "decode"),
    [(log_entry, "headgate-log 2 claim", "decode_log_entry"), (savepoint, "headgate-savepoint 1", "decode_savepoint")],
    ids=lambda value: getattr(value, "__name__", ""),
)
@pytest.mark.parametrize("body", [test_foreign_bytes.TOO_DEEP, test_foreign_bytes.NOT_UTF8], ids=["deep", "no UTF-8"])
def test_a_codec_that_refuses_only_what_its_library_does_is_caught(
    codec: ModuleType, head: str, decode: str, body: bytes
) -> None:
    @contextmanager
    def only_what_the_library_refuses() -> Iterator[None]:
        with patched(codec, "MALFORMED", (msgspec.MsgspecError,)):
            yield

    test = test_foreign_bytes.test_nonsense_under_a_right_checksum_is_refused
    test(head, getattr(codec, decode), body)
    assert_caught(only_what_the_library_refuses, test, head, getattr(codec, decode), body)
