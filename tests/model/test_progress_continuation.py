"""What observers are told of a generation that continues: a sentence, and what it says as values."""

from __future__ import annotations

import json

from headgate.model.ids import CheckpointId, Generation
from headgate.model.progress import Continuation


def test_a_note_of_a_continuation_is_text_and_values() -> None:
    note = Continuation(Generation(3), CheckpointId(7), 1, 2)
    assert note == "generation 3 continues from checkpoint 7, which parallelism 1 wrote, at parallelism 2"
    assert (note.generation, note.checkpoint, note.parallelism) == (3, 7, 1)
    assert Continuation(Generation(3), CheckpointId(7), 2, 2) == "generation 3 continues from checkpoint 7"
    assert json.loads(json.dumps(note)) == str(note), "it travels as text"
