"""A Pravega server: controller, segment store and ZooKeeper of Pravega 0.13 in one process, on loopback.

It keeps everything in memory: what ends it ends its streams. ``scripts/setup.sh pravega`` gets it.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import signal
import tempfile
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.servers.certificates import certificate_for, java_stores
from tests.servers.kafka import java
from tests.servers.processes import LOOPBACK, START_S, Port, ServerProcess, answers

from headgate.connectors.base import SourceContext
from headgate.connectors.pravega.controller import NO_SECURITY, Controller, PravegaSecurity, StreamName, message
from headgate.connectors.pravega.segment_store import Access
from headgate.connectors.pravega.source import Pravega
from headgate.environment import SYSTEM_ENVIRONMENT

VERSION = "0.13.0"
LIBRARIES = Path(__file__).parents[2] / ".cache" / f"pravega-{VERSION}"
"""Where ``scripts/setup.sh pravega`` puts the server."""

SCOPE = "tests"

PROPERTIES = """
singlenode.zk.port={zookeeper}
singlenode.controller.rpc.port={controller}
singlenode.segmentStore.port={store}
singlenode.controller.rest.enable=false
singlenode.metrics.enable=false
singlenode.admin.gateway.enable=false
pravegaservice.service.listener.host.nameOrIp={host}
pravegaservice.service.published.host.nameOrIp={host}
pravegaservice.dataLog.impl.name=INMEMORY
pravegaservice.storage.impl.name=INMEMORY
pravegaservice.cache.size.max=134217728
"""

SECURITY = """
singlenode.security.auth.enable=true
singlenode.security.auth.credentials.username={user}
singlenode.security.auth.credentials.pwd={password}
singlenode.security.auth.pwdAuthHandler.accountsDb.location={accounts}
singlenode.security.tls.enable=true
singlenode.security.tls.privateKey.location={keys}
singlenode.security.tls.certificate.location={certificate}
singlenode.security.tls.keyStore.location={own}
singlenode.security.tls.keyStore.pwd.location={pass_file}
singlenode.security.tls.trustStore.location={trusted}
"""

USER, PASSWORD = "admin", "only for tests"
PASSWORD_VARIABLE = "HEADGATE_TEST_PRAVEGA_PASSWORD"
READER = "reader"
"""Another user with the same password, who may not write."""

OPENED = ("java.base/java.lang", "java.base/java.nio", "java.base/sun.nio.ch", "java.base/java.util")
"""Packages that the server looks into."""


class PravegaServer:
    """A server that is its own cluster.

    Attributes:
        address: ``host:port`` of the controller.
        security: how to connect to it.
    """

    def __init__(self, directory: Path, *, is_secure: bool = False) -> None:
        """``is_secure``: it demands TLS and a login; the password is in the environment then."""
        self._ports = [Port() for _ in range(3)]
        zookeeper, controller, store = (place.number for place in self._ports)
        self.address = f"{LOOPBACK}:{controller}"
        settings = directory / "server.properties"
        settings.write_text(PROPERTIES.format(zookeeper=zookeeper, controller=controller, store=store, host=LOOPBACK))
        self.security = NO_SECURITY
        if is_secure:
            with settings.open("a") as file:
                file.write(self._secured(directory))
        (directory / "logback.xml").write_text(
            '<configuration><appender name="out" class="ch.qos.logback.core.ConsoleAppender"><encoder>'
            "<pattern>%d %-5level %logger{20} %msg%n</pattern></encoder></appender>"
            '<root level="WARN"><appender-ref ref="out"/></root></configuration>'
        )
        command = [
            java(), "-Xmx640m", "-XX:MaxDirectMemorySize=512m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1",
            *(part for name in OPENED for part in ("--add-opens", f"{name}=ALL-UNNAMED")),
            "-Dcontroller.retention.frequency.minutes=1", "-Dcontroller.watermarking.frequency.seconds=1",
            f"-Dlogback.configurationFile={directory / 'logback.xml'}",
            f"-Dsinglenode.configurationFile={settings}",
            f"-Djava.io.tmpdir={directory}", "-cp", f"{LIBRARIES}/*", "io.pravega.local.LocalPravegaEmulator",
        ]  # fmt: skip
        self._process = ServerProcess(command, directory / "log", lambda: self._is_ready(controller, store))
        try:
            self._process.start()
        except BaseException:
            self.end()
            raise
        self.client = Controller(self.address, self.security)

    def _secured(self, directory: Path) -> str:
        """Return the settings for TLS and logins, and remember how to connect."""
        keys, certificate = certificate_for(directory, LOOPBACK)
        accounts = directory / "accounts"
        accounts.write_text(
            f"{USER}:{_hashed(PASSWORD)}:prn::*,READ_UPDATE;\n{READER}:{_hashed(PASSWORD)}:prn::*,READ;\n"
        )
        os.environ[PASSWORD_VARIABLE] = PASSWORD
        self.security = PravegaSecurity(
            tls=True, ca_file=str(certificate), user=USER, secret=f"env:{PASSWORD_VARIABLE}"
        )
        own, trusted = java_stores(directory, PASSWORD)  # for its ZooKeeper
        pass_file = directory / "password"
        pass_file.write_text(PASSWORD)
        return SECURITY.format(
            user=USER, password=PASSWORD, accounts=accounts, keys=keys, certificate=certificate,
            own=own, trusted=trusted, pass_file=pass_file,
        )  # fmt: skip

    def _is_ready(self, controller: int, store: int) -> bool:
        if not answers(controller) or not answers(store):
            return False
        client = Controller(self.address, self.security)
        try:
            client.create_scope(SCOPE)
        except Exception:
            return False
        else:
            return True
        finally:
            client.close()

    def create_stream(self, segments: int = 1, scope: str = SCOPE) -> str:
        """Create a stream; return its name with its scope."""
        stream = StreamName(scope, f"t-{uuid.uuid4().hex[:12]}")
        self.client.create_scope(scope)
        self.client.create_stream(stream, segments)
        return str(stream)

    def manager(self) -> Any:
        """Return Pravega's own client. What it made ends with it."""
        from pravega_client import StreamManager

        return StreamManager(self.address, False, False)

    def write(self, stream: str, events: Sequence[str], keys: Sequence[str] | None = None) -> None:
        """Append events with Pravega's own client."""
        name, manager = StreamName.parse(stream), self.manager()
        writer = manager.create_writer(name.scope, name.stream)
        for at, event in enumerate(events):
            writer.write_event(event, routing_key=None if keys is None else keys[at])
        writer.flush()

    def seal(self, stream: str) -> None:
        """Seal a stream."""
        name = StreamName.parse(stream)
        assert self.manager().seal_stream(name.scope, name.stream)

    def scale(self, stream: str, sealed: Sequence[int], ranges: Sequence[tuple[float, float]]) -> list[int]:
        """Replace segments by others with these parts of the keys; return all that are written then."""
        name = StreamName.parse(stream)
        info = message((1, name.scope), (2, name.stream))
        request = message(
            (1, info), *((2, one) for one in sealed),
            *((3, message((1, float(low)), (2, float(high)))) for low, high in ranges), (4, 1),
        )  # fmt: skip
        answer = self.client.call("scale", request)
        assert answer.get(1, [0])[0] == 0, answer
        epoch = answer.get(3, [0])[0]
        deadline = time.monotonic() + START_S
        while self.client.call("checkScale", message((1, info), (2, epoch))).get(1, [0])[0] != 1:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        return sorted(one.segment for one in self.client.current(name))

    def delete(self, stream: str) -> None:
        """Remove a sealed stream."""
        name = StreamName.parse(stream)
        assert self.manager().delete_stream(name.scope, name.stream)

    def retain(self, stream: str, segments: int) -> None:
        """Give a stream a policy under which it keeps next to nothing, but for what reader groups need."""
        name = StreamName.parse(stream)
        scaling, retention = message((1, 0), (4, segments)), message((1, 2), (2, 1), (3, 1 << 40))
        config = message((1, message((1, name.scope), (2, name.stream))), (2, scaling), (3, retention))
        assert not self.client.call("updateStream", config).get(1, [0])[0]

    def truncate(self, stream: str, cut: Mapping[int, int]) -> None:
        """Remove what is in front of a cut."""
        self.client.truncate(StreamName.parse(stream), cut)

    def end(self) -> None:
        """End it for good."""
        self._process.end(signal.SIGKILL)
        for place in self._ports:
            place.close()


