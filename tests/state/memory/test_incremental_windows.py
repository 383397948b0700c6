"""Windows go on with the chunks that they were restored from, in memory and in front of a database."""

from __future__ import annotations

import pytest
from tests.state.backends import states
from tests.state.memory.chunk_stories import FewWindows, KeptWindows, Story, Windows, new_bytes, small
from tests.state.memory.test_incremental_snapshot import WINDOW_CHANGES, long_story, paths, tell
from tests.state.rocksdb.increments import restored_states

from headgate.codec.snapshot import decode_sections
from headgate.model.manifest import Manifest
from headgate.state.backend import META
from headgate.state.rocksdb import database_snapshot, local_databases
from headgate.state.worker_backends import WorkerStates

KEYS = 2_000
"""So many in each window."""

each_use = pytest.mark.parametrize("use", [Windows, KeptWindows])


def begun(use: type[Windows], worker: WorkerStates | None = None) -> tuple[Story, Manifest]:
    """Return a story with two chunks, and its first checkpoint."""
    story = Story(use())
    if worker is not None:
        story.worker = worker
        story.begin()
    for window in range(1, 6):
        story.change(window, range(KEYS), window)
    first = story.checkpoint()
    story.change(3, range(100), 5)
    story.checkpoint()
    return story, first


@each_use
@pytest.mark.parametrize("backend", ["memory", "rocksdb"])
def test_windows_that_go_on_with_chunks_write_what_changed(
    use: type[Windows], backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        local_databases.LocalDatabase, "cache_bytes", 64 << 20
    )  # however many databases the worker has by now
    with states(backend) as worker:
        story, first = begun(use, worker)
        for life in range(2):
            before, _ = story.retained[story.number]
            story.restart()
            assert story.continued == life + 1
            story.change(1 + life, None)
            story.change(5, range(50, 90), 7)
            story.change(6 + life, range(10), 8)
            manifest = story.checkpoint()
            assert paths(before) < paths(manifest)
            assert new_bytes(manifest) < new_bytes(first) / 20
            story.check(1 + life)
        beside = [one for one in restored_states(story.storage, manifest) if one.files is None]
        assert [bytes(decode_sections(one.payload, "")[META]) for one in beside] == [b"8"]
        story.check_no_leak()


@each_use
def test_idle_windows_write_no_chunk_behind_a_restart(use: type[Windows]) -> None:
    story, _ = begun(use)
    before, _ = story.retained[story.number]
    story.restart()
    assert paths(story.checkpoint()) == paths(before)
    story.check()


@each_use
def test_windows_without_room_for_what_is_restored_do_not_refer_to_it(
    use: type[Windows], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All that was restored fires out of the database; then what is in memory is nothing of what the chunks have."""
    with states("rocksdb") as worker:
        monkeypatch.setattr(local_databases.LocalDatabase, "cache_bytes", 64 << 20)
        story, first = begun(use, worker)
        monkeypatch.setattr(local_databases.LocalDatabase, "cache_bytes", 20_000)
        story.restart()
        assert story.backend._stored.count
        monkeypatch.setattr(local_databases.LocalDatabase, "cache_bytes", 64 << 20)
        for window in story.use.windows(story.model):
            story.change(window, None)
        for window in range(10, 16):
            story.change(window, range(KEYS), 3)
        assert not story.backend._stored.count
        assert not paths(first) & paths(story.checkpoint())
        story.check()


@each_use
@pytest.mark.parametrize("files_min", [1, 1 << 20])
def test_stories_of_windows_that_have_room_now_and_then(
    use: type[Windows], files_min: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local_databases.LocalDatabase, "cache_bytes", 1_500)
    monkeypatch.setattr(database_snapshot, "SIZE_BYTES_MIN", files_min)
    continued = 0
    for seed in range(4):
        with states("rocksdb") as worker, small():
            story = Story(FewWindows(use()))
            story.worker = worker
            story.begin()
            tell(story, long_story(seed, WINDOW_CHANGES, 60))
            story.check(1 + seed % 2)
            continued += story.continued
    assert continued
