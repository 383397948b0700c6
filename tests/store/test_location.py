"""The URLs of stores that machines share, and of served ones: what they name, and what they must not have in them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

import headgate as hg
from headgate.errors import UsageError
from headgate.store.addresses import parse_server_url
from headgate.store.location import open_shared, store_root
from headgate.store.store import Store


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ("postgresql://u@h/db", "postgresql://u@h/db"),
        ("postgres://u@h:1/db", "postgresql://u@h:1/db"),
        ("postgresql://u@h/db?schema=headgate", "postgresql://u@h/db"),
        ("postgresql://u@h/db?schema=b&sslmode=verify-full", "postgresql://u@h/db?sslmode=verify-full&schema=b"),
        ("postgresql://u@h1:1,h2:2/db?target_session_attrs=read-write", None),
        ("postgresql:///db?host=%2Frun", None),
    ],
)
def test_a_store_has_one_spelling(given: str, named: str | None) -> None:
    assert store_root(given) == (named or given)
    assert store_root(store_root(given)) == store_root(given)


@pytest.mark.parametrize(
    "url",
    [
        "postgresql://u:very-secret@h/db",
        "postgresql://u:very-secret@h/db?schema=x",
        "postgresql://u@h/db?password=very-secret",
        "postgresql://u@h/db?sslmode=require&sslpassword=very-secret",
        "postgres://u@h/db?pass%77ord=very-secret",
    ],
)
def test_a_password_in_a_url_is_refused_and_not_shown(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for use in (store_root, Store.open, Store.exists, lambda x: hg.StreamSource("s", store=x)):
        with pytest.raises(UsageError, match="has a password in it") as caught:
            use(url)  # type: ignore[operator]
        assert "very-secret" not in str(caught.value)
        assert "passfile" in str(caught.value)
    monkeypatch.setenv("HEADGATE_STORE", url)
    with pytest.raises(UsageError, match="has a password in it"):
        hg.StreamSink("s")


def test_a_key_in_the_place_of_the_chunks_is_refused_and_not_shown() -> None:
    with pytest.raises(UsageError, match="password or key") as caught:
        open_shared("postgresql://u@h/db", "s3://key:very-secret@bucket/prefix")
    assert "very-secret" not in str(caught.value)


def test_a_store_on_postgresql_needs_its_client_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "headgate.store.catalogue.postgresql", raising=False)
    monkeypatch.setitem(sys.modules, "psycopg", None)
    for use in (Store.exists, Store.open):
        with pytest.raises(
            UsageError, match=r"needs the package psycopg, .*: pip install 'headgate-streams\[postgres\]'"
        ):
            use("postgresql://u@h/db")
    monkeypatch.setitem(sys.modules, "selectors", None)
    with pytest.raises(ModuleNotFoundError, match="selectors"):
        Store.exists("postgresql://u@h/db")


@pytest.mark.parametrize("schema", ["", "Big", "a b", 'x"', "pg_own", "x" * 64, "a;b"])
def test_a_schema_that_cannot_be_is_refused(schema: str) -> None:
    with pytest.raises(UsageError, match="schema"):
        store_root(f"postgresql://u@h/db?schema={schema}")


def test_what_is_said_when_the_store_is_made_is_not_part_of_its_name(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="chunks="):
        store_root("postgresql://u@h/db?chunks=s3://b")
    with pytest.raises(UsageError, match="chunks= is for a store on PostgreSQL"):
        Store.open(tmp_path, chunks="s3://b")
    with pytest.raises(UsageError, match="postgresql://"):
        store_root("mysql://u@h/db")


@pytest.mark.parametrize(
    ("given", "named", "is_tls"),
    [
        ("headgate://127.0.0.1:4060", "headgate://127.0.0.1:4060", False),
        ("headgate://Store.Example.com", "headgate://store.example.com:4060", True),
        ("HEADGATE://localhost:5000/", "headgate://localhost:5000", False),
        ("http://127.0.0.1:4060", "headgate://127.0.0.1:4060", False),
        ("https://store.example.com:4060", "headgate://store.example.com:4060", True),
        ("https://store.example.com", "headgate://store.example.com:443", True),
        ("http://store.example.com:4060", "http://store.example.com:4060", False),
        ("http://store.example.com", "http://store.example.com:80", False),
        ("https://localhost:1", "https://localhost:1", True),
        ("headgate://[::1]:7", "headgate://[::1]:7", False),
    ],
)
def test_a_served_store_has_one_spelling(given: str, named: str, is_tls: bool) -> None:
    assert store_root(given) == named
    assert store_root(named) == named
    assert parse_server_url(given).is_tls is parse_server_url(named).is_tls is is_tls


@pytest.mark.parametrize("url", ["headgate://me:secret@h:1", "https://secret@h", "headgate://:secret@h"])
def test_a_token_in_a_url_is_refused_and_not_shown(url: str) -> None:
    with pytest.raises(UsageError, match=r"\$HEADGATE_STORE_TOKEN or .* \$HEADGATE_STORE_TOKEN_FILE names") as caught:
        store_root(url)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    "url",
    ["headgate://", "headgate://h:x", "headgate://h:99999", "headgate://h:1/store", "https://h/?a=b", "http://h#a"],
)
def test_what_cannot_be_the_url_of_a_server_is_refused(url: str) -> None:
    with pytest.raises(UsageError, match="headgate://host:port"):
        store_root(url)


def test_the_server_says_where_chunks_are() -> None:
    with pytest.raises(UsageError, match="chunks="):
        Store._open_served("headgate://127.0.0.1:1", None, "s3://bucket")
