"""The web applications and their port: the page of one run, and the page of all pipelines (``headgate ui``).

A page is open as long as the run, or the command; browsers see how it ended. Reading needs the token where a page
listens on more than this machine. Actions always need it, in a header, which no other site's page can send. Logs are
for the user that runs the page. Nothing is loaded from elsewhere.
"""

from __future__ import annotations

import asyncio
import ipaddress
import itertools
import json
import os
import secrets
import socket
import sys
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import resources
from pathlib import Path
from typing import Any, TypeAlias

import uvicorn
from anyio import to_thread
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from uvicorn.protocols.http.h11_impl import H11Protocol

from headgate.api.pipeline_registry import KnownPipeline, PipelineRegistry, known_fields
from headgate.dataclass import dataclass
from headgate.environment import SYSTEM_CLOCK, Clock
from headgate.errors import HeadgateError, UsageError
from headgate.http_limits import HEAD_S
from headgate.model.progress import CheckpointOutcome, ControlRequest, PipelineHandle
from headgate.runtime.driver.pipeline_lock import RunningPipeline
from headgate.storage.urls import absolute_location
from headgate.web.view_model import LogDirectory, LogReader, RunView

ACTIONS = ("checkpoint", "savepoint", "stop", "drain")
ENDING_TEXT = {"drain": "the sources end, and everything in flight is processed", "stop": "it stops"}
ANSWER_S = 60.0
"""How long a browser is kept waiting for a checkpoint; it may complete later."""
LOOK_S = 0.05
"""How often the answer of another process is looked for."""


class RunActions:
    """The actions on the run of this process, once it has begun."""

    def __init__(self) -> None:
        self._handle: PipelineHandle | None = None

    def begin(self, handle: PipelineHandle) -> None:
        """The run has begun."""
        self._handle = handle

    def ask(self, action: str, body: Mapping[str, Any]) -> str:
        """Run an action; return its outcome in one sentence. Waits for checkpoints, not for the end of the run.

        Args:
            action: one of ``ACTIONS``.
            body: of a savepoint, ``path``: an empty directory or a URL.

        Raises:
            UsageError: it cannot be done.
        """
        if self._handle is None:
            raise UsageError("the pipeline has not started yet; ask again when it runs")
        if action == "checkpoint":
            return outcome_text(self._handle.take_checkpoint(ANSWER_S))
        if action == "savepoint":
            return outcome_text(self._handle.take_savepoint(savepoint_path(body), ANSWER_S))
        self._handle.stop(0.0, drain=action == "drain")
        return ENDING_TEXT[action]


def savepoint_path(body: Mapping[str, Any]) -> str:
    """Return the path of a savepoint.

    Raises:
        UsageError: there is none.
    """
    path = body.get("path")
    if not isinstance(path, str) or not path.strip():
        raise UsageError("name a place for the savepoint: an empty directory or a URL")
    return path.strip()


def outcome_text(outcome: CheckpointOutcome | None) -> str:
    """Return the outcome of a checkpoint in one sentence; None: it is still under way.

    Raises:
        UsageError: there is none.
    """
    if outcome is None:
        return f"it takes longer than {ANSWER_S:.0f} s; look among the checkpoints"
    if outcome.checkpoint is None:
        raise UsageError(f"there is none: {outcome.reason}")
    if outcome.savepoint is not None:
        return f"checkpoint {outcome.checkpoint} is a savepoint at {outcome.savepoint}"
    return f"checkpoint {outcome.checkpoint} is complete"


class PipelineActions:
    """The actions on pipelines of other processes. A browser can name only those that are shown, not any directory."""

    def __init__(self, shown: Callable[[], Sequence[KnownPipeline]]) -> None:
        self._shown = shown

    def ask(self, action: str, body: Mapping[str, Any]) -> str:
        """Run an action; return its outcome in one sentence. Waits for checkpoints, not for the end of the run.

        Args:
            action: one of ``ACTIONS``.
            body: ``pipeline`` and ``place``, as they are shown; of a savepoint, ``path``: an empty directory or a URL.

        Raises:
            UsageError: it cannot be done.
        """
        name, place = body.get("pipeline"), body.get("place")
        known = next((one for one in self._shown() if (one.name, one.place) == (name, place)), None)
        if known is None:
            raise UsageError(f"no pipeline {name!r} with its checkpoints in {place!r} is known here")
        path = absolute_location(savepoint_path(body)) if action == "savepoint" else ""
        running = RunningPipeline.find(known.place, known.name)
        if action in ENDING_TEXT:
            running.ask(drain=action == "drain")
            return f"{known.name}: {ENDING_TEXT[action]}"
        return f"{known.name}: {outcome_text(_answered(running, ControlRequest(path)))}"


