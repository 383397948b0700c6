"""Kerberos for tests: a KDC of MIT on loopback, with a realm, keytabs and ticket caches in one directory.

``scripts/setup.sh servers`` gets it. Its programs need nothing of the system's configuration.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

from tests.servers.processes import LOOPBACK, Port, ServerProcess, answers

UNPACKED = Path(__file__).parents[2] / ".venv-servers" / "kerberos"
"""Where ``scripts/setup.sh servers`` puts the programs, if the system has none."""

REALM = "HEADGATE.TEST"

CLIENT = """
[libdefaults]
 default_realm = {realm}
 dns_lookup_kdc = false
 dns_lookup_realm = false
 dns_canonicalize_hostname = false
 rdns = false
 udp_preference_limit = 1
[realms]
 {realm} = {{
  kdc = {host}:{port}
 }}
"""

SERVER = """
[kdcdefaults]
 kdc_listen = ""
 kdc_tcp_listen = {host}:{port}
[realms]
 {realm} = {{
  database_name = {directory}/principal
  key_stash_file = {directory}/stash
 }}
"""


class Kdc:
    """A server that gives tickets.

    Attributes:
        configuration: the ``krb5.conf`` of its clients, for ``KRB5_CONFIG``.
    """

    def __init__(self, directory: Path) -> None:
        self._directory, self._port = directory, Port()
        self.configuration = directory / "krb5.conf"
        port = self._port.number
        modules = next((UNPACKED / "usr/lib").glob("*/krb5/plugins/kdb"), None)
        of_modules = f"[dbmodules]\n db_module_dir = {modules}\n" if modules else ""
        self.configuration.write_text(CLIENT.format(realm=REALM, host=LOOPBACK, port=port) + of_modules)
        profile = directory / "kdc.conf"
        profile.write_text(SERVER.format(realm=REALM, host=LOOPBACK, port=port, directory=directory))
        self._env = {"KRB5_CONFIG": str(self.configuration), "KRB5_KDC_PROFILE": str(profile)}
        if modules:
            self._env["LD_LIBRARY_PATH"] = str(modules.parents[2])
        self._process = ServerProcess(
            [_program("krb5kdc"), "-n"], directory / "kdc.log", lambda: answers(port), **self._env
        )
        try:
            self._run("kdb5_util", "create", "-s", "-r", REALM, "-P", "master")
            self._process.start()
        except BaseException:
            self.end()
            raise

    def keytab(self, principal: str) -> Path:
        """Create a principal; return a file with its key."""
        path = self._directory / f"{principal.replace('/', '-')}.keytab"
        self._run("kadmin.local", "-q", f"addprinc -randkey {principal}")
        self._run("kadmin.local", "-q", f"ktadd -k {path} {principal}")
        return path

    def ticket(self, principal: str, cache: Path, life_s: int = 3600) -> None:
        """Put a ticket for ``principal`` into a cache, as a user does."""
        keytab = self._directory / f"{principal}.keytab"
        self._run("kinit", "-l", f"{life_s}s", "-c", f"FILE:{cache}", "-k", "-t", str(keytab), principal)

    def wait_until_expired(self, cache: Path) -> None:
        """Wait until no ticket in a cache counts any more."""
        command, env = [_program("klist"), "-s", "-c", f"FILE:{cache}"], {**os.environ, **self._env}
        while subprocess.run(command, env=env).returncode == 0:
            time.sleep(0.05)

    def end(self) -> None:
        """End it for good."""
        self._process.end(signal.SIGKILL)
        self._port.close()

    def _run(self, program: str, *options: str) -> None:
        command = [_program(program), *options]
        ended = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **self._env})
        if ended.returncode:
            raise RuntimeError(f"{' '.join(command)} failed: {ended.stdout}{ended.stderr}")


def _program(name: str) -> str:
    for place in ("usr/sbin", "usr/bin"):
        if (found := UNPACKED / place / name).is_file():
            return str(found)
    return shutil.which(name, path=f"{os.environ.get('PATH', '')}:/usr/sbin") or name


def missing() -> str | None:
    """Return why there can be no KDC on this machine, or None."""
    if shutil.which(_program("krb5kdc")) is None:
        return "there is no KDC on this machine (scripts/setup.sh servers gets one, on Debian)"
    return None
