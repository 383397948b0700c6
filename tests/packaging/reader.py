"""Somebody who follows a page of the documentation: takes its blocks in order, and types what they say into a shell."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil
from tests.packaging.conftest import QUICK

PATIENCE_S = 600
LOOK_S = 0.05

_FENCE = re.compile(r"^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)
_PKILL = re.compile(r'pkill -9 -f (?:"(.+)"|(\S+))')


class Terminal:
    """A command that runs, and what it has printed."""

    def __init__(self, command: str, directory: Path, environment: dict[str, str]) -> None:
        self.command = command
        self._told = directory / f"told-{time.monotonic_ns()}"
        with self._told.open("w") as told:
            self.process = psutil.Popen(
                ["bash", "-c", f"exec {command}"],
                cwd=directory,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=told,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def told(self) -> str:
        return self._told.read_text()

    def until(self, what: str, is_there: Callable[[], object]) -> None:
        """Wait until ``is_there``, while the command runs."""
        deadline = time.monotonic() + PATIENCE_S
        while not is_there():
            assert self.process.poll() is None, f"'{self.command}' ended before {what}: {self.told}"
            assert time.monotonic() < deadline, f"'{self.command}' ran without {what}: {self.told}"
            time.sleep(LOOK_S)

    def ends(self) -> str:
        """Wait for its end; return what it printed."""
        self.process.wait(PATIENCE_S)
        return self.told

    def kill_like(self, pkill: str) -> int:
        """Do what the ``pkill`` of the page does, to processes below this command alone; return to how many."""
        found = _PKILL.fullmatch(pkill)
        assert found, pkill
        pattern = re.compile(found[1] or found[2])
        mine = [self.process, *self.process.children(recursive=True)]
        meant = [one for one in mine if pattern.search(_command(one))]
        for one in meant:
            with suppress(psutil.NoSuchProcess):  # its parent ended, and it with that
                one.send_signal(signal.SIGKILL)
        return len(meant)

    def close(self) -> None:
        """Leave nothing behind."""
        for one in [*self.process.children(recursive=True), self.process]:
            if one.is_running():
                one.kill()
        self.process.wait(PATIENCE_S)


def _command(process: psutil.Process) -> str:
    """Return what it was started as; nothing of one that has ended."""
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


class Reader:
    """Follows the blocks of ``page``; ``changes`` are made in each of them, to have less to do."""

    def __init__(self, page: Path, directory: Path, programs: Path, changes: dict[str, str]) -> None:
        self.directory = directory
        self._blocks = _FENCE.findall(page.read_text(encoding="utf-8"))
        self._changes = changes
        self._terminals: list[Terminal] = []
        home = directory / "home"
        home.mkdir()
        self.environment = {
            "PATH": os.pathsep.join([str(programs), "/usr/local/bin", "/usr/bin", "/bin"]),
            "HOME": str(home),
            "LANG": "C.UTF-8",
            "TMPDIR": str(directory),
            **QUICK,
        }

    def block(self, kind: str) -> list[str]:
        """Return the lines of the next block, which is of this kind."""
        found, text = self._blocks.pop(0)
        assert found == kind, f"the page has changed: the next block is {text!r}"
        for old, new in self._changes.items():
            text = text.replace(old, new)
        return [line.partition("  #")[0].rstrip() for line in text.splitlines()]

    def saves(self, name: str) -> None:
        """Save the next block as ``name``."""
        found, text = self._blocks.pop(0)
        assert found == "python"
        for old, new in self._changes.items():
            text = text.replace(old, new)
        (self.directory / name).write_text(text)

    def types(self, line: str, answer: str = "") -> str:
        """Type a command and wait for its end, which is a success; return what it printed."""
        told = subprocess.run(
            ["bash", "-c", line],
            cwd=self.directory,
            env=self.environment,
            input=answer,
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
        )
        assert told.returncode == 0, f"{line}: {told.stdout}{told.stderr}"
        return told.stdout + told.stderr

    def starts(self, line: str) -> Terminal:
        """Type a command that goes on while others are typed in a second terminal."""
        self._terminals.append(Terminal(line, self.directory, self.environment))
        return self._terminals[-1]

    @property
    def has_read_all(self) -> bool:
        """Whether no block is left."""
        return not self._blocks

    def close(self) -> None:
        """End what still runs."""
        for terminal in self._terminals:
            if terminal.process.is_running():
                terminal.close()