def _answered(running: RunningPipeline, request: ControlRequest) -> CheckpointOutcome | None:
    """Return the outcome of ``request``, None if that takes too long for a browser."""
    ask = running.ask_for(request)
    until_ms = SYSTEM_CLOCK.monotonic_ms() + int(ANSWER_S * 1_000)
    try:
        while SYSTEM_CLOCK.monotonic_ms() < until_ms:
            if (outcome := ask.answered()) is not None:
                return outcome
            if running.ended() is not None:
                # once more: the answer may have come between the two looks
                return ask.answered() or CheckpointOutcome(None, "the pipeline ended")
            time.sleep(LOOK_S)
        return None
    finally:
        ask.remove()


Address: TypeAlias = tuple[str, int]
"""Of one end of a connection: an IP address and a port."""

TABLES = ("/proc/net/tcp", "/proc/net/tcp6")
ESTABLISHED = "01"


def is_same_user(browser: Address, page: Address) -> bool:
    """Whether the connection from ``browser`` to ``page`` was opened by a process of the user of this one."""
    return any(owner_in(_table_lines(table), browser, page) == os.getuid() for table in TABLES)


def owner_in(table: Iterable[str], browser: Address, page: Address) -> int | None:
    """Return the user id of the connection from ``browser`` to ``page``, None if ``table`` lacks it.

    Args:
        table: lines as in ``/proc/net/tcp``; the first one has titles.
        browser: where the connection comes from.
        page: where it leads.
    """
    for line in table:
        fields = line.split()
        if len(fields) < 8 or fields[3] != ESTABLISHED:
            continue
        if _address_of(fields[1]) == _plain(browser) and _address_of(fields[2]) == _plain(page):
            return int(fields[7])
    return None


def _table_lines(table: str) -> list[str]:
    try:
        return Path(table).read_text().splitlines()[1:]
    except OSError:
        return []


def _address_of(field: str) -> tuple[str, int]:
    """Return what ``0100007F:0FD2`` means: words of four bytes in the machine's order, then the port."""
    words, _, port = field.partition(":")
    packed = bytes.fromhex(words)
    if sys.byteorder == "little":
        packed = b"".join(packed[at : at + 4][::-1] for at in range(0, len(packed), 4))
    return _plain((str(ipaddress.ip_address(packed)), int(port, 16)))


def _plain(address: Address) -> tuple[str, int]:
    """Return ``address`` in one spelling: IPv4 is IPv4 though it came through a socket of IPv6."""
    try:
        ip = ipaddress.ip_address(address[0])
    except ValueError:
        return address
    mapped = ip.ipv4_mapped if isinstance(ip, ipaddress.IPv6Address) else None
    return str(mapped or ip), address[1]


SILENCE_MAX_S = 15.0
"""After so long without news a line says that the connection is alive."""
BODY_BYTES_MAX = 4_096

HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "default-src 'self'; frame-ancestors 'none'; base-uri 'none'; form-action 'none'",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}

Endpoint: TypeAlias = Callable[[Request], Awaitable[Response]]
Act: TypeAlias = Callable[[str, Mapping[str, Any]], str]
"""Runs one of ``ACTIONS`` with the JSON that was sent; returns its outcome, raises ``HeadgateError``."""
NextEvent: TypeAlias = Callable[[], Awaitable[str | None]]
"""Returns what is to be sent, as JSON; None when nothing has changed."""


