"""The web applications: the page of one run, and the page of all pipelines of a machine (``headgate ui``)."""

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

from headgate.api.pipeline_registry import KnownPipeline, PipelineRegistry, known_fields
from headgate.environment import SYSTEM_CLOCK, Clock
from headgate.web.actions import PipelineActions, RunActions
from headgate.web.logs import LogDirectory, LogReader
from headgate.web.responses import HEADERS, Access, NextEvent, error_response, events, json_response, make_application
from headgate.web.view_model import RunView

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
