"""Names of the files of snapshots: who wrote one can be read from it, whatever the vertex is called."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headgate.codec.snapshot import output_path, snapshot_path, stored_file
from headgate.model.ids import CheckpointId, Generation, SubtaskId, VertexId
from headgate.protocol.checkpoints.retention import StoredFile
from headgate.storage.object_names import checked_path

NUMBERS = st.integers(0, 10**12)
NAMES = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,20}", fullmatch=True)
"""What the API takes for the name of a node."""
UPLOADS = st.tuples(
    NUMBERS.map(CheckpointId),
    st.builds(SubtaskId, NAMES.map(VertexId), st.integers(0, 9_999)),
    NUMBERS.map(Generation),
)


@given(UPLOADS, st.integers(0, 99))
def test_a_name_that_was_made_says_who_wrote_it(
    upload: tuple[CheckpointId, SubtaskId, Generation], number: int
) -> None:
    checkpoint, _, generation = upload
    for path in (snapshot_path(*upload, number), output_path(*upload, number)):
        assert checked_path(path) == path
        assert stored_file(path) == StoredFile(path, checkpoint, generation)


@given(st.lists(st.tuples(UPLOADS, st.integers(0, 3), st.booleans()), unique=True, max_size=6))
def test_no_two_uploads_write_the_same_file(
    files: list[tuple[tuple[CheckpointId, SubtaskId, Generation], int, bool]],
) -> None:
    paths = [output_path(*upload, n) if is_output else snapshot_path(*upload, n) for upload, n, is_output in files]
    assert len(set(paths)) == len(paths)


@pytest.mark.parametrize(
    "path",
    [
        "",
        "log/0000000001",
        "chk-/sums-0.g1",
        "chk-x/sums-0.g1",
        "chk-0000000001",
        "chk-0000000001/",
        "ids/7",
        "chk-²/a.g1",
    ],
)
def test_what_is_no_file_of_a_snapshot_is_nobodys(path: str) -> None:
    assert stored_file(path) is None


@pytest.mark.parametrize("name", ["README", "sums-0.gx", "sums-0.g"])
def test_a_stray_file_among_snapshots_is_of_no_generation(name: str) -> None:
    """It may go like any leftover (SF8)."""
    assert stored_file(f"chk-0000000007/{name}") == StoredFile(f"chk-0000000007/{name}", CheckpointId(7), Generation(0))
