"""Whose the browser is at the other end of a connection: as the kernel's table has it."""

from __future__ import annotations

import os
import socket
import sys

import pytest

from headgate.web import responses
from headgate.web.responses import is_same_user

TITLES = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode"
PAGE, BROWSER = ("127.0.0.1", 4050), ("127.0.0.1", 41_006)


def row(local: str, remote: str, state: str = "01", uid: int = 1_000) -> str:
    return (
        f"   1: {local} {remote} {state} 00000000:00000000 00:00000000 00000000  {uid}        0 4711 1 0 100 0 0 10 0"
    )


@pytest.mark.skipif(sys.byteorder != "little", reason="the rows are of such a machine")
def test_the_browsers_end_says_whose_it_is() -> None:
    browser, page = "0100007F:A02E", "0100007F:0FD2"
    table = [TITLES, row(page, browser, uid=7), row(browser, page, uid=1_001)]
    assert responses.owner_in(table, BROWSER, PAGE) == 1_001
    assert responses.owner_in([TITLES, row(browser, page, "06", 0)], BROWSER, PAGE) is None, "closed long ago"
    assert responses.owner_in([TITLES, row(browser, "0100007F:0FD3")], BROWSER, PAGE) is None, "to another port"
    assert responses.owner_in(["nonsense", ""], BROWSER, PAGE) is None
    loopback_6 = "00000000000000000000000001000000"
    assert (
        responses.owner_in([row(f"{loopback_6}:A02E", f"{loopback_6}:0FD2")], ("::1", 41_006), ("::1", 4_050)) == 1_000
    )
    mapped = "0000000000000000FFFF00000100007F"
    assert responses.owner_in([row(f"{mapped}:A02E", f"{mapped}:0FD2")], BROWSER, PAGE) == 1_000


@pytest.mark.skipif(not os.path.exists("/proc/net/tcp"), reason="there is no such table here")
def test_a_connection_of_this_process_is_of_this_user(monkeypatch: pytest.MonkeyPatch) -> None:
    server = socket.create_server(("127.0.0.1", 0))
    with server as listener, socket.create_connection(listener.getsockname()) as browser:
        assert is_same_user(browser.getsockname(), listener.getsockname())
        monkeypatch.setattr(os, "getuid", lambda: 4_711)
        assert not is_same_user(browser.getsockname(), listener.getsockname())
    monkeypatch.setattr(responses, "TABLES", ("/nowhere",))
    assert not is_same_user(BROWSER, PAGE)
