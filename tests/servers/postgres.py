"""A PostgreSQL server of its own: made by ``initdb`` in a directory of its own, with what is unlike a developer's.

It compares texts as in English, so that whoever relies on the order of bytes must say so.
"""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
from tests.servers.processes import LOOPBACK, Port, ServerProcess

GONE_S = 60.0

OWN_USERS = ("postgres", "nobody")
"""The server refuses root; then it runs as one of these."""

CONFIGURATION = """
listen_addresses = '{host}'
port = {port}
unix_socket_directories = ''
max_connections = 200
shared_buffers = 32MB
fsync = off
full_page_writes = off
log_min_messages = warning
"""
DURABLE = "fsync = on\nfull_page_writes = on\n"
"""Settings for whoever measures: commits wait for the disk."""

LOGIN = """
host all locked {clients} scram-sha-256
host all all {clients} trust
"""


def binaries() -> Path | None:
    """The directory of the server's programs, if there are any: on the path, or where Debian and others put them."""
    found = shutil.which("initdb")
    places = [Path(found).resolve().parent] if found else []
    places += sorted(Path("/usr/lib/postgresql").glob("*/bin"), key=lambda path: -float(path.parent.name))
    return next((place for place in places if os.access(place / "postgres", os.X_OK)), None)


def own_user() -> str | None:
    """Whom the server runs as; None: as we are."""
    if os.geteuid() != 0:
        return None
    for name in OWN_USERS:
        try:
            return pwd.getpwnam(name).pw_name
        except KeyError:
            continue
    return pytest.skip("PostgreSQL does not run as root, and there is no user postgres or nobody")


class PostgresServer:
    """A server with one database, ``headgate``, for clients of a network of 256 addresses, that of ``host``."""

    def __init__(
        self,
        programs: Path,
        directory: Path,
        host: str = LOOPBACK,
        small_disk: tuple[Path, str] | None = None,
        settings: str = "",
    ) -> None:
        self._programs, self._user, self.host = programs, own_user(), host
        self._place = Port(host)
        self.port = self._place.number
        if self._user is not None:
            shutil.chown(directory, self._user)
        data = directory / "data"
        self._run("initdb", "-D", str(data), "-U", "postgres", "-A", "trust", "-E", "UTF8", *self._order())
        (data / "pg_hba.conf").write_text(LOGIN.format(clients=f"{host}/24"))
        with open(data / "postgresql.conf", "a") as file:
            file.write(CONFIGURATION.format(host=host, port=self.port) + settings)
        command = [str(programs / "postgres"), "-D", str(data)]
        user = self._user
        if small_disk is not None:
            command, user = [*_with_a_disk(*small_disk, self._user), *command], None
        self._process = ServerProcess(command, directory / "log", self._is_ready, user=user)
        self._process.start()
        self._run("createdb", "-h", host, "-p", str(self.port), "-U", "postgres", "headgate")

    def url(self, schema: str = "headgate", user: str = "postgres", database: str = "headgate") -> str:
        return f"postgresql://{user}@{self.host}:{self.port}/{database}?schema={schema}"

    def crash(self) -> None:
        """Every process of it ends at once, as in a power cut that spares the disk."""
        self._process.end(signal.SIGQUIT)

    def kill(self) -> None:
        """SIGKILL for every process of it, and wait until they are gone."""
        server = psutil.Process(self._process.pid)
        server.suspend()  # it starts no more of them
        children = server.children()
        for child in children:
            child.kill()
        self._process.end(signal.SIGKILL)
        psutil.wait_procs(children, GONE_S)

    def start(self) -> None:
        self._process.start()

    def end(self) -> None:
        self._process.end(signal.SIGQUIT)
        self._place.close()

    def _order(self) -> list[str]:
        told = subprocess.run([self._programs / "initdb", "--help"], capture_output=True, text=True).stdout
        if "--icu-locale" not in told:
            return ["--locale=C"]
        return ["--locale=C", "--locale-provider=icu", "--icu-locale=en-US"]

    def _is_ready(self) -> bool:
        command = [str(self._programs / "pg_isready"), "-q", "-h", self.host, "-p", str(self.port)]
        return subprocess.run(command, check=False).returncode == 0

    def _run(self, program: str, *arguments: str) -> None:
        command = [str(self._programs / program), *arguments]
        subprocess.run(command, check=True, capture_output=True, user=self._user, cwd="/")


def _with_a_disk(place: Path, size: str, user: str | None) -> list[str]:
    """Return the command that runs another one as ``user``, with a disk at ``place`` that nobody else sees. As root."""
    mount = 'mount -t tmpfs -o "size=$1,uid=$2,mode=700" none "$0" && shift 2 && exec setpriv "$@"'
    uid = 0 if user is None else pwd.getpwnam(user).pw_uid
    gid = 0 if user is None else pwd.getpwnam(user).pw_gid
    identity = [f"--reuid={uid}", f"--regid={gid}", "--clear-groups"]
    return ["unshare", "--mount", "--", "sh", "-c", mount, str(place), size, str(uid), *identity]


@contextmanager
def postgres_server(
    host: str = LOOPBACK, small_disk: tuple[Path, str] | None = None, settings: str = ""
) -> Iterator[PostgresServer]:
    """Give a server, or skip the test that asks for one.

    ``small_disk``: a directory that is one, and its size. ``settings``: lines that count more than those of tests.
    """
    programs = binaries()
    if programs is None:
        pytest.skip("there is no PostgreSQL on this machine (apt-get install postgresql)")
    pytest.importorskip("psycopg", reason="psycopg is not installed (pip install 'headgate-streams[postgres]')")
    directory = Path(tempfile.mkdtemp(prefix="headgate-postgres-"))
    directory.chmod(0o755)  # root's temporary directories are closed to others
    try:
        server = PostgresServer(programs, directory, host, small_disk, settings)
        try:
            yield server
        finally:
            server.end()
    finally:
        shutil.rmtree(directory, ignore_errors=True)
