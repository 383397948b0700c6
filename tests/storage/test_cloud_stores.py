"""Objects on Azure's and Google's protocols: lost answers, renames, and what is refused."""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.servers.clouds import AzureServer, GoogleServer, azure_environment, cloud_server, google_environment
from tests.servers.objects import in_environment
from tests.servers.proxy import Wire

from headgate.errors import StorageError, UsageError
from headgate.storage.base import AlreadyExists, NotFound, Storage, refuse_unless_exclusive
from headgate.storage.object_store import ObjectStorage
from headgate.storage.urls import open_readable, open_storage

AZURE = pytest.param("azure", marks=(pytest.mark.deep, pytest.mark.xdist_group("azure")))


@pytest.fixture(scope="module", params=["google", AZURE])
def server(request: pytest.FixtureRequest) -> Iterator[AzureServer | GoogleServer]:
    with cloud_server(request.param) as started:
        yield started


@pytest.fixture
def wire(server: AzureServer | GoogleServer) -> Iterator[Wire]:
    made = Wire(server.port)
    yield made
    made.close()


@pytest.fixture
def storage(server: AzureServer | GoogleServer, wire: Wire, tmp_path: Path) -> Iterator[Storage]:
    """A client that reaches the server through the wire."""
    is_azure = isinstance(server, AzureServer)
    with in_environment(azure_environment(wire.port) if is_azure else google_environment(tmp_path, wire.port)):
        yield open_storage(f"{server.url}/{tmp_path.name}")


def calls(storage: Storage) -> list[Callable[[], object]]:
    return [
        lambda: storage.put("a", [b"1"]),
        lambda: storage.put_if_absent("a", [b"1"]),
        lambda: storage.get("a"),
        lambda: storage.get_range("a", 0, 1),
        lambda: storage.list(""),
    ]


def test_a_store_that_honours_conditions_is_accepted(storage: Storage) -> None:
    refuse_unless_exclusive(storage, "d")
    assert storage.list("") == []


def test_a_put_if_absent_with_a_lost_answer_is_known_as_ones_own(storage: Storage, wire: Wire) -> None:
    wire.lose_answer(b"PUT /", is_given=True)
    storage.put_if_absent("a", [b"the same"])
    assert wire.lost_count == 1
    with pytest.raises(AlreadyExists):  # the same bytes of another writer are another's
        storage.put_if_absent("a", [b"the same"])
    assert storage.get("a") == b"the same"


def test_a_rename_does_not_replace(storage: Storage, wire: Wire, server: AzureServer | GoogleServer) -> None:
    size_bytes = 9 << 20
    storage.put("from", [bytes(size_bytes)])
    before = wire.asked_bytes
    storage.rename_if_absent("from", "to/deep")
    is_copied_by_store = wire.asked_bytes - before < 100_000
    assert is_copied_by_store == isinstance(server, GoogleServer)  # Azure may copy later than it answers
    assert (storage.list(""), len(storage.get("to/deep"))) == (["to/deep"], size_bytes)
    storage.put("from", [b"other"])
    with pytest.raises(AlreadyExists):
        storage.rename_if_absent("from", "to/deep")
    with pytest.raises(NotFound):
        storage.rename_if_absent("nothing", "x")
    assert (storage.list(""), len(storage.get("to/deep"))) == (["from", "to/deep"], size_bytes)


def test_a_rename_with_a_lost_answer_leaves_both_names_or_is_done(
    storage: Storage, wire: Wire, server: AzureServer | GoogleServer
) -> None:
    storage.put("from", [b"1"])
    wire.lose_answer(b"copy-source" if isinstance(server, GoogleServer) else b"PUT /", is_given=True)
    try:
        storage.rename_if_absent("from", "to")
    except (AlreadyExists, StorageError):
        assert storage.list("") == ["from", "to"]
    assert wire.lost_count == 1
    assert storage.get("to") == b"1"


def test_a_missing_bucket_is_one_sentence_and_for_good(server: AzureServer | GoogleServer) -> None:
    for call in calls(open_storage(server.url.replace("headgate", "nowhere"))):
        with pytest.raises(StorageError, match=r"specified (bucket|container) does not exist") as caught:
            call()
        assert not caught.value.is_transient
        assert "\n" not in str(caught.value)
    with pytest.raises(StorageError, match=r"specified (bucket|container) does not exist"):
        open_readable(server.url.replace("headgate", "nowhere")).files("")


def test_credentials_that_are_wrong_are_one_sentence_and_for_good(
    server: AzureServer | GoogleServer, tmp_path: Path
) -> None:
    if isinstance(server, GoogleServer):
        with in_environment({"GOOGLE_SERVICE_ACCOUNT": str(tmp_path / "nothing")}), pytest.raises(UsageError) as told:
            open_storage(server.url)
        assert "Unable to open service account file" in str(told.value)
        return
    for name, value in {
        "AZURE_STORAGE_ACCOUNT_KEY": base64.b64encode(b"wrong").decode(),
        "AZURE_STORAGE_ACCOUNT_NAME": "stranger",
    }.items():
        with in_environment({name: value}):
            storage = open_storage(server.url)
        for call in calls(storage):
            with pytest.raises(StorageError, match="failed to authenticate the request") as caught:
                call()
            assert not caught.value.is_transient
            assert "\n" not in str(caught.value)


def test_a_server_that_is_not_there_is_a_transient_error_that_says_why(
    server: AzureServer | GoogleServer, tmp_path: Path
) -> None:
    environment = azure_environment(9) if isinstance(server, AzureServer) else google_environment(tmp_path, 9)
    with in_environment(environment):
        storage = ObjectStorage(server.url, retry_config={"max_retries": 1})
    for call in calls(storage):
        with pytest.raises(StorageError, match=r"http://127.0.0.1:9 does not answer: Connection refused$") as caught:
            call()
        assert caught.value.is_transient
