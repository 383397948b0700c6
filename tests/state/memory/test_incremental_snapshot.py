"""Checkpoints of state in memory that write what changed, and what is restored of them."""

from __future__ import annotations

import random
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.conftest import IS_DEEP
from tests.runtime.checkpoints.test_restore import plan_of
from tests.state.backends import rows_in, sections_of, states
from tests.state.memory.chunk_stories import (
    TIMER_CHANGES,
    VALUE,
    Few,
    FewWindows,
    KeptWindows,
    Many,
    Story,
    Windows,
    chunks_of,
    new_bytes,
    small,
)
from tests.state.rocksdb.increments import manifest_of, restored_states
from tests.state.test_backend import Columns, Rows

import headgate as hg
from headgate.codec.snapshot import STATE_PREFIX, decode_sections, encode_sections
from headgate.errors import CorruptionError
from headgate.model.ids import WorkerIndex
from headgate.model.manifest import Manifest
from headgate.protocol.checkpoints.retention import SharedFiles
from headgate.runtime.checkpoints.restore import parts_for_worker
from headgate.state import snapshot
from headgate.state.descriptors import Evolution, StateDescriptor, StateKind
from headgate.state.memory import change_tracking, incremental_snapshot
from headgate.state.snapshot import UnsoundFiles
from headgate.storage.urls import open_storage

FORMS = [Rows, Columns]

KEYS = 2_000
"""So many that state is written as chunks, where 64 KiB are enough for that."""

ENOUGH = incremental_snapshot.SIZE_BYTES_MIN

each_form = pytest.mark.parametrize("form", Many.FORMS)

SEEDS = range(25) if IS_DEEP else range(1, 2)
CHANGES = ["put", "put", "clear", "append", "append", "forget", "set", "set", "unset", "empty", *TIMER_CHANGES]
WINDOW_CHANGES = ["add"] * 8 + ["take"] * 3
HAPPENS = [
    *("freeze", "write", "complete", "checkpoint", "checkpoint", "checkpoint", "checkpoint"),
    *("fail", "freeze", "write", "abort", "abort", "drop", "tidy", "restart"),
]
STEPS = st.lists(
    st.tuples(
        st.sampled_from(CHANGES + HAPPENS),
        st.lists(st.integers(0, 4), min_size=1, max_size=4),
        st.integers(0, 99),
    ),
    max_size=60,
)


@pytest.fixture(autouse=True)
def _little_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(incremental_snapshot, "SIZE_BYTES_MIN", 64 << 10)


def tell(story: Story, steps: list[tuple[str, list[int], int]]) -> None:
    """Have all that happen."""
    for what, numbers, n in steps:
        match what:
            case "freeze" if len(story.frozen) < 3:
                story.freeze()
            case "write" if story.frozen:
                story.write(n % 4)
            case "fail" if story.frozen:
                story.give_up(n % 4)
            case "complete" if story.written:
                story.complete(sorted(story.written)[n % len(story.written)], is_heard=n % 2 == 0)
            case "abort" if story.written:
                story.abort(sorted(story.written)[n % len(story.written)])
            case "checkpoint":
                while story.frozen:
                    story.write()
                story.checkpoint()
            case "drop" if len(story.retained) > 1:
                story.drop()
            case "tidy":
                story.use.tidy(story.backend)
            case "restart":
                story.restart()
            case _ if what not in HAPPENS:
                story.change(what, numbers, n)
        story.use.check(story.backend, story.model)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("key", ["number", "pair"])
@given(steps=STEPS, parallelism=st.integers(1, 3))
def test_whatever_becomes_of_checkpoints_each_is_restored_as_it_was(
    form: type[Rows], key: str, steps: list[tuple[str, list[int], int]], parallelism: int
) -> None:
    check_story(Few(form, key), steps, parallelism)


def check_story(use: Any, steps: list[tuple[str, list[int], int]], parallelism: int) -> None:
    with small():
        story = Story(use)
        tell(story, steps)
        story.check()
        story.check(parallelism)
        story.check_no_leak()


def long_story(seed: int, changes: list[str], steps: int = 80) -> list[tuple[str, list[int], int]]:
    chance = random.Random(seed)
    return [
        (chance.choice(changes + HAPPENS), chance.choices(range(5), k=chance.randint(1, 4)), chance.randrange(100))
        for _ in range(steps)
    ]


@pytest.mark.parametrize("form", FORMS)
def test_long_stories_of_checkpoints(form: type[Rows]) -> None:
    for seed in SEEDS:
        check_story(Few(form, "pair"), long_story(seed, CHANGES), 1 + seed % 3)


