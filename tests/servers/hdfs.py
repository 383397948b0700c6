"""HDFS for tests, on loopback: one NameNode and one DataNode, or an HA pair with a JournalNode; each is a process.

``scripts/setup.sh servers`` gets them. Each can be killed and started again with the data that it has.
"""

from __future__ import annotations

import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import pytest
from tests.servers import kerberos
from tests.servers.kafka import java
from tests.servers.kerberos import REALM, Kdc
from tests.servers.objects import in_environment
from tests.servers.processes import LOOPBACK, Port, ServerProcess, answers

VERSION = "3.5.0"
LIBRARIES = Path(__file__).parents[2] / ".cache" / f"hadoop-{VERSION}"
"""Where ``scripts/setup.sh servers`` puts Hadoop's jars."""

SERVERS = ("name_node", "data_node")
NAME_NODE, DATA_NODE = "server.namenode.NameNode", "server.datanode.DataNode"
JOURNAL_NODE, ADMIN = "qjournal.server.JournalNode", "tools.DFSHAAdmin"

COMMON = {
    "dfs.replication": "1",
    "dfs.namenode.fs-limits.min-block-size": "4096",
    "dfs.namenode.safemode.extension": "0",
    "dfs.heartbeat.interval": "1",
    "dfs.namenode.heartbeat.recheck-interval": "2000",
    "dfs.datanode.failed.volumes.tolerated": "0",
    "dfs.datanode.du.reserved": "0",
}

SERVICE = "hdfs/localhost"
"""The principal of NameNode and DataNode in a cluster with Kerberos."""

USER = "headgate"
"""Who has tickets there."""

LOG4J = """
log4j.rootLogger=WARN, stdout
log4j.appender.stdout=org.apache.log4j.ConsoleAppender
log4j.appender.stdout.layout=org.apache.log4j.PatternLayout
log4j.appender.stdout.layout.ConversionPattern=[%d] %p %m (%c)%n
"""


class HdfsCluster:
    """A cluster with one copy of each block.

    Attributes:
        url: ``hdfs://host:port`` of the NameNode.
        configuration: the directory of its ``core-site.xml`` and ``hdfs-site.xml``, for ``HADOOP_CONF_DIR``.
    """

    _core: Mapping[str, str] = {}
    """What ``core-site.xml`` has beside the default file system."""
    _java_options: Sequence[str] = ()

    def __init__(self, directory: Path, **settings: str) -> None:
        """Format and start a cluster; ``settings`` have ``_`` for the dots of Hadoop's names."""
        self._ports = [Port() for _ in range(5)]
        name, name_http, data, data_http, data_ipc = (place.number for place in self._ports)
        self.port, self.url = name, f"hdfs://{LOOPBACK}:{name}"
        self._configure(
            directory,
            {
                "dfs.namenode.name.dir": f"file://{directory}/name",
                "dfs.namenode.http-address": f"{LOOPBACK}:{name_http}",
                **_data_node(directory, data, data_http, data_ipc),
                **settings,
            },
        )
        name_node = self._server(NAME_NODE)
        self._processes = {
            "name_node": ServerProcess(name_node, self.log, lambda: answers(name)),
            "data_node": ServerProcess(self._server(DATA_NODE), self.log, lambda: answers(data) and self.is_writable()),
        }
        try:
            self._run(*name_node, "-format", "-force")
            for server in SERVERS:
                self.start(server)
        except BaseException:
            self.end()
            raise

    def _configure(self, directory: Path, hdfs: dict[str, str]) -> None:
        """Write Hadoop's configuration for ``url``."""
        self.configuration, self.log = directory / "conf", directory / "log"
        for web in ("hdfs", "datanode", "journal"):  # pages that the jars lack, and the servers want to have
            (self.configuration / "webapps" / web).mkdir(parents=True)
        (self.configuration / "log4j.properties").write_text(LOG4J)
        (self.configuration / "core-site.xml").write_text(_xml({"fs.defaultFS": self.url, **self._core}))
        (self.configuration / "hdfs-site.xml").write_text(_xml({**COMMON, **hdfs}))

    def _server(self, name: str, *options: str) -> list[str]:
        """Return the command that runs a class of Hadoop."""
        return [
            java(), "-Xmx256m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", *self._java_options,
            "-cp", f"{self.configuration}:{LIBRARIES}/*", f"org.apache.hadoop.hdfs.{name}", *options,
        ]  # fmt: skip

    def _run(self, *command: str) -> None:
        """Run a command of Hadoop to its end."""
        ended = subprocess.run(command, capture_output=True, text=True)
        if ended.returncode:
            raise RuntimeError(f"{' '.join(command[-3:])} failed: {ended.stdout}{ended.stderr}")

    def kill(self, server: str) -> None:
        """End a server by SIGKILL."""
        self._processes[server].end(signal.SIGKILL)

    def start(self, server: str) -> None:
        """Start a server with the data that it has."""
        self._processes[server].start()

    def pause(self, server: str) -> None:
        """Stop a process: connections stay, and get no answers."""
        self._processes[server].send(signal.SIGSTOP)

    def resume(self, server: str) -> None:
        """Let a process go on."""
        self._processes[server].send(signal.SIGCONT)

    def is_writable(self) -> bool:
        """Whether files can be written: the NameNode is out of safe mode and knows the DataNode."""
        from hdfs_native import Client, WriteOptions

        try:
            client = Client(self.url)
            with client.create("/is-writable", WriteOptions(overwrite=True)) as file:
                file.write(b"x")
            client.delete("/is-writable")
        except Exception:
            return False
        return True

    def heal(self) -> None:
        """Start what does not run, and wait until files can be written: the NameNode begins in safe mode."""
        for process in self._processes.values():
            if not process.is_running:
                process.start()
        while not self.is_writable():
            time.sleep(0.05)

    def end(self) -> None:
        """End it for good."""
        for process in self._processes.values():
            process.end(signal.SIGKILL)
        for place in self._ports:
            place.close()


