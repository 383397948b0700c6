"""Objects on a real server: what its answers, and lost ones, become."""

from __future__ import annotations

import contextlib
import re
import socket
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from tests.servers.objects import BUCKET, ObjectServer, careless_server, object_server
from tests.servers.processes import LOOPBACK
from tests.servers.proxy import Wire

import headgate as hg
from headgate import testing
from headgate.errors import StorageError, UsageError
from headgate.storage.base import AlreadyExists, NotFound
from headgate.storage.object_store import ObjectStorage


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ObjectServer]:
    with object_server(tmp_path_factory.mktemp("objects")) as started:
        yield started


@pytest.fixture
def wire(server: ObjectServer) -> Iterator[Wire]:
    made = Wire(server.port)
    yield made
    made.close()


@pytest.fixture
def url(request: pytest.FixtureRequest) -> str:
    return f"s3://{BUCKET}/{request.node.name}"


NOWHERE: dict[str, Any] = {
    "endpoint": "http://127.0.0.1:9",
    "client_options": {"allow_http": True},
    "skip_signature": True,
    "retry_config": {"max_retries": 1},
}


def through(wire: Wire, url: str) -> ObjectStorage:
    return ObjectStorage(url, endpoint=f"http://127.0.0.1:{wire.port}")


def test_a_put_if_absent_with_a_lost_answer_is_known_as_ones_own(wire: Wire, url: str) -> None:
    storage = through(wire, url)
    wire.lose_answer(b"PUT /", is_given=True)
    storage.put_if_absent("a", [b"the same"])
    assert wire.lost_count == 1
    for _ in range(2):  # the same bytes of another writer are another's
        with pytest.raises(AlreadyExists):
            storage.put_if_absent("a", [b"the same"])
    assert storage.get("a") == b"the same"


def test_a_rename_stays_in_the_store_and_does_not_replace(wire: Wire, url: str) -> None:
    storage = through(wire, url)
    size_bytes = 9 << 20
    assert storage.list("") == []
    storage.put("from", [bytes(size_bytes)])
    before = wire.asked_bytes
    storage.rename_if_absent("from", "to/deep")
    assert wire.asked_bytes - before < 100_000
    assert (storage.list(""), len(storage.get("to/deep"))) == (["to/deep"], size_bytes)
    storage.put("from", [b"other"])
    with pytest.raises(AlreadyExists):
        storage.rename_if_absent("from", "to/deep")
    with pytest.raises(NotFound):
        storage.rename_if_absent("nothing", "x")
    assert (storage.list(""), len(storage.get("to/deep"))) == (["from", "to/deep"], size_bytes)


def test_a_rename_with_a_lost_answer_leaves_both_names_or_is_done(wire: Wire, url: str) -> None:
    storage = through(wire, url)
    storage.put("from", [b"1"])
    wire.lose_answer(b"?uploadId=", is_given=True)  # of what completes the upload
    try:
        storage.rename_if_absent("from", "to")
    except (AlreadyExists, StorageError):
        assert storage.list("") == ["from", "to"]
    assert storage.get("to") == b"1"


@pytest.mark.parametrize(
    ("option", "value", "words"),
    [
        ("bucket", "nowhere", "bucket does not exist"),
        ("aws_access_key_id", "stranger", "access key"),
        ("aws_secret_access_key", "wrong", "signature"),
        ("region", "eu-west-1", "eu-west-1"),
    ],
)
def test_what_the_server_refuses_is_one_sentence_and_for_good(
    server: ObjectServer, option: str, value: str, words: str
) -> None:
    if not server.keeps:
        pytest.skip("moto lets everybody in")
    bucket = value if option == "bucket" else BUCKET
    storage = ObjectStorage(f"s3://{bucket}/x", **({} if option == "bucket" else {option: value}))
    for call in (
        lambda: storage.put("a", [b"1"]),
        lambda: storage.put_if_absent("a", [b"1"]),
        lambda: storage.get("a"),
        lambda: storage.get_range("a", 0, 1),
        lambda: storage.list(""),
    ):
        with pytest.raises(StorageError, match=words) as caught:
            call()
        assert not caught.value.is_transient
        assert "\n" not in str(caught.value)
        assert len(str(caught.value)) < 300


def test_a_server_that_is_not_there_is_a_transient_error_that_says_why() -> None:
    storage = ObjectStorage("s3://b/x", **NOWHERE)
    with pytest.raises(StorageError, match=r"http://127.0.0.1:9 does not answer: Connection refused$") as caught:
        storage.put("a", [b"1"])
    assert caught.value.is_transient


