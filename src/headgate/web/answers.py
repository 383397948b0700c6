"""What the pages have in common: who may look and ask, and how answers leave.

Nothing is loaded from elsewhere, and browsers are told so (PG6). Reading needs the token, too, where a page listens on
more than this machine (PG4). Asking needs it always, in a header: no other site's page can send that (PG3).
"""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any, TypeAlias

from anyio import to_thread
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from headgate.errors import HeadgateError
from headgate.web.asking import WISHES
from headgate.web.peers import is_of_this_user

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
Ask: TypeAlias = Callable[[str, Mapping[str, Any]], str]
"""Gets one of ``WISHES`` and what was sent with it; returns what came of it, raises ``HeadgateError``."""
News: TypeAlias = Callable[[], Awaitable[str | None]]
"""Returns what is to be sent, as JSON; None when nothing has changed."""


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

    def is_owner(self, request: Request) -> bool:
        """Whether ``request`` carries the token, or comes from a process of the same user on this machine (PG13)."""
        if self.is_right(request):
            return True
        browser, page = request.client, request.scope.get("server")
        if self.is_needed_to_read or browser is None or not page:
            return False
        return is_of_this_user((browser.host, browser.port), (str(page[0]), int(page[1])))

    def of_owner(self, endpoint: Endpoint) -> Endpoint:
        """Return ``endpoint`` for the user who runs the page."""

        async def checked(request: Request) -> Response:
            if not self.is_owner(request):
                return refused("logs are for the user who runs the pipeline: open the page with #token=…", 403)
            return await endpoint(request)

        return checked

    def reading(self, endpoint: Endpoint) -> Endpoint:
        """Return ``endpoint`` for those who may look."""

        async def checked(request: Request) -> Response:
            if self.is_needed_to_read and not self.is_right(request):
                return refused("this page needs a token: open it with #token=… after its address", 401)
            return await endpoint(request)

        return checked

    def asking(self, ask: Ask) -> Endpoint:
        """Return the endpoint that passes a wish on to ``ask``, for those who may."""

        async def checked(request: Request) -> Response:
            if not self.is_right(request):
                return refused("this needs the token that the page was started with", 403)
            wish = request.path_params["wish"]
            if wish not in WISHES:
                return refused(f"there is no '{wish}'; there are {', '.join(WISHES)}", 404)
            body = await _body_of(request)
            if body is None:
                return refused("what is sent must be a small JSON object", 400)
            try:
                return as_json({"answer": await to_thread.run_sync(ask, wish, body)})
            except HeadgateError as error:
                return refused(str(error), 409)

        return checked


def make_application(files: Mapping[str, tuple[str, str]], routes: Sequence[Route], access: Access) -> Starlette:
    """Return what serves ``routes``, and ``files``: by path their name in ``page`` and their media type."""
    hosts = Middleware(TrustedHostMiddleware, allowed_hosts=list(access.hosts), www_redirect=False)
    return Starlette(routes=[*(Route(path, _file(*file)) for path, file in files.items()), *routes], middleware=[hosts])


async def events(news: News, period_s: float, is_closing: Callable[[], bool]) -> AsyncIterator[str]:
    """Yield server-sent events until ``is_closing``: what ``news`` returns, looked at each ``period_s`` seconds."""
    silent_s = 0.0
    while True:
        is_last = is_closing()  # asked before looking: nothing comes behind it
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


def as_json(content: Mapping[str, Any]) -> Response:
    """Return ``content`` as an answer."""
    return JSONResponse(content, headers=HEADERS)


def refused(error: str, status: int) -> Response:
    """Return one sentence that says why not."""
    return JSONResponse({"error": error}, status, headers=HEADERS)


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


def _file(name: str, kind: str) -> Endpoint:
    content = (resources.files("headgate.web") / "page" / name).read_bytes()

    async def endpoint(request: Request) -> Response:
        return Response(content, media_type=kind, headers=HEADERS)

    return endpoint
