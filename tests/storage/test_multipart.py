"""Uploads in parts on real servers of the S3 protocol: begun by one client, completed by another."""

from __future__ import annotations

import contextlib
import http.server
import threading
from collections.abc import Iterator

import pytest
from tests.conftest import few
from tests.servers.objects import BUCKET, ObjectServer, object_server, program
from tests.servers.proxy import Wire

from headgate.errors import StorageError
from headgate.storage.base import PART_BYTES_MIN, AlreadyExists, NotFound, Storage, Uploads
from headgate.storage.object_store import ObjectStorage
from headgate.storage.urls import open_storage

pytest.importorskip("botocore", reason="botocore is not installed (pip install -e '.[dev]')")


SERVERS = few(sorted(["versitygw", "moto_server"], key=lambda name: program(name) is None), 1)
"""The first one that there is, and for ``make test-repeated`` the other one."""


@pytest.fixture(scope="module", params=SERVERS)
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ObjectServer]:
    with object_server(tmp_path_factory.mktemp("objects"), only=request.param) as started:
        yield started


@pytest.fixture
def storage(server: ObjectServer, request: pytest.FixtureRequest) -> Storage:
    return open_storage(f"s3://{BUCKET}/a place+{request.node.originalname}/ü")


def uploads_of(storage: Storage) -> Uploads:
    assert storage.uploads is not None
    return storage.uploads


def test_an_object_is_there_when_its_upload_is_completed_by_any_client(storage: Storage) -> None:
    uploads = uploads_of(storage)
    first, last = b"1" * PART_BYTES_MIN, b"2"
    upload = uploads.begin("day=1/a b")
    etags = [uploads.put_part("day=1/a b", upload.id, number, part) for number, part in enumerate((first, last), 1)]
    assert storage.list("") == []
    assert uploads.mark("day=1/a b") is None
    other = uploads_of(open_storage(storage.url))
    assert other.list("") == [("day=1/a b", upload.id)]
    other.complete("day=1/a b", upload.id, etags)
    assert storage.get("day=1/a b") == first + last
    assert other.mark("day=1/a b") == upload.mark
    assert other.list("") == []
    with contextlib.suppress(NotFound, AlreadyExists):  # servers differ; the mark decides
        uploads.complete("day=1/a b", upload.id, etags)
    assert uploads.mark("day=1/a b") == upload.mark


def test_a_part_that_is_repeated_counts_once(storage: Storage) -> None:
    uploads = uploads_of(storage)
    upload = uploads.begin("a")
    etags = [uploads.put_part("a", upload.id, 1, b"the same") for _ in range(2)]
    assert etags[0] == etags[1]
    uploads.complete("a", upload.id, etags[:1])
    assert storage.get("a") == b"the same"


def test_an_upload_does_not_replace_what_is_there(storage: Storage) -> None:
    uploads = uploads_of(storage)
    upload = uploads.begin("a")
    etags = [uploads.put_part("a", upload.id, 1, b"new")]
    storage.put("a", [b"old"])
    with pytest.raises(AlreadyExists):
        uploads.complete("a", upload.id, etags)
    assert (storage.get("a"), uploads.mark("a")) == (b"old", "")
    assert uploads.list("") == [("a", upload.id)], "nothing of it is lost"


