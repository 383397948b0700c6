"""A MariaDB server of its own: made in a directory of its own, with settings that lose data where a client lets them.

Values that do not fit are cut off, tables have no transactions unless a client asks for them, texts are in latin1, and
times are not in UTC.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.servers.processes import LOOPBACK, Port, ServerProcess, answers

SETTINGS = (
    "--sql-mode=",
    "--default-storage-engine=MyISAM",
    "--character-set-server=latin1",
    "--default-time-zone=+05:00",
    "--innodb-buffer-pool-size=32M",
    "--innodb-log-file-size=8M",
    "--skip-log-bin",
    "--skip-name-resolve",
)
USER = "writer"


class MariaDbServer:
    """A server with a user without a password, who may do everything."""

    def __init__(self, program: str, installer: str, directory: Path) -> None:
        self._place = Port()
        self.port = self._place.number
        data, user = directory / "data", [f"--user={'root' if os.geteuid() == 0 else os.environ.get('USER', '')}"]
        basic = ["--no-defaults", f"--datadir={data}", *user]
        subprocess.run(
            [installer, *basic, "--auth-root-authentication-method=normal", "--skip-test-db"],
            check=True,
            capture_output=True,
        )
        first = directory / "first.sql"
        first.write_text(
            f"create user if not exists '{USER}'@'{LOOPBACK}';\ngrant all on *.* to '{USER}'@'{LOOPBACK}';\n"
        )
        command = [program, *basic, *SETTINGS, f"--bind-address={LOOPBACK}", f"--port={self.port}"]
        command += [f"--socket={directory / 'socket'}", f"--init-file={first}", f"--pid-file={directory / 'pid'}"]
        self._process = ServerProcess(command, directory / "log", lambda: answers(self.port))
        self._process.start()

    def url(self, database: str = "") -> str:
        """Of SQLAlchemy."""
        return f"mysql+pymysql://{USER}@{LOOPBACK}:{self.port}/{database}"

    def kill(self) -> None:
        self._process.end(signal.SIGKILL)

    def start(self) -> None:
        self._process.start()

    def end(self) -> None:
        self._process.end(signal.SIGKILL)
        self._place.close()


@contextmanager
def mariadb_server() -> Iterator[MariaDbServer]:
    """Give a server, or skip the test that asks for one."""
    program, installer = (
        shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin") for name in ("mariadbd", "mariadb-install-db")
    )
    if program is None or installer is None:
        pytest.skip("there is no MariaDB on this machine (apt-get install mariadb-server)")
    pytest.importorskip("pymysql", reason="PyMySQL is not installed (pip install pymysql)")
    directory = Path(tempfile.mkdtemp(prefix="headgate-mariadb-"))
    try:
        server = MariaDbServer(program, installer, directory)
        try:
            yield server
        finally:
            server.end()
    finally:
        shutil.rmtree(directory, ignore_errors=True)
