"""Answers browsers that look at all pipelines of a machine (``headgate ui``)."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from anyio import to_thread
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from headgate.api.known import KnownPipeline, Looker, known_fields
from headgate.clock import SYSTEM_CLOCK, Clock
from headgate.web.answers import HEADERS, Access, News, as_json, events, make_application
from headgate.web.app import COMMON_FILES
from headgate.web.asking_others import AskingOthers

PERIOD_S = 1.0
"""Between two looks whether there is something new."""
LOOK_MS = 1_000
"""What was seen is so long good enough for other browsers."""

FILES: Mapping[str, tuple[str, str]] = {
    "/": ("pipelines.html", "text/html; charset=utf-8"),
    "/pipelines.js": ("pipelines.js", "text/javascript; charset=utf-8"),
    **COMMON_FILES,
}


class Overview:
    """What is known of the pipelines. Several browsers share one look."""

    def __init__(self, looker: Looker, clock: Clock = SYSTEM_CLOCK) -> None:
        self._looker = looker
        self._clock = clock
        self._lock = threading.Lock()
        self._seen: Sequence[KnownPipeline] = ()
        self._seen_ms: int | None = None

    def shown(self) -> Sequence[KnownPipeline]:
        """Return what there is, as it was at most ``LOOK_MS`` ago."""
        with self._lock:
            now_ms = self._clock.monotonic_ms()
            if self._seen_ms is None or now_ms - self._seen_ms >= LOOK_MS:
                self._seen = self._looker.look()
                self._seen_ms = now_ms
            return self._seen


def make_overview(overview: Overview, access: Access, is_closing: Callable[[], bool]) -> Starlette:
    """Return the application. ``is_closing``: whether those who follow have to be let go."""

    async def look(request: Request) -> Response:
        return as_json(await _shown(overview, access.is_right(request)))

    async def follow(request: Request) -> Response:
        stream = events(_news_of(overview, access.is_right(request)), PERIOD_S, is_closing)
        return StreamingResponse(stream, media_type="text/event-stream", headers=HEADERS)

    routes = [
        Route("/api/state", access.reading(look)),
        Route("/api/events", access.reading(follow)),
        Route("/api/ask/{wish}", access.asking(AskingOthers(overview.shown).ask), methods=["POST"]),
    ]
    return make_application(FILES, routes, access)


async def _shown(overview: Overview, may_ask: bool) -> dict[str, Any]:
    found = await to_thread.run_sync(overview.shown)
    return {"pipelines": [known_fields(one) for one in found], "may_ask": may_ask}


def _news_of(overview: Overview, may_ask: bool) -> News:
    sent = ""

    async def news() -> str | None:
        nonlocal sent
        found = json.dumps(await _shown(overview, may_ask))
        if found == sent:
            return None
        sent = found
        return found

    return news
