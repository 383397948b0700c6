"""The web applications and their port: the page of one run, and the page of all pipelines (``headgate ui``).

A page is open as long as the run, or the command; browsers see how it ended.
"""

from __future__ import annotations

import asyncio
import ipaddress
import itertools
import json
import os
import socket
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias

import uvicorn
from anyio import to_thread
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from uvicorn.protocols.http.h11_impl import H11Protocol

from headgate.api.pipeline_registry import KnownPipeline, PipelineRegistry, known_fields
from headgate.environment import SYSTEM_CLOCK, Clock
from headgate.errors import UsageError
from headgate.http_limits import HEAD_S
from headgate.web.responses import (
    HEADERS,
    Access,
    NextEvent,
    PipelineActions,
    RunActions,
    error_response,
    events,
    json_response,
    make_application,
)
from headgate.web.view_model import LogDirectory, LogReader, RunView

MakeApp: TypeAlias = Callable[[Access, Callable[[], bool]], Starlette]
"""Makes the application from the access rules and ``is_closing``, which says whether event streams have to end."""

LAST_LOOK_S = 5
"""How long connections may stay open when the run is over; those that follow end by themselves (``app.PERIOD_S``)."""

CONNECTIONS_MAX = 128
"""Connections of all browsers; one more ends the oldest. A browser has six at most."""

BACKLOG = 32
"""So many are accepted before others are ended."""