@dataclass(frozen=True, slots=True)
class Access:
    """Access rules of a page.

    Attributes:
        token: the token that an action needs; None: no actions.
        is_needed_to_read: whether reading needs it, too.
        hosts: names under which browsers may call this machine; another site's name that leads here is refused.
    """

    token: str | None
    is_needed_to_read: bool = False
    hosts: tuple[str, ...] = ("127.0.0.1", "localhost", "[::1]")

    def has_token(self, request: Request) -> bool:
        """Whether ``request`` carries the token."""
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        # in a time that says nothing about how much of it is right
        is_same = secrets.compare_digest(given.encode(), (self.token or "").encode())
        return self.token is not None and scheme.lower() == "bearer" and is_same

    def is_owner(self, request: Request) -> bool:
        """Whether ``request`` carries the token, or comes from a process of the same user on this machine."""
        if self.has_token(request):
            return True
        browser, page = request.client, request.scope.get("server")
        if self.is_needed_to_read or browser is None or not page:
            return False
        return is_same_user((browser.host, browser.port), (str(page[0]), int(page[1])))

    def owner_endpoint(self, endpoint: Endpoint) -> Endpoint:
        """Return ``endpoint``, restricted to the user that runs the page."""

        async def checked(request: Request) -> Response:
            if not self.is_owner(request):
                return error_response("logs are for the user who runs the pipeline: open the page with #token=…", 403)
            return await endpoint(request)

        return checked

    def read_endpoint(self, endpoint: Endpoint) -> Endpoint:
        """Return ``endpoint``, restricted to requests that may read."""

        async def checked(request: Request) -> Response:
            if self.is_needed_to_read and not self.has_token(request):
                return error_response("this page needs a token: open it with #token=… after its address", 401)
            return await endpoint(request)

        return checked

    def action_endpoint(self, ask: Act) -> Endpoint:
        """Return the endpoint that passes an action on to ``ask``, restricted to requests with the token."""

        async def checked(request: Request) -> Response:
            if not self.has_token(request):
                return error_response("this needs the token that the page was started with", 403)
            action = request.path_params["action"]
            if action not in ACTIONS:
                return error_response(f"there is no '{action}'; there are {', '.join(ACTIONS)}", 404)
            body = await _body_of(request)
            if body is None:
                return error_response("what is sent must be a small JSON object", 400)
            try:
                # an action may take a minute, in which the loop serves other browsers
                return json_response({"answer": await to_thread.run_sync(ask, action, body)})
            except HeadgateError as error:
                return error_response(str(error), 409)

        return checked


def make_application(files: Mapping[str, tuple[str, str]], routes: Sequence[Route], access: Access) -> Starlette:
    """Return what serves ``routes``, and ``files``: by path their name in ``page`` and their media type."""
    hosts = Middleware(TrustedHostMiddleware, allowed_hosts=list(access.hosts), www_redirect=False)
    return Starlette(routes=[*(Route(path, _file(*file)) for path, file in files.items()), *routes], middleware=[hosts])


async def events(news: NextEvent, period_s: float, is_closing: Callable[[], bool]) -> AsyncIterator[str]:
    """Yield server-sent events until ``is_closing``: what ``news`` returns, looked at each ``period_s`` seconds."""
    silent_s = 0.0
    while True:
        is_last = is_closing()  # asked before looking: nothing comes after it
        if (found := await news()) is not None:
            silent_s = 0.0
            yield f"data: {found}\n\n"
        elif silent_s >= SILENCE_MAX_S:
            silent_s = 0.0
            yield ": nothing new\n\n"
        if is_last:
            return
        await asyncio.sleep(period_s)
        silent_s += period_s


def json_response(content: Mapping[str, Any]) -> Response:
    """Return ``content`` as an answer."""
    return JSONResponse(content, headers=HEADERS)


def error_response(error: str, status: int) -> Response:
    """Return one sentence that says why not."""
    return JSONResponse({"error": error}, status, headers=HEADERS)


async def _body_of(request: Request) -> dict[str, Any] | None:
    """Return the JSON object that was sent, ``{}`` if nothing was, None if it is something else."""
    data = b""
    async for part in request.stream():
        # in parts: what is too long is never in memory as a whole
        data += part
        if len(data) > BODY_BYTES_MAX:
            return None
    try:
        found = json.loads(data or b"{}")
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


def _file(name: str, kind: str) -> Endpoint:
    content = (resources.files("headgate.web") / "page" / name).read_bytes()

    async def endpoint(request: Request) -> Response:
        return Response(content, media_type=kind, headers=HEADERS)

    return endpoint


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
    # elsewhere than on loopback it may have any name, and the token decides
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
            # first: streams of events see it and end, so that none has to be cut off
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
