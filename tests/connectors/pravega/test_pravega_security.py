"""A Pravega that demands TLS and a login, for its controller and its segment stores."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.servers.pravega import (
    PASSWORD,
    PASSWORD_VARIABLE,
    READER,
    SCOPE,
    PravegaServer,
    pravega_server,
    read_all,
)
from tests.support.killing import run_killing

import headgate as hg
from headgate import testing
from headgate.connectors.base import HoldContext
from headgate.connectors.pravega.controller import PravegaSecurity, StreamName
from headgate.connectors.pravega.scaled_stream import Position
from headgate.connectors.pravega.segment_store import Access
from headgate.connectors.pravega.source import Pravega
from headgate.environment import SYSTEM_ENVIRONMENT
from headgate.errors import HeadgateError, StorageError, UsageError
from headgate.model.ids import CheckpointId, Generation

pytestmark = pytest.mark.xdist_group("secure-pravega")
"""They share a server."""


@pytest.fixture(scope="module")
def secure() -> Iterator[PravegaServer]:
    with pravega_server(is_secure=True) as server:
        yield server


def new_stream(server: PravegaServer, segments: int = 1) -> str:
    name = StreamName(SCOPE, f"t-{uuid.uuid4().hex[:12]}")
    server.client.create_stream(name, segments)
    return str(name)


def source_of(server: PravegaServer, stream: str, **changes: Any) -> Pravega:
    security = replace(server.security, **changes)
    return Pravega(server.address, stream, format="text", end="latest", security=security)


@pytest.mark.deep
@pytest.mark.long
def test_a_pipeline_writes_and_another_reads_over_tls_with_a_login(secure: PravegaServer, tmp_path: Path) -> None:
    stream = new_stream(secure, 2)
    numbers = [str(number) * 100 for number in range(3_000)]  # more than what TLS gives out at once
    writing = hg.Pipeline(f"w-{uuid.uuid4().hex}", checkpointing=hg.Checkpointing(interval="50ms", dir=tmp_path))
    rows = [{"value": number} for number in numbers]
    sink = hg.PravegaSink(secure.address, stream, key="value", value="value", security=secure.security)
    writing.source(hg.FromRows(rows), name="in").sink(sink, name="out")
    assert testing.run(writing, timeout_s=600, parallelism=2).is_finished

    reading = hg.Pipeline(f"r-{uuid.uuid4().hex}", checkpointing=hg.Checkpointing(interval="50ms", dir=tmp_path))
    found = testing.Collect(tmp_path / "out")
    reading.source(source_of(secure, stream), name="in").sink(found, name="out")
    result = run_killing(reading, 1, timeout_s=600, parallelism=2)
    assert result.is_finished
    assert sorted(row["value"] for row in found.rows()) == sorted(numbers)


@pytest.mark.deep
@pytest.mark.long
def test_a_wrong_login_and_a_missing_right_are_one_sentence(
    secure: PravegaServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = new_stream(secure)
    for changes in ({"user": "stranger"}, {"user": "", "secret": ""}):
        with pytest.raises(UsageError, match=r"Pravega at .* refuses \w+: ") as caught:
            source_of(secure, stream, **changes).schema()
        assert "\n" not in str(caught.value)
    monkeypatch.setenv(PASSWORD_VARIABLE, "wrong")
    with pytest.raises(UsageError, match=r"Pravega at .* refuses \w+: ") as caught:
        source_of(secure, stream).schema()
    assert "wrong" not in str(caught.value)
    monkeypatch.delenv(PASSWORD_VARIABLE)
    with pytest.raises(UsageError, match=f"set the environment variable {PASSWORD_VARIABLE}"):
        source_of(secure, stream).schema()


@pytest.mark.deep
@pytest.mark.long
def test_who_may_only_read_reads_and_is_refused_as_writer(secure: PravegaServer) -> None:
    stream = new_stream(secure)
    security = replace(secure.security, user=READER)
    assert read_all(source_of(secure, stream, user=READER)) == []
    timed = Pravega(secure.address, stream, format="text", end="latest", noted_time=True, security=security)
    assert read_all(timed) == []
    client = Pravega(secure.address, stream, security=security).client()
    with pytest.raises(UsageError, match="permission denied"):
        Access(client, StreamName.parse(stream), SYSTEM_ENVIRONMENT).token()
    client.close()


@pytest.mark.deep
@pytest.mark.long
def test_certificates_are_checked(secure: PravegaServer) -> None:
    stream = new_stream(secure)
    with pytest.raises(HeadgateError, match=f"Pravega at {secure.address}"):
        source_of(secure, stream, ca_file="").schema()
    with pytest.raises(HeadgateError, match=f"Pravega at {secure.address}"):
        source_of(secure, stream, tls=False, ca_file="").schema()
    store, trusts_none = secure.client.place(StreamName.parse(stream), 0), replace(secure.security, ca_file="")
    client = Pravega(secure.address, stream, security=trusts_none).client()
    with pytest.raises(StorageError, match="self-signed certificate") as caught:
        Access(client, StreamName.parse(stream), SYSTEM_ENVIRONMENT).connect(*store, "a store")
    assert not caught.value.is_transient
    client.close()


@pytest.mark.deep
@pytest.mark.long
def test_a_password_in_a_file_is_read_again(secure: PravegaServer, tmp_path: Path) -> None:
    stream, file = new_stream(secure), tmp_path / "password"
    file.write_text("wrong")
    source = source_of(secure, stream, secret=f"file:{file}")
    with pytest.raises(UsageError, match="refuses"):
        source.schema()
    file.write_text(f"{PASSWORD}\n")
    assert read_all(source) == []


@pytest.mark.deep
@pytest.mark.long
def test_a_token_that_has_expired_is_replaced(secure: PravegaServer) -> None:
    stream = new_stream(secure)
    name = StreamName.parse(stream)
    tokens = Access(secure.client, name, SYSTEM_ENVIRONMENT)
    first = tokens.token()
    assert first
    assert tokens.token() == first, "it is used for a while"
    tokens.forget_token()
    assert tokens.token(), "and asked for again when a store refuses it"


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"user": "u", "secret": "hunter2"}, "needs secret='env:NAME' or secret='file:/path'"),
        ({"user": "u"}, "needs secret="),
        ({"ca_file": "/x.pem"}, "add tls=True"),
    ],
)
def test_security_of_pravega_that_cannot_work_is_refused(options: dict[str, str], problem: str) -> None:
    with pytest.raises(UsageError, match=problem) as caught:
        PravegaSecurity(**options)  # type: ignore[arg-type]
    assert "hunter2" not in str(caught.value)


def test_logins_of_pravega_are_sent_as_its_handlers_want_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET", "1111_aaaa")
    assert PravegaSecurity(user="admin", secret="env:SECRET").login() == (
        ("authorization", "Basic YWRtaW46MTExMV9hYWFh"),
    )
    assert PravegaSecurity(secret="env:SECRET").login() == (("authorization", "Bearer 1111_aaaa"),)
    assert PravegaSecurity().login() == ()
    assert "SECRET" not in repr(PravegaSecurity(user="admin", secret="env:SECRET"))


def test_an_authority_of_pravega_that_is_not_there_is_named(tmp_path: Path) -> None:
    security = PravegaSecurity(tls=True, ca_file=str(tmp_path / "ca.pem"))
    for look in (security.context, security.authority):
        with pytest.raises(UsageError, match=r"cannot use .*/ca.pem: No such file"):
            look()


@pytest.mark.deep
@pytest.mark.long
def test_the_positions_of_a_group_are_written_with_a_login_and_read_with_less(secure: PravegaServer) -> None:
    """PV14, PV15."""
    stream, name = new_stream(secure), f"g-{uuid.uuid4().hex[:12]}"
    source = Pravega(secure.address, stream, format="text", group=name, security=secure.security)
    holder = HoldContext("p", "in", "life", Generation(1))
    source.publish(holder, None, {}, begins=True)
    source.publish(holder, CheckpointId(1), {f"{stream}/0": Position(20).encode()}, begins=False)
    reader = replace(secure.security, user=READER)
    beginning = Pravega(secure.address, stream, format="text", start=f"group:{name}", security=reader)
    assert beginning.begin() == {0: 20}
