"""Answers browsers that look at one run: the page, what it shows, as JSON and as events, and what it asks for."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping

from anyio import to_thread
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from headgate.web.answers import HEADERS, Access, News, as_json, events, make_application, refused
from headgate.web.asking import Asking
from headgate.web.logs import LogReader, LogShelf
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
    "/logs.js": ("logs.js", "text/javascript; charset=utf-8"),
    **COMMON_FILES,
}


def make_app(story: Story, asking: Asking, logs: LogShelf, access: Access, is_closing: Callable[[], bool]) -> Starlette:
    """Return the application for one run. ``is_closing``: whether those who follow have to be let go."""

    def may(request: Request) -> dict[str, bool]:
        return {"may_ask": access.is_right(request), "may_read_logs": access.is_owner(request)}

    async def look(request: Request) -> Response:
        return as_json({**story.shown(), **may(request)})

    async def follow(request: Request) -> Response:
        return _stream(_news_of(story, may(request)), is_closing)

    async def align(request: Request) -> Response:
        found = story.alignment(request.path_params["checkpoint"])
        return refused("nothing is known about this checkpoint any more", 404) if found is None else as_json(found)

    async def list_logs(request: Request) -> Response:
        return as_json({"place": logs.place, "logs": await to_thread.run_sync(logs.names)})

    async def follow_log(request: Request) -> Response:
        reader = await to_thread.run_sync(logs.reader, request.path_params["name"])
        return refused("there is no such log", 404) if reader is None else _stream(_lines_of(reader), is_closing)

    routes = [
        Route("/api/state", access.reading(look)),
        Route("/api/events", access.reading(follow)),
        Route("/api/alignment/{checkpoint:int}", access.reading(align)),
        Route("/api/logs", access.of_owner(list_logs)),
        Route("/api/logs/{name}/events", access.of_owner(follow_log)),
        Route("/api/ask/{wish}", access.asking(asking.ask), methods=["POST"]),
    ]
    return make_application(FILES, routes, access)


def _stream(news: News, is_closing: Callable[[], bool]) -> Response:
    return StreamingResponse(events(news, PERIOD_S, is_closing), media_type="text/event-stream", headers=HEADERS)


def _lines_of(reader: LogReader) -> News:
    async def news() -> str | None:
        found = await to_thread.run_sync(reader.read)
        return json.dumps({"text": found}) if found else None

    return news


def _news_of(story: Story, may: Mapping[str, bool]) -> News:
    sent = -1

    async def news() -> str | None:
        nonlocal sent
        if story.version == sent:
            return None
        shown = story.shown()
        sent = shown["version"]
        return json.dumps({**shown, **may})

    return news
