"""HDFS for tests: one NameNode and one DataNode, each a process, on loopback.

``scripts/setup.sh servers`` gets them. Each can be killed and started again with the data that it has.
"""

from __future__ import annotations

import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.servers.kafka import java
from tests.servers.processes import LOOPBACK, Port, ServerProcess, answers

VERSION = "3.5.0"
LIBRARIES = Path(__file__).parents[2] / ".cache" / f"hadoop-{VERSION}"
"""Where ``scripts/setup.sh servers`` puts Hadoop's jars."""

SERVERS = ("name_node", "data_node")

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

    def __init__(self, directory: Path, **settings: str) -> None:
        """Format and start a cluster; ``settings`` have ``_`` for the dots of Hadoop's names."""
        self._ports = [Port() for _ in range(5)]
        name, name_http, data, data_http, data_ipc = (place.number for place in self._ports)
        self.port, self.url = name, f"hdfs://{LOOPBACK}:{name}"
        self.configuration = directory / "conf"
        for web in ("hdfs", "datanode"):  # pages that the jars lack, and the servers want to have
            (self.configuration / "webapps" / web).mkdir(parents=True)
        (self.configuration / "log4j.properties").write_text(LOG4J)
        (self.configuration / "core-site.xml").write_text(_xml({"fs.defaultFS": self.url}))
        hdfs = {
            "dfs.namenode.name.dir": f"file://{directory}/name",
            "dfs.datanode.data.dir": f"file://{directory}/data",
            "dfs.namenode.http-address": f"{LOOPBACK}:{name_http}",
            "dfs.datanode.address": f"{LOOPBACK}:{data}",
            "dfs.datanode.http.address": f"{LOOPBACK}:{data_http}",
            "dfs.datanode.ipc.address": f"{LOOPBACK}:{data_ipc}",
            "dfs.replication": "1",
            "dfs.namenode.fs-limits.min-block-size": "4096",
            "dfs.namenode.safemode.extension": "0",
            "dfs.heartbeat.interval": "1",
            "dfs.namenode.heartbeat.recheck-interval": "2000",
            "dfs.datanode.failed.volumes.tolerated": "0",
            "dfs.datanode.du.reserved": "0",
            **settings,
        }
        (self.configuration / "hdfs-site.xml").write_text(_xml(hdfs))
        self._java = [
            java(), "-Xmx256m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1",
            "-cp", f"{self.configuration}:{LIBRARIES}/*",
        ]  # fmt: skip
        self.log = directory / "log"
        name_node = [*self._java, "org.apache.hadoop.hdfs.server.namenode.NameNode"]
        data_node = [*self._java, "org.apache.hadoop.hdfs.server.datanode.DataNode"]
        self._processes = {
            "name_node": ServerProcess(name_node, self.log, lambda: answers(name)),
            "data_node": ServerProcess(data_node, self.log, lambda: answers(data) and self.is_writable()),
        }
        formatted = subprocess.run([*name_node, "-format", "-force"], capture_output=True, text=True)
        if formatted.returncode:
            raise RuntimeError(f"the NameNode cannot be formatted: {formatted.stdout}{formatted.stderr}")
        try:
            for server in SERVERS:
                self.start(server)
        except BaseException:
            self.end()
            raise

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

    def end(self) -> None:
        """End it for good."""
        for process in self._processes.values():
            process.end(signal.SIGKILL)
        for place in self._ports:
            place.close()


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
    if (problem := missing()) is not None:
        pytest.skip(problem)
    pytest.importorskip("hdfs_native", reason="hdfs-native is not installed (pip install -e '.[dev]')")
    directory = Path(tempfile.mkdtemp(prefix="headgate-hdfs-"))
    try:
        cluster = HdfsCluster(directory, **settings)
        try:
            yield cluster
        finally:
            cluster.end()
    finally:
        shutil.rmtree(directory, ignore_errors=True)
