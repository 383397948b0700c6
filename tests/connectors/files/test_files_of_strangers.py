"""Whoever keeps copies or notes among a file sink's own objects stops nothing, and loses nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.connectors.files.test_file_committer import begun
from tests.connectors.files.test_file_sink import context, numbers_in, permit, prepared

from headgate.codec.json_files import encode_life
from headgate.connectors.files import publish_log as file_ledger
from headgate.connectors.files.file_sink import FileSink
from headgate.model.pipeline_identity import PipelineIdentity
from headgate.storage.base import Storage
from headgate.storage.urls import open_storage

COPIES = ["old/0000000099", "copy-0000000099", "0000000099.bak", "00000000099", "000000009²", "٠٠٠٠٠٠٠٠٩٩", "README"]
"""Names of copies and notes; ``old`` is what a backup is called."""


def life(token: str) -> PipelineIdentity:
    return PipelineIdentity(token * 16, "/checkpoints", "host", 0)


def left(storage: Storage, directory: str, name: str, data: bytes = b"?") -> str:
    storage.put(f"{directory}/{name}", [data])
    return f"{directory}/{name}"


@pytest.mark.parametrize("name", COPIES)
def test_a_copy_of_a_claim_fences_nobody(tmp_path: Path, name: str) -> None:
    sink = FileSink(tmp_path / "out", roll_interval=0)
    storage = open_storage(sink.url)
    begun(sink, 1, [])
    stray = left(storage, "_claims/p.out", name)
    one = prepared(sink, 1, 1, where=context(generation=2))
    begun(sink, 2, one).commit(permit(1, 2), one)
    assert numbers_in(sink.url) == [1]
    assert sink.owner("p", "out").generation == 2
    assert storage.list("_claims") == sorted(["_claims/p.out/0000000002", stray])


@pytest.mark.parametrize("name", COPIES)
def test_a_copy_of_an_owner_owns_nothing(tmp_path: Path, name: str) -> None:
    sink = FileSink(tmp_path / "out")
    storage = open_storage(sink.url)
    mine = life("a")
    stray = left(storage, "_owners/p.out", name, encode_life(life("b")))
    assert sink.owner("p", "out").life is None
    assert sink.own("p", "out", mine).life == mine
    assert sink.owner("p", "out").life == mine
    assert storage.list("_owners") == sorted(["_owners/p.out/0000000001", stray])


def test_copies_of_manifests_are_left_alone_and_list_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A merge removes what it has merged, and a commit its intents: not what somebody keeps of them."""
    monkeypatch.setattr(file_ledger, "MERGE_AFTER", 2)
    sink = FileSink(tmp_path / "out", roll_interval=0)
    storage = open_storage(sink.url)
    one = prepared(sink, 1, 1)
    begun(sink, 1, one).commit(permit(1), one)
    (manifest,) = storage.list("_committed")
    name, data = manifest.rsplit("/", 1)[1], storage.get(manifest)
    strays = [left(storage, f"_{where}/p.out", f"old/{name}", data) for where in ("committed", "publishing")]
    two = prepared(sink, 2, 2)
    committer = begun(sink, 1, two)
    committer.commit(permit(2), two)
    assert numbers_in(sink.url) == [1, 2]
    (merged,) = [path for path in storage.list("_committed") if "/merged-" in path]
    assert set(strays) <= set(storage.list(""))
    storage.delete(merged)
    assert numbers_in(sink.url) == [], "a copy lists nothing"