class SecureHdfs(HdfsCluster):
    """A cluster with Kerberos: who comes without a ticket of its KDC is refused.

    Attributes:
        tickets: the ticket cache of this process, for ``KRB5CCNAME``.
    """

    def __init__(self, directory: Path, kdc: Kdc, tickets: Path) -> None:
        """Start a cluster in the environment that ``secure_hdfs`` makes."""
        self.kdc, self.tickets = kdc, tickets
        keytab = str(kdc.keytab(SERVICE))
        kdc.keytab(USER)
        self.log_in()
        self._core = {"hadoop.security.authentication": "kerberos", "hadoop.security.authorization": "true"}
        self._java_options = [f"-Djava.security.krb5.conf={kdc.configuration}"]
        principals = {
            f"dfs.{server}.{name}": value
            for server in ("namenode", "datanode")
            for name, value in (("kerberos.principal", f"{SERVICE}@{REALM}"), ("keytab.file", keytab))
        }
        super().__init__(
            directory,
            **principals,
            **{
                "dfs.block.access.token.enable": "true",
                "dfs.data.transfer.protection": "authentication",
                "ignore.secure.ports.for.testing": "true",  # the other ways need root, or certificates
                "dfs.permissions.superusergroup": "root",
                "dfs.permissions.enabled": "false",
            },
        )

    def log_in(self, life_s: int = 3600) -> None:
        """Put a new ticket into the cache, in the place of what is there."""
        self.kdc.ticket(USER, self.tickets, life_s)

    def log_in_for_a_moment(self) -> None:
        """Put a ticket into the cache that has expired when this returns."""
        self.log_in(1)
        self.kdc.wait_until_expired(self.tickets)

    def delegation_token(self, path: Path) -> None:
        """Have the NameNode give a delegation token, into a file for ``HADOOP_TOKEN_FILE_LOCATION``."""
        self._run(*self._server("tools.DelegationTokenFetcher", "--renewer", USER, str(path)))

    def log_out(self) -> None:
        """Remove the tickets."""
        self.tickets.unlink(missing_ok=True)


