"""The URL of a served store: what it names, and what it must not have in it."""

from __future__ import annotations

import pytest

from headgate.errors import UsageError
from headgate.store.addresses import parse_server_url
from headgate.store.store import Store, store_root


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