@pytest.mark.parametrize("use", [Windows, KeptWindows])
def test_long_stories_of_windows(use: type[Windows]) -> None:
    for seed in SEEDS:
        check_story(FewWindows(use()), long_story(seed, WINDOW_CHANGES), 1 + seed % 3)


def paths(manifest: Manifest) -> set[str]:
    return {part.path for part in chunks_of(manifest)}


def begun(form: str) -> tuple[Story, Manifest]:
    """Return a story with many keys, and its first checkpoint."""
    story = Story(Many(form))
    story.change(range(KEYS), 0)
    return story, story.checkpoint()


@each_form
def test_a_checkpoint_writes_what_changed_and_refers_to_the_rest(form: str) -> None:
    story, first = begun(form)
    for version in range(1, 4):
        story.change(range(version * 40, version * 40 + 80), version)
        manifest = story.checkpoint()
        assert paths(first) < paths(manifest)
        assert 0 < new_bytes(manifest) < new_bytes(first) / 20
    assert manifest.entries[0].rows == {"sum": story.use.counts(story.model)}, "rows are recorded as ever"
    story.check()


@each_form
def test_an_idle_pipeline_writes_no_chunk(form: str) -> None:
    story, first = begun(form)
    for _ in range(3):
        manifest = story.checkpoint()
        assert paths(manifest) == paths(first)
        assert new_bytes(manifest) < 2_000
    story.check()