def test_an_aborted_upload_is_gone(server: ObjectServer, storage: Storage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headgate.storage.multipart.TRIES_MAX", 1)
    uploads = uploads_of(storage)
    upload = uploads.begin("a")
    etags = [uploads.put_part("a", upload.id, 1, b"x")]
    for _ in range(2):
        uploads.abort("a", upload.id)
    assert uploads.list("") == []
    with pytest.raises(NotFound if server.keeps else StorageError):  # moto has an internal error
        uploads.complete("a", upload.id, etags)
    assert storage.list("") == []


def test_uploads_of_other_places_are_not_listed(storage: Storage) -> None:
    other = open_storage(f"{storage.url}-other")
    begun = uploads_of(other).begin("a")
    deep = uploads_of(storage).begin("deep/a")
    beside = uploads_of(storage).begin("deeper")
    assert uploads_of(storage).list("deep") == [("deep/a", deep.id)]
    assert uploads_of(storage).list("") == [("deep/a", deep.id), ("deeper", beside.id)]
    assert uploads_of(other).list("") == [("a", begun.id)]


def test_a_copy_keeps_the_mark_and_replaces_nothing(storage: Storage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headgate.storage.multipart.COPIED_BYTES", PART_BYTES_MIN)
    uploads = uploads_of(storage)
    data = b"x" * PART_BYTES_MIN + b"y" * 7
    storage.put("a b", [data])
    uploads.copy_if_absent("a b", "c", len(data), "marked")
    assert (storage.get("c"), uploads.mark("c")) == (data, "marked")
    with pytest.raises(AlreadyExists):
        uploads.copy_if_absent("a b", "c", len(data), "marked")
    with pytest.raises(NotFound):
        uploads.copy_if_absent("nothing", "d", 1, "marked")
    assert uploads.list("") == []


def test_a_small_object_is_copied_whole(
    server: ObjectServer, storage: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Amazon says that it takes no range of an object below 5 MB."""
    storage.put("a", [b"x"])
    wire = Wire(server.port)
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{wire.port}")
    wire.lose_answer(b"x-amz-copy-source-range")
    uploads_of(open_storage(storage.url)).copy_if_absent("a", "b", 1, "marked")
    wire.close()
    assert wire.lost_count == 0
    assert storage.get("b") == b"x"


def test_an_upload_is_found_by_its_name(storage: Storage) -> None:
    uploads = uploads_of(storage)
    first, second, longer = uploads.begin("a b"), uploads.begin("a b"), uploads.begin("a b+c")
    assert [uploads.is_open("a b", one.id) for one in (first, second)] == [True, True]
    assert uploads.is_open("a b+c", longer.id)
    uploads.abort("a b", first.id)
    assert [uploads.is_open("a b", one.id) for one in (first, second)] == [False, True]
    assert not uploads.is_open("nothing", first.id)


def test_a_lost_answer_is_resolved_by_the_mark(
    server: ObjectServer, storage: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    upload = uploads_of(storage).begin("a")
    etags = [uploads_of(storage).put_part("a", upload.id, 1, b"x")]
    wire = Wire(server.port)
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{wire.port}")
    through = uploads_of(open_storage(storage.url))
    wire.lose_answer(b"POST /", is_given=True)
    with contextlib.suppress(NotFound, AlreadyExists):
        through.complete("a", upload.id, etags)
    wire.close()
    assert wire.lost_count == 1
    assert uploads_of(storage).mark("a") == upload.mark


def test_what_the_server_refuses_is_one_sentence(server: ObjectServer, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(StorageError, match=r"NoSuchBucket") as caught:
        uploads_of(open_storage("s3://no-such-bucket/a")).begin("a")
    assert not caught.value.is_transient
    assert "\n" not in str(caught.value)
    monkeypatch.setattr("headgate.storage.multipart.TRIES_MAX", 1)
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    with pytest.raises(StorageError, match=r"begin the upload of .*127\.0\.0\.1:9") as caught:
        uploads_of(open_storage(f"s3://{BUCKET}/a")).begin("a")
    assert caught.value.is_transient


@contextlib.contextmanager
def answering(status: int, body: bytes, monkeypatch: pytest.MonkeyPatch) -> Iterator[Uploads]:
    """Give uploads to what answers everything alike."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def answer(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length") or 0))
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_GET = do_POST = do_PUT = answer  # noqa: N815 - names of the library

        def log_message(self, *_: object) -> None:
            return

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{server.server_port}")
        yield uploads_of(open_storage(f"s3://{BUCKET}/a"))
        server.shutdown()
        thread.join()


def test_a_missing_right_to_list_is_named(server: ObjectServer, monkeypatch: pytest.MonkeyPatch) -> None:
    body = b"<Error><Code>AccessDenied</Code><Message>Access Denied.</Message></Error>"
    with answering(403, body, monkeypatch) as uploads:
        for ask in (lambda: uploads.list(""), lambda: uploads.is_open("a", "b")):
            with pytest.raises(StorageError, match=r"needs the right s3:ListBucketMultipartUploads, or") as caught:
                ask()
            assert not caught.value.is_transient
        with pytest.raises(StorageError, match=r"begin the upload of .*: Access Denied \(AccessDenied\)$"):
            uploads.begin("a")
        with pytest.raises(StorageError, match=r"complete the upload of .*: Access Denied \(AccessDenied\)$"):
            uploads.complete("a", "b", ["c"])


def test_an_answer_without_what_was_asked_for_is_an_error_that_may_pass(
    server: ObjectServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    with answering(200, b"<html>Please log in.</html>", monkeypatch) as uploads:
        for ask in (lambda: uploads.begin("a"), lambda: uploads.put_part("a", "b", 1, b"x")):
            with pytest.raises(StorageError, match=r"the answer says no \w+$") as caught:
                ask()
            assert caught.value.is_transient


@pytest.mark.parametrize(
    ("name", "value", "has_uploads"),
    [
        ("AWS_REQUEST_PAYER", "true", False),
        ("aws_server_side_encryption", "aws:kms", False),
        ("AWS_VIRTUAL_HOSTED_STYLE_REQUEST", "true", False),
        ("AWS_VIRTUAL_HOSTED_STYLE_REQUEST", "false", True),
        ("AWS_PROFILE", "not there", True),  # obstore does not know profiles
        ("AWS_SKIP_SIGNATURE", "true", True),
    ],
)
def test_settings_that_only_obstore_follows_leave_uploads_out(
    name: str, value: str, has_uploads: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, value)
    assert (open_storage("s3://bucket/a").uploads is not None) is has_uploads


def test_other_stores_have_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "a")
    for url in ("memory://a", "obstore+memory:///", "az://container/a"):
        assert open_storage(url).uploads is None
    assert ObjectStorage("s3://bucket/a", skip_signature=True).uploads is None, "options are of obstore"
