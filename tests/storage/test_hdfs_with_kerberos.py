"""HDFS with Kerberos: tickets are taken from where users put them, and one that is missing is said in a sentence.

Each test has a process of its own where it needs a login of its own: a client keeps a connection that stands.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.runtime.runs.test_storages import WAIT_S, Watching, numbers_at, pipeline
from tests.servers.hdfs import USER, SecureHdfs, secure_hdfs

from headgate import testing
from headgate.errors import StorageError
from headgate.storage.hdfs import HdfsStorage

pytestmark = [pytest.mark.xdist_group("hdfs"), pytest.mark.deep, pytest.mark.long]


@pytest.fixture(scope="module")
def started() -> Iterator[SecureHdfs]:
    with secure_hdfs() as cluster:
        yield cluster


@pytest.fixture
def cluster(started: SecureHdfs) -> Iterator[SecureHdfs]:
    started.log_in()
    yield started
    started.log_in()


PUT = """
import sys
from headgate.errors import StorageError
from headgate.storage.urls import open_storage
storage = open_storage(sys.argv[1])
try:
    storage.put_if_absent("a", [b"1"])
    print(storage.get("a").decode())
except StorageError as error:
    print(error, error.is_transient)
"""


def put_there(url: str, **variables: str) -> str:
    """Return what another process says that writes and reads a file."""
    command = [sys.executable, "-c", PUT, url]
    return subprocess.run(command, env={**os.environ, **variables}, capture_output=True, text=True, check=True).stdout


ADVICE = "run kinit for the cache that KRB5CCNAME names, or set KRB5_CLIENT_KTNAME to a keytab"


def test_no_ticket_and_an_expired_one_are_one_sentence_and_pass_with_a_new_one(
    cluster: SecureHdfs, tmp_path: Path
) -> None:
    url = f"{cluster.url}/{tmp_path.name}"
    for refuse, why in (
        (cluster.log_out, "there is no Kerberos ticket"),
        (cluster.log_in_for_a_moment, "the Kerberos ticket has expired"),
    ):
        refuse()
        storage = HdfsStorage(url)
        for _ in range(2):
            with pytest.raises(StorageError, match=f"{why}; {ADVICE}") as caught:
                storage.put("a", [b"1"])
            assert caught.value.is_transient
            assert "\n" not in str(caught.value)
        cluster.log_in()
        storage.put("a", [why.encode()])
        assert storage.get("a") == why.encode()


def test_a_keytab_is_enough_and_gives_another_ticket_when_one_has_expired(cluster: SecureHdfs, tmp_path: Path) -> None:
    cache, configuration = tmp_path / "tickets", tmp_path / "krb5.conf"
    of_kdc = cluster.kdc.configuration.read_text()
    configuration.write_text(of_kdc.replace("[libdefaults]", "[libdefaults]\n ticket_lifetime = 1s"))
    variables = {
        "KRB5_CONFIG": str(configuration),
        "KRB5CCNAME": f"FILE:{cache}",
        "KRB5_CLIENT_KTNAME": f"FILE:{cluster.configuration.parent / f'{USER}.keytab'}",
    }
    for number in range(2):
        assert put_there(f"{cluster.url}/{tmp_path.name}-{number}", **variables) == "1\n"
        cluster.kdc.wait_until_expired(cache)


def test_a_delegation_token_is_enough_for_a_process_without_tickets(cluster: SecureHdfs, tmp_path: Path) -> None:
    cluster.delegation_token(tmp_path / "token")
    variables = {"KRB5CCNAME": f"FILE:{tmp_path / 'tickets'}", "HADOOP_TOKEN_FILE_LOCATION": str(tmp_path / "token")}
    assert put_there(f"{cluster.url}/{tmp_path.name}", **variables) == "1\n"


def test_a_missing_library_is_said_and_does_not_pass(cluster: SecureHdfs, tmp_path: Path) -> None:
    (tmp_path / "libgssapi_krb5.so.2").write_bytes(b"")
    told = put_there(f"{cluster.url}/{tmp_path.name}", LD_LIBRARY_PATH=str(tmp_path))
    assert "install it (on Debian libgssapi-krb5-2)" in told
    assert told.endswith(" False\n")


def test_a_pipeline_goes_on_when_its_ticket_is_renewed(cluster: SecureHdfs) -> None:
    place, watching = f"{cluster.url}/renewed", Watching()
    with testing.running(pipeline(place, 2, 5_000), observer=watching) as run:
        watching.wait_checkpoints(2)
        cluster.kill("name_node")  # what is connected stays logged in
        cluster.log_in_for_a_moment()
        cluster.start("name_node")
        watching.wait(lambda: any("the Kerberos ticket has expired" in note for note in watching.notes))
        cluster.log_in()
        watching.wait_checkpoints(1)
        result = run.wait(WAIT_S)
    assert result is not None
    assert result.is_finished
    assert numbers_at(place) == list(range(5_000))