def _hashed(password: str) -> str:
    """Return a password as Pravega's file of accounts has it."""
    salt = bytes(32)
    digest = hashlib.pbkdf2_hmac("sha256", password.encode(), salt, 5_000, 64)
    return f"5000:{salt.hex()}:{digest.hex()}".encode().hex()


def missing() -> str | None:
    """Return why there can be no server on this machine, or None."""
    if shutil.which(java()) is None:
        return "there is no Java for a Pravega server"
    if not any(LIBRARIES.glob("pravega-standalone-*.jar")):
        return "there is no Pravega server on this machine (scripts/setup.sh pravega gets one, with Maven)"
    return None


def access(server: PravegaServer, stream: StreamName) -> Access:
    return Access(server.client, stream, SYSTEM_ENVIRONMENT)


def context(positions: dict[str, bytes] | None = None, **options: Any) -> SourceContext:
    given = {"subtask_index": 0, "parallelism": 1, "positions": positions, "life": uuid.uuid4().hex, **options}
    return SourceContext("tests", "in", **given)


def read_all(source: Pravega, positions: dict[str, bytes] | None = None) -> list[str]:
    """Return the values up to the end of a bounded source."""
    reader = source.open(context(positions))
    rows = []
    deadline = time.monotonic() + START_S
    while not reader.is_finished():
        assert time.monotonic() < deadline
        found = reader.poll()
        rows += [] if found is None else found.batch.to_pylist()
    reader.close()
    return [row["value"] for row in rows]


@contextmanager
def pravega_server(*, is_secure: bool = False) -> Iterator[PravegaServer]:
    """Give a server, or skip the test that asks for one."""
    if (problem := missing()) is not None:
        pytest.skip(problem)
    for package in ("grpc", "pravega_client"):
        pytest.importorskip(package, reason=f"{package} is not installed (pip install -e '.[dev]')")
    directory = Path(tempfile.mkdtemp(prefix="headgate-pravega-"))
    try:
        server = PravegaServer(directory, is_secure=is_secure)
        try:
            yield server
        finally:
            server.end()
    finally:
        shutil.rmtree(directory, ignore_errors=True)
