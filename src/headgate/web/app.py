"""Answers browsers that look at one run: the page, what it shows, as JSON and as events, and what it asks for."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from headgate.web.answers import HEADERS, Access, News, as_json, events, make_application
from headgate.web.asking import Asking
from headgate.web.story import Story

PERIOD_S = 0.5
"""Between two looks whether there is something new."""

COMMON_FILES: Mapping[str, tuple[str, str]] = {
    "/page.css": ("page.css", "text/css; charset=utf-8"),
    "/pieces.js": ("pieces.js", "text/javascript; charset=utf-8"),
    "/icon.svg": ("icon.svg", "image/svg+xml"),
}
FILES: Mapping[str, tuple[str, str]] = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/page.js": ("page.js", "text/javascript; charset=utf-8"),
    "/graph.js": ("graph.js", "text/javascript; charset=utf-8"),
    **COMMON_FILES,
}


def make_app(story: Story, asking: Asking, access: Access, is_closing: Callable[[], bool]) -> Starlette:
    """Return the application for one run. ``is_closing``: whether those who follow have to be let go."""

    async def look(request: Request) -> Response:
        return as_json({**story.shown(), "may_ask": access.is_right(request)})

    async def follow(request: Request) -> Response:
        stream = events(_news_of(story, access.is_right(request)), PERIOD_S, is_closing)
        return StreamingResponse(stream, media_type="text/event-stream", headers=HEADERS)

    routes = [
        Route("/api/state", access.reading(look)),
        Route("/api/events", access.reading(follow)),
        Route("/api/ask/{wish}", access.asking(asking.ask), methods=["POST"]),
    ]
    return make_application(FILES, routes, access)


def _news_of(story: Story, may_ask: bool) -> News:
    sent = -1

    async def news() -> str | None:
        nonlocal sent
        if story.version == sent:
            return None
        shown = story.shown()
        sent = shown["version"]
        return json.dumps({**shown, "may_ask": may_ask})

    return news