@each_form
def test_little_state_in_memory_is_written_as_rows(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(incremental_snapshot, "SIZE_BYTES_MIN", ENOUGH)
    story = Story(Many(form))
    story.change(range(100), 0)
    for _ in range(2):
        assert {part.section for part in story.checkpoint().entries[0].parts} == {f"{STATE_PREFIX}sum"}
    story.change(range(4 * KEYS), 1)
    assert chunks_of(story.checkpoint())
    story.check()


@pytest.mark.parametrize("form", ["row", "column"])
def test_state_that_has_become_little_is_written_as_rows(form: str) -> None:
    story, _ = begun(form)
    story.change(range(20, KEYS), None)
    assert not chunks_of(story.checkpoint())
    story.check()


# SV3
@each_form
def test_a_savepoint_has_no_chunks(form: str) -> None:
    story, _ = begun(form)
    story.change(range(60), 1)
    story.freeze()
    savepoint = story.savepoint()
    assert {part.section for part in savepoint.entries[0].parts} == {f"{STATE_PREFIX}sum"}
    assert story.contents(savepoint) == story.use.wanted(story.model)
    story.write()
    story.complete(story.number)
    story.change(range(60, 80), 2)
    story.checkpoint()
    story.check()


# SF15
@each_form
def test_what_an_aborted_checkpoint_wrote_is_written_by_the_next(form: str) -> None:
    story, _ = begun(form)
    story.change(range(60), 1)
    story.freeze()
    story.write()
    story.abort(story.number)
    story.change(range(60, 80), 1)
    story.checkpoint()
    story.check()


# SF15
@each_form
def test_what_was_frozen_before_a_checkpoint_completes_misses_nothing(form: str) -> None:
    """Three are frozen at once; the first one completes before the others are written, unheard."""
    story, _ = begun(form)
    for version in range(1, 4):
        story.change(range(version * 20, version * 20 + 40), version)
        story.freeze()
    story.write()
    story.complete(2, is_heard=False)
    story.write()
    story.write()
    story.complete(4)
    story.change(range(200, 240), 5)
    story.checkpoint()
    story.check()
    story.drop()
    story.drop()
    story.check()


@each_form
def test_a_write_that_is_repeated_writes_the_same(form: str) -> None:
    story, _ = begun(form)
    story.change(range(60), 1)
    story.freeze()
    number, frozen, _ = story.frozen[0]
    first = story._parts(number, frozen)
    story.change(range(30, 90), 2)
    assert story._parts(number, frozen) == first
    story.write(fails_in=1)
    story.complete(number)
    story.check()


@pytest.mark.parametrize("form", ["row", "column"])
def test_chunks_are_few_and_hardly_more_than_what_there_is(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(incremental_snapshot, "CHUNKS_MAX", 8)
    story, first = begun(form)
    chance, counts, most = random.Random(7), [], 0.0
    for version in range(1, 60):
        keys = chance.sample(range(KEYS), 30 if version % 20 < 12 else KEYS // 20)
        story.change(keys[::2], version)
        story.change(keys[1::2], None if version % 3 else version)
        manifest = story.checkpoint()
        files = chunks_of(manifest)
        counts.append(len({part.name.partition("-")[0] for part in files}))
        most = max(most, sum(part.size_bytes for part in files) / new_bytes(first) * KEYS / len(story.model))
        story.drop()
        assert {path.removeprefix("p/") for path in story.storage.list("p") if "/chk-" in path} == manifest.files
    assert max(counts) == 8
    assert min(counts[8:]) == 1, "it began anew"
    assert 1.2 < most < 2.2
    story.check()


@pytest.mark.parametrize("form", ["row", "column"])
def test_state_that_shrinks_gives_its_chunks_up(form: str) -> None:
    story, first = begun(form)
    for start in range(0, KEYS * 3 // 4, 400):
        story.change(range(start, start + 400), None)
        manifest = story.checkpoint()
        size_bytes = sum(part.size_bytes for part in chunks_of(manifest)) or new_bytes(manifest)
        assert size_bytes < 2.2 * new_bytes(first) * len(story.model) / KEYS
    story.check()


def test_what_follows_the_first_chunk_is_written_together_when_it_is_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(incremental_snapshot, "CHUNKS_MAX", 3)
    story, first = begun("column")
    for version in range(1, 4):
        story.change(range(version, version + 20), version)
        manifest = story.checkpoint()
    assert paths(first) < paths(manifest)
    assert len(paths(manifest)) == 2
    assert new_bytes(manifest) < new_bytes(first) / 20
    story.check()


@each_form
def test_all_keys_that_change_are_written_once(form: str) -> None:
    story, first = begun(form)
    for version in range(1, 4):
        story.change(range(KEYS), version)
        manifest = story.checkpoint()
        assert not paths(first) & paths(manifest)
        assert new_bytes(manifest) < 1.1 * new_bytes(first)
    story.check()


def test_keys_that_are_numbered_anew_are_all_written(monkeypatch: pytest.MonkeyPatch) -> None:
    story, first = begun("column")
    monkeypatch.setattr(story.backend, "_renumber_at", 2 * KEYS)
    story.change(range(100), None)
    for start in range(KEYS, 2 * KEYS, 50):
        story.change(range(start, start + 50), 1)
        story.change(range(start, start + 50), None)
    assert len(story.backend._index) < KEYS, "those without state have no number any more"
    assert not paths(first) & paths(story.checkpoint())
    story.check()


def test_no_more_changed_keys_are_remembered_than_half_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(change_tracking, "KEYS_FREE", 10)
    story, _ = begun("row")
    (cells,) = story.backend._cells.values()
    story.change(range(KEYS // 2 - 5), 1)
    assert cells._changed
    story.change(range(KEYS // 2 - 5, KEYS - 20), 1)
    story.change([0], 2)
    assert cells._changed is None
    story.checkpoint()
    assert cells._changed == {}
    story.change([1], 3)
    assert new_bytes(story.checkpoint()) < 3_000
    story.check()


@pytest.mark.parametrize("backend", ["memory", "rocksdb"])
@each_form
def test_chunks_are_restored_at_any_parallelism_in_any_backend(
    form: str, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snapshot, "RANGE_BYTES_MIN", 25_000)
    story, _ = begun(form)
    story.change(range(500, 900), 1)
    story.change(range(800, 1_000), None)
    manifest = story.checkpoint()
    assert len(chunks_of(manifest)) > 3, "the first chunk is cut by key group"
    for parallelism in (1, 2, 3, 5):
        with states(backend) as made:
            monkeypatch.setattr(story, "worker", made)
            assert story.contents(manifest, parallelism) == story.use.wanted(story.model)


def test_a_worker_is_sent_only_the_chunks_that_can_hold_its_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshot, "RANGE_BYTES_MIN", 25_000)
    story, first = begun("column")
    sizes = []
    for worker in range(4):
        (sent,) = parts_for_worker(first, plan_of(4), WorkerIndex(worker))
        sizes.append(sum(part.size_bytes for part in sent.parts))
    assert max(sizes) < 0.6 * first.size_bytes
    assert story.contents(first, 4) == story.use.wanted(story.model)


@each_form
def test_what_goes_on_with_chunks_shares_them(form: str) -> None:
    story, _ = begun(form)
    story.change(range(60), 1)
    before = story.checkpoint()
    story.restart()
    assert story.continued == 1
    story.change(range(60, 80), 2)
    manifest = story.checkpoint()
    assert paths(before) < paths(manifest)
    names = [part.name for part in chunks_of(manifest)]
    assert len(set(names)) == len(names)
    story.restart()
    story.change(range(100, 110), 3)
    assert paths(manifest) < paths(story.checkpoint())
    story.check()


@pytest.mark.parametrize("form", ["row", "column"])
def test_other_states_take_the_rows_of_chunks(form: str) -> None:
    story, first = begun(form)
    other = StateDescriptor("other", StateKind.VALUE, pa.int64(), evolution=Evolution(starts_empty=True))
    backend = story.use.make(story.worker, [VALUE, other])
    assert not story.restore(first, backend)
    found = rows_in(sections_of(backend.freeze()))
    assert found == {**story.use.wanted(story.model), "other": []}


def test_the_other_form_takes_the_rows_of_chunks() -> None:
    kinds = [StateDescriptor("map", StateKind.MAP, pa.int64(), pa.int64())]
    story, use = Story(Many("column")), Many("row")
    backend = use.make(story.worker, kinds)
    with small():
        maps = backend.cells(kinds[0])
        for key in range(50):
            maps.put(key, {key: 1, 2: 2})
        backend.absorb()
        story.backend = backend
        story.use.counts = lambda model: {"map": 99}  # type: ignore[method-assign]
        manifest = story.checkpoint()
    assert chunks_of(manifest)
    by_columns = story.use.make(story.worker, kinds)
    assert not story.restore(manifest, by_columns)
    assert rows_in(sections_of(by_columns.freeze())) == rows_in(sections_of(backend.freeze()))


def test_a_new_parallelism_begins_anew() -> None:
    story, first = begun("column")
    backend = story.use.make(story.worker)
    assert not story.restore(first, backend, 0, 2)
    assert not story.restore(first, backend, 1, 2)
    story.backend, story.shared = backend, SharedFiles(chunks_of(first))
    assert not paths(first) & paths(story.checkpoint())
    story.check()


def damaged(story: Story, manifest: Manifest, how: str) -> str:
    """Damage one chunk in storage; return its path."""
    part = chunks_of(manifest)[-1]
    data = bytes(story.storage.get(f"p/{part.path}"))
    if how == "missing":
        story.storage.delete(f"p/{part.path}")
    elif how == "truncated":
        story.storage.put(f"p/{part.path}", [data[:-7]])
    else:
        story.storage.put(f"p/{part.path}", [data[:300] + bytes([data[300] ^ 1]) + data[301:]])
    return part.path


# I4
@pytest.mark.parametrize("how", ["missing", "truncated", "flipped"])
@pytest.mark.parametrize("parallelism", [1, 2])
def test_a_damaged_chunk_is_named(how: str, parallelism: int) -> None:
    story, _ = begun("column")
    story.change(range(60), 1)
    manifest = story.checkpoint()
    path = damaged(story, manifest, how)
    (damage,) = story.log.files.verify(manifest)
    assert path in damage.path
    with pytest.raises(CorruptionError, match=path):
        story.contents(manifest, parallelism)


@pytest.mark.parametrize("is_continued", [True, False])
def test_rows_that_chunks_do_not_have_are_missed(is_continued: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    story, first = begun("column")
    parts = first.entries[0].parts
    wrong = [part if part.rows is None else replace(part, rows={"sum": {"value": KEYS + 1}}) for part in parts]
    if not is_continued:
        monkeypatch.setattr(type(story.backend), "continue_from", lambda *_: False)
    with pytest.raises(UnsoundFiles, match=f"{KEYS + 1} rows of state 'value'.*{KEYS} rows"):
        story.contents(manifest_of(1, tuple(wrong)))


def test_a_snapshot_without_one_of_its_chunks_is_damage() -> None:
    story, _ = begun("column")
    story.change(range(60), 1)
    parts = story.checkpoint().entries[0].parts
    lost = next(part for part in parts if part.name.startswith("1-"))
    with pytest.raises(UnsoundFiles, match=f"{lost.name} of a state.*no part with this name"):
        story.contents(manifest_of(2, tuple(part for part in parts if part != lost)))


def test_chunks_of_an_unknown_version_are_refused() -> None:
    found = encode_sections({"chunks": [b'{"version": 2}']})
    data = memoryview(b"".join(bytes(memoryview(one)) for one in found))
    with pytest.raises(CorruptionError, match=r"chunks of state, version 1.*version 2"):
        incremental_snapshot.decode_description(data, "here")
    with pytest.raises(CorruptionError, match="what the chunks of a state are"):
        incremental_snapshot.decode_description(
            memoryview(b"".join(bytes(memoryview(o)) for o in encode_sections({}))), "here"
        )


@pytest.mark.parametrize("use", [Windows, KeptWindows])
def test_windows_write_what_changed_and_which_have_gone(use: type[Windows], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshot, "RANGE_BYTES_MIN", 25_000)
    story = Story(use())
    for window in (1, 2, 3):
        story.change(window, range(KEYS), window)
    first = story.checkpoint()
    story.change(3, range(100), 5)
    story.change(4, range(50, 90), 7)
    manifest = story.checkpoint()
    assert paths(first) < paths(manifest)
    assert new_bytes(manifest) < new_bytes(first) / 20
    story.change(1, None)
    gone = story.checkpoint()
    assert paths(manifest) < paths(gone)
    assert new_bytes(gone) < 6_000, "a window that has gone is a number"
    story.change(1, range(20), 9)
    story.change(4, None)
    story.freeze()
    story.change(1, None)
    story.change(1, range(30, 40), 8)
    story.write()
    story.complete(story.number)
    later = story.checkpoint()
    assert paths(gone) < paths(later)
    story.check()
    story.check(2)
    assert all(bytes(decode_sections(one.payload, "")["meta"]) == b"8" for one in restored_states(story.storage, later))
    story.change(2, None)
    assert not paths(first) & paths(story.checkpoint()), "most have gone"
    story.check()
    story.check(2)
    story.check_no_leak()


@pytest.mark.parametrize("use", [Windows, KeptWindows])
def test_a_window_that_begins_again_within_a_chunk_in_several_files_is_there(
    use: type[Windows], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first chunk is one file; in that after it each file says that the window had gone."""
    story = Story(use())
    for window in (1, 2):
        story.change(window, range(KEYS), window)
    story.checkpoint()
    monkeypatch.setattr(snapshot, "RANGE_BYTES_MIN", 10_000)
    story.change(1, None)
    story.change(1, range(KEYS // 2), 3)
    manifest = story.checkpoint()
    assert len(chunks_of(manifest)) > 3
    story.check()
    story.check(3)


@each_form
def test_what_had_expired_is_not_restored_from_chunks(form: str) -> None:
    use = Many(form)
    use.ttl = hg.TTL(timedelta(milliseconds=100))
    story = Story(use)
    for now_ms, keys in ((0, range(750)), (50, range(750, KEYS)), (90, range(100))):
        story.backend.time.now_ms = use.now_ms = now_ms
        story.change(keys, now_ms)
        if now_ms:
            story.checkpoint()
    story.backend.time.now_ms = use.now_ms = 120
    manifest = story.checkpoint()
    assert len(paths(manifest)) == 2
    assert len(use.living(story.model)) == KEYS - 750 + 100
    for parallelism in (1, 2):
        assert dict(_values(story, manifest, parallelism)) == use.living(story.model)
    story.change(range(3), 120)
    later = story.checkpoint()
    for parallelism in (1, 2):
        assert dict(_values(story, later, parallelism)) == use.living(story.model)


def _values(story: Story, manifest: Manifest, parallelism: int) -> list[tuple[int, str]]:
    return [(row["key0"], row["value"]) for row in story.contents(manifest, parallelism)["value"]]


def on_disk(root: Path) -> Story:
    """Return a story with several chunks, below a directory."""
    root.mkdir()
    story = Story(Many("column"), open_storage(str(root)))
    story.change(range(KEYS), 0)
    story.checkpoint()
    story.change(range(60), 1)
    story.change(range(100, 120), None)
    story.checkpoint()
    return story


def test_states_in_chunks_can_be_looked_at(tmp_path: Path) -> None:
    story = on_disk(tmp_path / "checkpoints")
    root = tmp_path / "checkpoints" / "p"
    (state,) = hg.state_catalog(root).to_dicts()
    assert (state["state"], state["rows"]) == ("value", KEYS - 20)
    assert state["size_bytes"] > 64 << 10
    assert dict(hg.read_state(root, "sum", "value").rows()) == story.model
    assert len(hg.read_state(root, "sum", "value", keys=[17, 18, 110])) == 2
    file = next(path for path in root.rglob("*.f0"))
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(CorruptionError, match=file.name):
        hg.read_state(root, "sum", "value")


def test_a_checkpoint_in_chunks_can_be_changed(tmp_path: Path) -> None:
    on_disk(tmp_path / "checkpoints")
    root = tmp_path / "checkpoints" / "p"
    rows = hg.read_state(root, "sum", "value").with_columns(value=pl.lit("other"))
    for name, changed in (("same", None), ("other", rows)):
        draft = hg.edit_savepoint(root, tmp_path / name)
        if changed is not None:
            draft.replace("sum", "value", changed)
        draft.write()
        wanted = hg.read_state(root, "sum", "value") if changed is None else changed
        found = hg.read_state(tmp_path / name, "sum", "value")
        assert found.sort("id").equals(wanted.sort("id"))