@contextlib.contextmanager
def answering(status: int, body: str) -> Iterator[ObjectStorage]:
    """A store that gives one answer to everything."""

    class Handler(BaseHTTPRequestHandler):
        def do_PUT(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self.do_GET()

        def do_GET(self) -> None:
            self.do_HEAD()
            self.wfile.write(body.encode())

        def do_HEAD(self) -> None:
            self.send_response_only(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer((LOOPBACK, 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    endpoint = f"http://{LOOPBACK}:{server.server_port}"
    yield ObjectStorage("s3://b/x", **(NOWHERE | {"endpoint": endpoint, "retry_config": {"max_retries": 0}}))
    server.shutdown()
    thread.join()
    server.server_close()


def error_of(call: Callable[[], object]) -> StorageError:
    with pytest.raises(StorageError) as caught:
        call()
    return caught.value


@pytest.mark.parametrize(
    ("status", "code"),
    [(400, "ExpiredToken"), (400, "InvalidToken"), (400, "KeyTooLongError"), (501, "NotImplemented")],
)
def test_what_repeating_does_not_help_is_for_good(status: int, code: str) -> None:
    body = f"<Error><Code>{code}</Code><Message>It is so.</Message></Error>"
    with answering(status, body) as storage:
        error = error_of(lambda: storage.put("a", [b"1"]))
    assert (str(error), error.is_transient) == (f"cannot put s3://b/x/a: It is so ({code})", False)


@pytest.mark.parametrize(
    ("status", "words", "is_transient"),
    [
        (403, r"answers 403 Forbidden$", False),
        (503, r"answers 503 Service Unavailable$", True),
        (301, r"the bucket is in another region; name its region in AWS_REGION$", False),
    ],
)
def test_an_answer_without_words_is_one_sentence(status: int, words: str, is_transient: bool) -> None:
    with answering(status, "") as storage:
        errors = [error_of(lambda: storage.file("a")), error_of(lambda: storage.get("a"))]
    for error in errors:
        assert re.search(words, str(error))
        assert error.is_transient is is_transient


def test_a_request_that_takes_too_long_is_told_from_a_server_that_is_not_there() -> None:
    soon = {"client_options": {"allow_http": True, "timeout": "50ms"}, "retry_config": {"max_retries": 0}}
    with socket.create_server((LOOPBACK, 0)) as silent:
        endpoint = f"http://{LOOPBACK}:{silent.getsockname()[1]}"
        storage = ObjectStorage("s3://b/x", **(NOWHERE | soon | {"endpoint": endpoint}))
        error = error_of(lambda: storage.put("a", [b"1"]))
    assert str(error).endswith(f"{endpoint} gives no answer within the time-out of a request")
    assert error.is_transient


def test_an_account_that_is_not_named_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AZURE_STORAGE_ACCOUNT_NAME", raising=False)
    with pytest.raises(UsageError, match="name the storage account in AZURE_STORAGE_ACCOUNT_NAME"):
        ObjectStorage("az://container/path")


def test_settings_in_a_url_are_refused_and_not_passed_over() -> None:
    with pytest.raises(UsageError, match=r"has a '\?'; give settings in the environment"):
        ObjectStorage("s3://b/x?region=eu-west-1")


# -- a server that ignores conditions ------------------------------------------------------------------------------

REFUSED = "replaces an object that was to be written only if absent"


@pytest.fixture
def careless() -> Iterator[dict[str, bytes]]:
    with careless_server() as objects:
        yield objects


def pipeline(checkpoints: str | Path, sink: str | Path) -> hg.Pipeline:
    made = hg.Pipeline("p", parallelism=1, checkpointing=hg.Checkpointing(interval="50ms", dir=checkpoints))
    made.source(hg.Generator(rows=20)).sink(hg.FileSink(sink), name="out")
    return made


def test_checkpoints_on_a_server_that_ignores_conditions_are_refused(
    careless: dict[str, bytes], tmp_path: Path
) -> None:
    with pytest.raises(hg.PipelineFailed, match=REFUSED):
        testing.run(pipeline("s3://headgate/checkpoints", tmp_path / "out"))
    assert careless == {}


def test_a_file_sink_on_a_server_that_ignores_conditions_is_refused(careless: dict[str, bytes], tmp_path: Path) -> None:
    with pytest.raises((UsageError, hg.PipelineFailed), match=REFUSED):
        testing.run(pipeline(tmp_path / "checkpoints", "s3://headgate/out"))
    assert [key for key in careless if not key.partition("/")[2].startswith("_")] == []


def test_a_savepoint_on_a_server_that_ignores_conditions_is_refused(careless: dict[str, bytes], tmp_path: Path) -> None:
    made = hg.Pipeline("p", parallelism=1)
    made.source(hg.Generator(rows_per_second=50)).sink(hg.FileSink(tmp_path / "out"), name="out")
    with testing.running(made) as run, pytest.raises(UsageError, match=REFUSED):
        run.take_savepoint("s3://headgate/savepoint")
    assert careless == {}
