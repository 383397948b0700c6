"""What a directory remembers of who writes to it (docs/spec/lives.md)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from tests.connectors.files.test_file_committer import begun
from tests.connectors.files.test_file_sink import context, numbers_in, permit, prepared
from tests.storage.faulty import Fault, FaultKind, FaultyStorage
from tests.storage.looked import Looked

from headgate.codec.json_files import encode_life
from headgate.connectors.files import publish_log as file_ledger
from headgate.connectors.files.file_sink import FileOwner, FileSink, owners_in
from headgate.connectors.files.publish_log import SinkIdentity
from headgate.errors import CorruptionError, StorageError
from headgate.model.ids import Generation
from headgate.model.pipeline_identity import OtherSink, Owner, PipelineIdentity
from headgate.storage.base import AlreadyExists, Bytes, Storage
from headgate.storage.memory import MemoryStorage
from headgate.storage.urls import open_storage

SINK = SinkIdentity("p.q", "out/1")
A, B = PipelineIdentity("a", "/a", "h", 1), PipelineIdentity("b", "/b", "h", 2)


class MetOnTheWay(MemoryStorage):
    """Another life comes between the look and the put."""

    def __init__(self) -> None:
        super().__init__("met")
        self.meets: Callable[[], object] | None = None

    def put_if_absent(self, path: str, parts: list[Bytes]) -> None:  # type: ignore[override]
        meets, self.meets = self.meets, None
        if meets is not None:
            meets()
        super().put_if_absent(path, parts)


def test_of_two_lives_that_come_at_once_one_gets_the_directory() -> None:  # LV3
    storage = MetOnTheWay()
    mine, other = FileOwner(storage, SINK), FileOwner(storage, SINK)
    storage.meets = lambda: other.own(B)
    assert mine.own(A) == Owner(B)
    assert mine.owner() == other.own(B) == Owner(B)


def test_telling_and_forgetting_twice_changes_nothing() -> None:  # LV3, LV4
    storage = MemoryStorage("twice")
    owner = FileOwner(storage, SINK)
    assert owner.owner() == Owner()
    assert owner.own(A) == owner.own(A) == Owner(A)
    written = storage.list("")
    assert len(written) == 1
    assert owner.forget() == Owner(A)
    assert owner.forget() == Owner(is_forgotten=True)
    assert owner.own(B) == Owner(B)
    assert owner.own(A) == Owner(B)
    assert len(storage.list("")) == 3


def test_an_answer_that_was_lost_is_given_again() -> None:  # LV3
    storage = FaultyStorage(MemoryStorage("lost"), [Fault(FaultKind.TIMEOUT_AFTER_EFFECT, "put_if_absent")])
    owner = FileOwner(storage, SINK)
    with pytest.raises(StorageError):
        owner.own(A)
    assert owner.own(A) == Owner(A)


def test_a_damaged_record_is_named_and_never_taken_for_nobody(tmp_path: Path) -> None:
    sink = FileSink(tmp_path)
    sink.own("p", "out", A)
    (record,) = (tmp_path / "_owners/p.out").iterdir()
    record.write_bytes(record.read_bytes().replace(b'"/a"', b'"/b"'))
    with pytest.raises(CorruptionError, match=r"_owners/p\.out/0000000001"):
        sink.own("p", "out", B)


def test_forgetting_keeps_the_fence(tmp_path: Path) -> None:  # LV4
    sink = FileSink(tmp_path)
    sink.open_committer("p", "out", Generation(7)).recover([])
    sink.own("p", "out", A)
    sink.target("p", "out").forget()
    assert sink.owner("p", "out") == Owner(None, Generation(7), is_forgotten=True)


@pytest.mark.parametrize("name", ["p", "a.b", "ä-x", "a~2e", "p.q"])
def test_an_identity_is_read_back_from_its_text(name: str) -> None:
    assert SinkIdentity.parse(str(SinkIdentity(name, "out-" + name))) == SinkIdentity(name, "out-" + name)


@pytest.mark.parametrize("call", [lambda owner: owner.own(A), lambda owner: owner.forget()])
def test_whoever_always_finds_another_one_quicker_gives_up_with_a_sentence(call: Callable[[FileOwner], object]) -> None:
    class Busy(MemoryStorage):
        def put_if_absent(self, path: str, parts: list[Bytes]) -> None:  # type: ignore[override]
            raise AlreadyExists(path)

    with pytest.raises(StorageError, match="others change it all the time") as caught:
        call(FileOwner(Busy("busy"), SINK))
    assert caught.value.is_transient


def test_other_sinks_of_the_pipeline_are_known_and_nothing_else_is_one() -> None:
    storage = MemoryStorage("others")
    former = SinkIdentity("p.q", "former")
    FileOwner(storage, former).own(B)
    storage.put(former.claim(Generation(7)), [b""])
    storage.put(SinkIdentity("p.q", "told-nothing").claim(Generation(2)), [b""])
    FileOwner(storage, SinkIdentity("p", "q")).own(B)
    for stray in (
        f"{former.owners}/notes",
        "_owners/p~2eq.empty/README",
        "_owners/p~2Eq.other/0000000001",
        "_owners/7",
    ):
        storage.put(stray, [b"somebody else's"])
    others = (OtherSink("former", Owner(B, Generation(7))), OtherSink("told-nothing", Owner(None, Generation(2))))
    assert FileOwner(storage, SINK).owner() == Owner(others=others)
    FileOwner(storage, SINK).own(A)
    assert FileOwner(storage, SINK).owner() == Owner(A, others=others)


@pytest.mark.parametrize("count", [1, 12])
def test_one_look_at_a_directory_says_whose_all_its_sinks_are(count: int) -> None:
    storage = Looked()
    sinks = [SinkIdentity(f"p{number % 2}", f"out-{number:02}") for number in range(count)]
    for sink in sinks:
        FileOwner(storage, sink).own(A)
    storage.put(SinkIdentity("p0", "told-nothing").claim(Generation(2)), [b""])
    storage.put("_owners/p0.empty/notes", [b"somebody else's"])
    storage.seen.clear()
    told = {sink: Owner(A) for sink in sinks}
    assert owners_in(storage) == {**told, SinkIdentity("p0", "told-nothing"): Owner(None, Generation(2))}
    assert storage.seen == ["_claims", "_owners", *(f"{sink.owners}/0000000001" for sink in sorted(sinks))]


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
