"""Answers browsers: the page, what it shows as JSON and as server-sent events, and, with a token, what it may ask for.

Nothing is loaded from elsewhere, and the page is told so (PG6). Reading needs the token, too, where the page listens on
more than this machine (PG4). Asking needs it always, in a header: no other site's page can send that (PG3).
"""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from importlib import resources
from typing import Any

from anyio import to_thread
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from headgate.errors import HeadgateError
from headgate.web.asking import WISHES, Asking
from headgate.web.story import Story

PERIOD_S = 0.5
"""Between two looks whether there is something new."""
SILENCE_MAX_S = 15.0
"""After so long without news a line says that the connection is alive."""
BODY_BYTES_MAX = 4_096

FILES: Mapping[str, tuple[str, str]] = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/page.css": ("page.css", "text/css; charset=utf-8"),
    "/page.js": ("page.js", "text/javascript; charset=utf-8"),
    "/graph.js": ("graph.js", "text/javascript; charset=utf-8"),
    "/icon.svg": ("icon.svg", "image/svg+xml"),
}
HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "default-src 'self'; frame-ancestors 'none'; base-uri 'none'; form-action 'none'",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}

_Endpoint = Callable[[Request], Awaitable[Response]]


@dataclass(frozen=True, slots=True)
class Access:
    """Who may do what.

    Attributes:
        token: what whoever asks for something must send; None: nobody may.
        is_needed_to_read: whether looking needs it, too.
        hosts: names under which browsers may call this machine; another site's name that leads here is refused (PG5).
    """

    token: str | None
    is_needed_to_read: bool = False
    hosts: tuple[str, ...] = ("127.0.0.1", "localhost", "[::1]")

    def is_right(self, request: Request) -> bool:
        """Whether ``request`` carries the token."""
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        is_same = secrets.compare_digest(given.encode(), (self.token or "").encode())
        return self.token is not None and scheme.lower() == "bearer" and is_same

    def may_read(self, request: Request) -> bool:
        """Whether ``request`` may see what there is."""
        return not self.is_needed_to_read or self.is_right(request)


def make_app(story: Story, asking: Asking, access: Access, is_closing: Callable[[], bool]) -> Starlette:
    """Return the application for one run. ``is_closing``: whether those who follow have to be let go."""

    async def look(request: Request) -> Response:
        return _json({**story.shown(), "may_ask": access.is_right(request)})

    async def follow(request: Request) -> Response:
        stream = _events(story, access.is_right(request), is_closing)
        return StreamingResponse(stream, media_type="text/event-stream", headers=HEADERS)

    async def ask(request: Request) -> Response:
        if not access.is_right(request):
            return _refused("this needs the token that the page was started with", 403)
        wish = request.path_params["wish"]
        if wish not in WISHES:
            return _refused(f"there is no '{wish}'; there are {', '.join(WISHES)}", 404)
        body = await _body_of(request)
        if body is None:
            return _refused("what is sent must be a small JSON object", 400)
        try:
            return _json({"answer": await to_thread.run_sync(asking.ask, wish, body)})
        except HeadgateError as error:
            return _refused(str(error), 409)

    def reading(endpoint: _Endpoint) -> _Endpoint:
        async def checked(request: Request) -> Response:
            if not access.may_read(request):
                return _refused("this page needs a token: open it with #token=… behind its address", 401)
            return await endpoint(request)

        return checked

    routes = [Route(path, _file(name, kind)) for path, (name, kind) in FILES.items()]
    routes += [
        Route("/api/state", reading(look)),
        Route("/api/events", reading(follow)),
        Route("/api/ask/{wish}", ask, methods=["POST"]),
    ]
    hosts = Middleware(TrustedHostMiddleware, allowed_hosts=list(access.hosts), www_redirect=False)
    return Starlette(routes=routes, middleware=[hosts])


async def _events(story: Story, may_ask: bool, is_closing: Callable[[], bool]) -> AsyncIterator[str]:
    sent, silent_s = -1, 0.0
    while True:
        is_last = is_closing()  # asked before looking: nothing comes behind it
        if story.version != sent:
            shown = story.shown()
            sent, silent_s = shown["version"], 0.0
            yield f"data: {json.dumps({**shown, 'may_ask': may_ask})}\n\n"
        elif silent_s >= SILENCE_MAX_S:
            silent_s = 0.0
            yield ": nothing new\n\n"
        if is_last:
            return
        await asyncio.sleep(PERIOD_S)
        silent_s += PERIOD_S


async def _body_of(request: Request) -> dict[str, Any] | None:
    """Return the JSON object that was sent, ``{}`` if nothing was, None if it is something else."""
    data = b""
    async for part in request.stream():
        data += part
        if len(data) > BODY_BYTES_MAX:
            return None
    try:
        found = json.loads(data or b"{}")
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


def _file(name: str, kind: str) -> _Endpoint:
    content = (resources.files("headgate.web") / "page" / name).read_bytes()

    async def endpoint(request: Request) -> Response:
        return Response(content, media_type=kind, headers=HEADERS)

    return endpoint


def _json(content: Mapping[str, Any]) -> Response:
    return JSONResponse(content, headers=HEADERS)


def _refused(error: str, status: int) -> Response:
    return JSONResponse({"error": error}, status, headers=HEADERS)
