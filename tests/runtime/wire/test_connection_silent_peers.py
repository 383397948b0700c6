"""A connection with a vanished peer fails; one with a slow reader does not."""

from __future__ import annotations

import shutil
import subprocess
import sys

import pytest

NETWORK = (
    "ip link set lo up && ip addr add 10.9.8.1/32 dev lo && ip addr add 10.9.8.2/32 dev lo && "
    'ip route add default dev lo && exec "$@"'  # what no address takes any more is sent, and lost
)

COMMON = """
import socket, subprocess, sys, time
from headgate.runtime.wire import connection

connection.SILENCE_S_MAX = 2
if "without" in sys.argv:
    connection._notice_silence = lambda stream: stream.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)

def connected():
    with socket.create_server(("10.9.8.2", 0)) as server:
        near = socket.create_connection(server.getsockname(), source_address=("10.9.8.1", 0))
        far, _ = server.accept()
    return connection.PlainStream(near), connection.PlainStream(far), near

def vanish():
    subprocess.run(["ip", "addr", "del", "10.9.8.2/32", "dev", "lo"], check=True)
"""

IDLE = """
near, far, raw = connected()
vanish()
raw.settimeout(60)
try:
    near.readinto(bytearray(1))
except OSError as error:
    print(error.errno)
"""

BUSY = """
near, far, raw = connected()
vanish()
near.send_parts([memoryview(b"nobody acknowledges this")])
raw.settimeout(60)
try:
    near.readinto(bytearray(1))
except OSError as error:
    print(error.errno)
"""

SLOW = """
def lasts():
    near, far, raw = connected()
    raw.setblocking(False)
    sent = received = 0
    buffer = bytearray(1 << 18)
    until = time.monotonic() + 3 * connection.SILENCE_S_MAX
    longest, looked = 0.0, time.monotonic()
    try:
        while time.monotonic() < until:  # the window is closed nearly all the time
            longest, looked = max(longest, time.monotonic() - looked), time.monotonic()
            try:
                while True:
                    sent += raw.send(bytes(1 << 16))
            except BlockingIOError:
                received += far.readinto(buffer)
                time.sleep(0.25)
        raw.setblocking(True)
        raw.shutdown(socket.SHUT_WR)
        while count := far.readinto(buffer):
            received += count
    except OSError:
        if max(longest, time.monotonic() - looked) < connection.SILENCE_S_MAX / 2:
            raise
        return None  # this process got no turn for so long that its reader was silent, not slow
    return sent == received > 0

verdicts = (lasts() for _ in range(10))
print(next((verdict for verdict in verdicts if verdict is not None), "never had its turn"))
"""


def told(case: str, *arguments: str) -> str:
    """Run ``case`` in a network of its own; return what it prints."""
    private = ["unshare", "--net", "sh", "-c", NETWORK, "sh"]
    if shutil.which("ip") is None or subprocess.run([*private, "true"], capture_output=True, check=False).returncode:
        pytest.skip("this machine makes no network namespace for this user")
    command = [*private, sys.executable, "-c", COMMON + case, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=300).stdout.strip()


ETIMEDOUT = "110"


@pytest.mark.parametrize("case", [IDLE, BUSY], ids=["idle", "busy"])
def test_a_connection_with_a_machine_that_vanished_fails(case: str) -> None:
    """Nobody sends a reset when a cable is pulled."""
    assert told(case) == ETIMEDOUT


def test_without_the_options_a_vanished_machine_is_not_noticed() -> None:
    """The limit is needed: with the system's own keep-alive the caller's time limit of a minute comes first."""
    assert told(BUSY.replace("settimeout(60)", "settimeout(5)"), "without") == "None"


def test_a_connection_whose_reader_is_slow_lasts() -> None:
    """What counts is that it takes something now and then, not that it keeps up."""
    assert told(SLOW) == "True"
