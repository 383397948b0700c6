"""Machines that can disappear: a network of its own for a test, and machines in it that are cut off while they live.

A program of the test runs in namespaces of its own (network and processes), which the kernel ends with it, so nothing
is left whatever dies. In its network it makes machines, which are namespaces, too: each reaches the program's machine
over a wire of its own, and nobody else. The addresses are those that are kept for documentation, so no other machine
has them; nothing listens on all addresses.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import psutil
import pytest

from crash.support.processes import environment, until

HUB = "192.0.2.1"
"""Address of the machine on which the program runs, with all servers."""
NETWORK_BITS = 24
"""Of what a machine takes for its neighbours."""
SKIPPED = 77
"""Exit code of a program that found something missing, and said what."""

_OWN_NETWORK = (
    "setpriv",
    "--pdeathsig",
    "KILL",
    "unshare",
    "--net",
    "--pid",
    "--fork",
    "--kill-child",
    "--mount-proc",
    "--",
)


def run_in_a_network_of_its_own(program: Path, *arguments: str, log: Path, timeout_s: float) -> None:
    """Run a program of the test; it must end well. Skips the test where there are no such networks."""
    _skip_without_networks()
    env = environment()
    with open(log, "wb") as output:
        command = [*_OWN_NETWORK, sys.executable, "-u", str(program), *arguments]
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=env)
        try:
            code = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            process.kill()  # and the kernel kills everything that it started
            process.wait()
    said = log.read_text(errors="replace")
    if code == SKIPPED:
        pytest.skip(said.splitlines()[-1])
    assert code == 0, f"{'not done in time' if code is None else f'exit code {code}'}:\n{said[-12_000:]}"


def _skip_without_networks() -> None:
    for tool in ("setpriv", "unshare", "nsenter", "ip"):
        if shutil.which(tool) is None:
            pytest.skip(f"there is no '{tool}' on this machine (apt-get install util-linux iproute2)")
    tried = subprocess.run([*_OWN_NETWORK, "ip", "link", "add", "wire", "type", "veth"], capture_output=True, text=True)
    if tried.returncode != 0:
        said = (tried.stderr.strip().splitlines() or ["no reason given"])[-1]
        pytest.skip(f"machines need network namespaces of their own, which nobody lets us make here: {said}")


def begin_network() -> None:
    """Called first by the program: its own machine has a loopback, and its address whatever becomes of the wires."""
    _ip("link", "set", "lo", "up")
    _ip("addr", "add", f"{HUB}/32", "dev", "lo")


class Machine:
    """Another machine, with a disk: it reaches the hub, until it is cut off."""

    def __init__(self, disk: Path, number: int = 1) -> None:
        self.disk = disk
        self.is_there = True
        self.host = f"192.0.2.{1 + number}"
        self._holder = subprocess.Popen(["unshare", "--net", "cat"], stdin=subprocess.PIPE)
        until(lambda: self._is_own(), "a machine")
        disk.mkdir(parents=True)
        wire, end = f"wire{number}", str(self._holder.pid)
        _ip("link", "add", wire, "type", "veth", "peer", "name", "wire", "netns", end)
        _ip("link", "set", wire, "up")
        _ip("route", "add", self.host, "dev", wire, "src", HUB)
        self._run("ip", "link", "set", "lo", "up")
        self._run("ip", "addr", "add", f"{self.host}/{NETWORK_BITS}", "dev", "wire")
        self._run("ip", "link", "set", "wire", "up")

    @property
    def at(self) -> Sequence[str]:
        """The command that starts others there."""
        return "nsenter", f"--net=/proc/{self._holder.pid}/ns/net", "--"

    def vanish(self) -> None:
        """Nobody hears of it any more, and its disk is gone; what runs there is not told."""
        self.is_there = False
        self._run("ip", "link", "set", "wire", "down")
        shutil.rmtree(self.disk, ignore_errors=True)

    def come_back(self) -> None:
        """Its wire carries again; its disk is gone for good."""
        self._run("ip", "link", "set", "wire", "up")

    def has(self, pid: int) -> bool:
        """Whether a process runs there."""
        return _network_of(pid) == _network_of(self._holder.pid)

    def processes(self) -> list[psutil.Process]:
        """Return all that lives there."""
        own = _network_of(self._holder.pid)
        alive = (p for p in psutil.process_iter() if _network_of(p.pid) == own and p.pid != self._holder.pid)
        return [p for p in alive if p.status() != psutil.STATUS_ZOMBIE]

    def _is_own(self) -> bool:
        return _network_of(self._holder.pid) not in (None, _network_of(os.getpid()))

    def _run(self, *command: str) -> None:
        subprocess.run([*self.at, *command], check=True)


def _network_of(pid: int) -> str | None:
    try:
        return os.readlink(f"/proc/{pid}/ns/net")
    except OSError:
        return None


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True)