class BrowserProtocol(H11Protocol):
    """A connection of a browser. Their number is limited; a request's head has 16 KiB at most (h11)."""

    _numbers = itertools.count()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin; if there are too many, the oldest of those that ask for nothing ends, or else the oldest of all."""
        self._number = next(self._numbers)
        others = sorted(self.connections, key=BrowserProtocol._order)
        super().connection_made(transport)
        self._deadline = self.loop.call_later(HEAD_S, self._end_if_silent)
        for oldest in others[: len(self.connections) - CONNECTIONS_MAX] if len(others) >= CONNECTIONS_MAX else ():
            self.connections.discard(oldest)  # at once: a connection that is ending no longer counts
            oldest.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """End."""
        self._deadline.cancel()
        super().connection_lost(exc)

    def _end_if_silent(self) -> None:
        if self.cycle is None:
            self.transport.abort()

    @staticmethod
    def _order(connection: Any) -> tuple[bool, int]:
        is_busy = connection.cycle is not None and not connection.cycle.response_complete
        return is_busy, connection._number


@contextmanager
def serve_page(make_app: MakeApp, port: int, host: str, token: str | None, option: str = "--ui") -> Iterator[str]:
    """Serve the page in a thread of its own for the time of the block, which gets its address.

    Args:
        make_app: makes what answers.
        port: 0 takes a free one.
        host: an address of this machine. Not on loopback, ``token`` is needed for looking, too.
        token: None: there are no actions.
        option: what chooses another port, for messages.

    Raises:
        UsageError: the port is taken, the address is not this machine's, or there is no token where one is needed.
    """
    is_local = _is_loopback(host)
    if not is_local and token is None:
        raise UsageError(f"a page on {host} can be reached from other machines: give it a token (HEADGATE_UI_TOKEN)")
    access = Access(token, not is_local) if is_local else Access(token, True, ("*",))
    closing = threading.Event()
    with _listening(host, port, option) as listener:
        config = uvicorn.Config(
            make_app(access, closing.is_set),
            http=BrowserProtocol,
            ws="none",
            backlog=BACKLOG,
            log_config=None,
            log_level="critical",
            access_log=False,
            lifespan="off",
            server_header=False,
            timeout_graceful_shutdown=LAST_LOOK_S,
        )
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, args=([listener],), name="headgate-page", daemon=True)
        thread.start()
        try:
            yield _address(host, listener.getsockname()[1])
        finally:
            closing.set()
            server.should_exit = True
            thread.join()


@contextmanager
def _listening(host: str, port: int, option: str) -> Iterator[socket.socket]:
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        listener = socket.create_server((host, port), family=family, backlog=BACKLOG)
    except OSError as error:
        reason = str(error) if isinstance(error, socket.gaierror) or error.errno is None else os.strerror(error.errno)
        raise UsageError(f"the page cannot be served on {host}:{port}: {reason}; {option} takes another") from error
    with listener:
        yield listener


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _address(host: str, port: int) -> str:
    return f"http://[{host}]:{port}/" if ":" in host else f"http://{host}:{port}/"


RUN_PERIOD_S = 0.5
"""Between two looks whether there is something new."""

COMMON_FILES: Mapping[str, tuple[str, str]] = {
    "/page.css": ("page.css", "text/css; charset=utf-8"),
    "/pieces.js": ("pieces.js", "text/javascript; charset=utf-8"),
    "/icon.svg": ("icon.svg", "image/svg+xml"),
}
RUN_FILES: Mapping[str, tuple[str, str]] = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/page.js": ("page.js", "text/javascript; charset=utf-8"),
    "/graph.js": ("graph.js", "text/javascript; charset=utf-8"),
    "/logs.js": ("logs.js", "text/javascript; charset=utf-8"),
    **COMMON_FILES,
}

OVERVIEW_PERIOD_S = 1.0
"""Between two looks whether there is something new."""
OVERVIEW_AGE_MS_MAX = 1_000
"""What was seen is so long good enough for other browsers."""

OVERVIEW_FILES: Mapping[str, tuple[str, str]] = {
    "/": ("pipelines.html", "text/html; charset=utf-8"),
    "/pipelines.js": ("pipelines.js", "text/javascript; charset=utf-8"),
    **COMMON_FILES,
}


def make_app(
    view: RunView, actions: RunActions, logs: LogDirectory, access: Access, is_closing: Callable[[], bool]
) -> Starlette:
    """Return the application for one run. ``is_closing``: whether event streams have to end."""

    def may(request: Request) -> dict[str, bool]:
        return {"may_ask": access.has_token(request), "may_read_logs": access.is_owner(request)}

    async def look(request: Request) -> Response:
        return json_response({**view.to_json(), **may(request)})

    async def follow(request: Request) -> Response:
        return _stream(_run_events(view, may(request)), is_closing)

    async def align(request: Request) -> Response:
        found = view.alignment(request.path_params["checkpoint"])
        if found is None:
            return error_response("nothing is known about this checkpoint any more", 404)
        return json_response(found)

    async def list_logs(request: Request) -> Response:
        return json_response({"place": logs.place, "logs": await to_thread.run_sync(logs.names)})

    async def follow_log(request: Request) -> Response:
        reader = await to_thread.run_sync(logs.reader, request.path_params["name"])
        return error_response("there is no such log", 404) if reader is None else _stream(_lines_of(reader), is_closing)

    routes = [
        Route("/api/state", access.read_endpoint(look)),
        Route("/api/events", access.read_endpoint(follow)),
        Route("/api/alignment/{checkpoint:int}", access.read_endpoint(align)),
        Route("/api/logs", access.owner_endpoint(list_logs)),
        Route("/api/logs/{name}/events", access.owner_endpoint(follow_log)),
        Route("/api/ask/{action}", access.action_endpoint(actions.ask), methods=["POST"]),
    ]
    return make_application(RUN_FILES, routes, access)


def _stream(news: NextEvent, is_closing: Callable[[], bool]) -> Response:
    return StreamingResponse(events(news, RUN_PERIOD_S, is_closing), media_type="text/event-stream", headers=HEADERS)


def _lines_of(reader: LogReader) -> NextEvent:
    async def news() -> str | None:
        found = await to_thread.run_sync(reader.read)
        return json.dumps({"text": found}) if found else None

    return news


def _run_events(view: RunView, may: Mapping[str, bool]) -> NextEvent:
    sent = -1

    async def news() -> str | None:
        nonlocal sent
        if view.version == sent:
            return None
        shown = view.to_json()
        sent = shown["version"]
        return json.dumps({**shown, **may})

    return news


class Overview:
    """What is known of the pipelines. Several browsers share one look."""

    def __init__(self, looker: PipelineRegistry, clock: Clock = SYSTEM_CLOCK) -> None:
        self._looker = looker
        self._clock = clock
        self._lock = threading.Lock()
        self._seen: Sequence[KnownPipeline] = ()
        self._seen_ms: int | None = None

    def shown(self) -> Sequence[KnownPipeline]:
        """Return what there is, as it was at most ``LOOK_MS`` ago."""
        with self._lock:
            now_ms = self._clock.monotonic_ms()
            if self._seen_ms is None or now_ms - self._seen_ms >= OVERVIEW_AGE_MS_MAX:
                self._seen = self._looker.look()
                self._seen_ms = now_ms
            return self._seen


def make_overview_app(overview: Overview, access: Access, is_closing: Callable[[], bool]) -> Starlette:
    """Return the application for all pipelines. ``is_closing``: whether event streams have to end."""

    async def look(request: Request) -> Response:
        return json_response(await _overview_json(overview, access.has_token(request)))

    async def follow(request: Request) -> Response:
        stream = events(_overview_events(overview, access.has_token(request)), OVERVIEW_PERIOD_S, is_closing)
        return StreamingResponse(stream, media_type="text/event-stream", headers=HEADERS)

    routes = [
        Route("/api/state", access.read_endpoint(look)),
        Route("/api/events", access.read_endpoint(follow)),
        Route("/api/ask/{action}", access.action_endpoint(PipelineActions(overview.shown).ask), methods=["POST"]),
    ]
    return make_application(OVERVIEW_FILES, routes, access)


async def _overview_json(overview: Overview, may_ask: bool) -> dict[str, Any]:
    found = await to_thread.run_sync(overview.shown)
    return {"pipelines": [known_fields(one) for one in found], "may_ask": may_ask}


def _overview_events(overview: Overview, may_ask: bool) -> NextEvent:
    sent = ""

    async def news() -> str | None:
        nonlocal sent
        found = json.dumps(await _overview_json(overview, may_ask))
        if found == sent:
            return None
        sent = found
        return found

    return news
