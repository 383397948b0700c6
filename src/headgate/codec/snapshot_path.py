"""Names of the files that snapshots are written to: they say which upload wrote them, and nothing else (SF3).

``chk-<checkpoint>/<vertex>-<subtask>.g<generation>``, and ``.<number>`` behind it for the second file and those after
it, ``.o<number>`` for prepared output, ``.f<number>`` for a file of a database. Counterparts:
``runtime.checkpoints.targets`` makes them, ``runtime.checkpoints.snapshot_files`` lists them. What needs a file is told
by manifests, never by its name.
"""

from __future__ import annotations

import re

from headgate.model.ids import CheckpointId, Generation, SubtaskId
from headgate.protocol.checkpoints.retention import StoredFile

_DIRECTORY = "chk-"
_OTHERS = re.compile(r"[^A-Za-z0-9_.-]")


def snapshot_path(checkpoint: CheckpointId, subtask: SubtaskId, generation: Generation, number: int = 0) -> str:
    """Return where an upload writes its file ``number``, unique per generation (C33)."""
    return _stem(checkpoint, subtask, generation) + (f".{number}" if number else "")


def output_path(checkpoint: CheckpointId, subtask: SubtaskId, generation: Generation, number: int) -> str:
    """Return where a subtask writes the ``number``-th large payload that it has prepared."""
    return f"{_stem(checkpoint, subtask, generation)}.o{number}"


def file_path(checkpoint: CheckpointId, subtask: SubtaskId, generation: Generation, number: int) -> str:
    """Return where an upload writes the ``number``-th file that later checkpoints may share (SF15)."""
    return f"{_stem(checkpoint, subtask, generation)}.f{number}"


def stored_file(path: str) -> StoredFile | None:
    """Return who wrote ``path`` (relative to the pipeline's directory), or None if it is no file of a snapshot."""
    directory, _, name = path.partition("/")
    checkpoint = directory.removeprefix(_DIRECTORY)
    if not directory.startswith(_DIRECTORY) or not _is_number(checkpoint) or not name:
        return None
    generation = name.rpartition(".g")[2].partition(".")[0]
    written_by = Generation(int(generation)) if _is_number(generation) else Generation(0)
    return StoredFile(path, CheckpointId(int(checkpoint)), written_by)


def _stem(checkpoint: CheckpointId, subtask: SubtaskId, generation: Generation) -> str:
    return f"{_DIRECTORY}{checkpoint:010d}/{_OTHERS.sub('_', str(subtask.vertex))}-{subtask.index}.g{generation}"


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit()