class HdfsPair(HdfsCluster):
    """A cluster with two NameNodes, ``name_node_1`` and ``name_node_2``, of which the first is active at first.

    Their edits are in one JournalNode. ``url`` names both, as ``configuration`` says.
    """

    def __init__(self, directory: Path) -> None:
        """Format and start a cluster."""
        self._ports = [Port() for _ in range(9)]
        rpc_1, http_1, rpc_2, http_2, journal, journal_http, *of_data = (place.number for place in self._ports)
        self.url = "hdfs://pair"
        pair = {
            "dfs.nameservices": "pair",
            "dfs.ha.namenodes.pair": "1,2",
            "dfs.namenode.shared.edits.dir": f"qjournal://{LOOPBACK}:{journal}/pair",
            "dfs.client.failover.proxy.provider.pair": (
                "org.apache.hadoop.hdfs.server.namenode.ha.ConfiguredFailoverProxyProvider"
            ),
            "dfs.ha.fencing.methods": "shell(true)",
            "dfs.journalnode.edits.dir": f"{directory}/journal",
            "dfs.journalnode.rpc-address": f"{LOOPBACK}:{journal}",
            "dfs.journalnode.http-address": f"{LOOPBACK}:{journal_http}",
        }
        for number, rpc, http in ((1, rpc_1, http_1), (2, rpc_2, http_2)):
            pair[f"dfs.namenode.rpc-address.pair.{number}"] = f"{LOOPBACK}:{rpc}"
            pair[f"dfs.namenode.http-address.pair.{number}"] = f"{LOOPBACK}:{http}"
            pair[f"dfs.namenode.name.dir.pair.{number}"] = f"file://{directory}/name-{number}"
        self._configure(directory, {**pair, **_data_node(directory, *of_data)})
        first, second = (self._server(NAME_NODE, "-D", f"dfs.ha.namenode.id={number}") for number in (1, 2))
        self._processes = {
            "journal_node": ServerProcess(self._server(JOURNAL_NODE), self.log, lambda: answers(journal)),
            "name_node_1": ServerProcess(first, self.log, lambda: answers(rpc_1)),
            "name_node_2": ServerProcess(second, self.log, lambda: answers(rpc_2)),
            "data_node": ServerProcess(
                self._server(DATA_NODE), self.log, lambda: answers(of_data[0]) and self.is_writable()
            ),
        }
        try:
            self.start("journal_node")
            self._run(*first, "-format", "-force")
            self.start("name_node_1")
            self._run(*second, "-bootstrapStandby", "-force")
            self.start("name_node_2")
            self.activate(1)
            self.start("data_node")
        except BaseException:
            self.end()
            raise

    def activate(self, number: int) -> None:
        """Have a NameNode take over; the other one is a standby, or gone."""
        self._run(*self._server(ADMIN, "-transitionToActive", "--forceactive", str(number)))


def _data_node(directory: Path, port: int, http: int, ipc: int) -> dict[str, str]:
    return {
        "dfs.datanode.data.dir": f"file://{directory}/data",
        "dfs.datanode.address": f"{LOOPBACK}:{port}",
        "dfs.datanode.http.address": f"{LOOPBACK}:{http}",
        "dfs.datanode.ipc.address": f"{LOOPBACK}:{ipc}",
    }


def _xml(settings: dict[str, str]) -> str:
    properties = (f"<property><name>{name}</name><value>{value}</value></property>" for name, value in settings.items())
    return f"<configuration>{''.join(properties)}</configuration>"


def missing() -> str | None:
    """Return why there can be no HDFS on this machine, or None."""
    if shutil.which(java()) is None:
        return "there is no Java for HDFS"
    if not any(LIBRARIES.glob("hadoop-hdfs-*.jar")):
        return "there is no HDFS on this machine (scripts/setup.sh servers gets one, with Maven)"
    return None


@contextmanager
def hdfs_cluster(**settings: str) -> Iterator[HdfsCluster]:
    """Give a cluster, or skip the test that asks for one."""
    with _directory() as directory:
        yield from _until_used(HdfsCluster(directory, **settings))


@contextmanager
def hdfs_pair() -> Iterator[HdfsPair]:
    """Give a cluster with two NameNodes, and its configuration in the environment, or skip the test."""
    with _directory() as directory, in_environment({"HADOOP_CONF_DIR": str(directory / "conf")}):
        yield from _until_used(HdfsPair(directory))


@contextmanager
def secure_hdfs() -> Iterator[SecureHdfs]:
    """Give a cluster with Kerberos, and its configuration and a ticket in the environment, or skip the test."""
    if (problem := kerberos.missing()) is not None:
        pytest.skip(problem)
    with _directory() as directory:
        kdc = Kdc(directory)
        try:
            variables = {
                "HADOOP_CONF_DIR": str(directory / "conf"),
                "KRB5_CONFIG": str(kdc.configuration),
                "KRB5CCNAME": f"FILE:{directory / 'tickets'}",
            }
            with in_environment(variables):
                yield from _until_used(SecureHdfs(directory, kdc, directory / "tickets"))
        finally:
            kdc.end()


_Cluster = TypeVar("_Cluster", bound=HdfsCluster)


def _until_used(cluster: _Cluster) -> Iterator[_Cluster]:
    try:
        yield cluster
    finally:
        cluster.end()


@contextmanager
def _directory() -> Iterator[Path]:
    if (problem := missing()) is not None:
        pytest.skip(problem)
    pytest.importorskip("hdfs_native", reason="hdfs-native is not installed (pip install -e '.[dev]')")
    directory = Path(tempfile.mkdtemp(prefix="headgate-hdfs-"))
    try:
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)
