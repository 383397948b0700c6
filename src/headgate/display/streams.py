"""Streams and pipelines as HTML: columns, the graph, and only rows that are in memory already (ND1)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from headgate.display.html import escaped, table, value_text
from headgate.display.svg import NODES_MAX, graph_svg
from headgate.model.graph import Node

COLUMNS_MAX = 200
"""Of a schema; the rest is counted."""
ROW_COLUMNS_MAX = 30


@dataclass(frozen=True, slots=True)
class StreamPicture:
    """What is shown of a stream.

    Attributes:
        title: what it is and where it comes from.
        columns: name and type of each.
        keys, time_column: columns that have a part to play.
        rows: some records, if they cost nothing.
    """

    title: str
    columns: Sequence[tuple[str, str]]
    keys: tuple[str, ...] = ()
    time_column: str | None = None
    rows: Sequence[Mapping[str, object]] = ()


def stream_html(picture: StreamPicture) -> str:
    """Return a stream as HTML."""
    parts = [f"<div>{escaped(picture.title)}</div>"]
    if picture.rows:
        names = [name for name, _ in picture.columns[:ROW_COLUMNS_MAX]]
        cells = [[value_text(row.get(name)) for name in names] for row in picture.rows]
        types = [kind for _, kind in picture.columns[:ROW_COLUMNS_MAX]]
        parts.append(table(names, [types, *cells]))
        parts += _roles(picture)
    else:
        shown = picture.columns[:COLUMNS_MAX]
        parts.append(table(("column", "type", ""), [(name, kind, _role(picture, name)) for name, kind in shown]))
    left = len(picture.columns) - (ROW_COLUMNS_MAX if picture.rows else COLUMNS_MAX)
    if left > 0:
        parts.append(f"<div>and {left} more columns</div>")
    return f"<div>{''.join(parts)}</div>"


def pipeline_html(name: str, nodes: Sequence[Node]) -> str:
    """Return a pipeline as HTML: its name, and its graph below it."""
    picture = graph_svg(nodes) if 0 < len(nodes) <= NODES_MAX else ""
    note = "" if picture or not nodes else "; describe() prints them"
    return f"<div><div>Pipeline <b>{escaped(name)}</b>: {len(nodes)} operators{note}</div>{picture}</div>"


def _role(picture: StreamPicture, column: str) -> str:
    roles = ["key"] if column in picture.keys else []
    return ", ".join(roles + (["event time"] if column == picture.time_column else []))


def _roles(picture: StreamPicture) -> list[str]:
    roles = [f"key: {', '.join(picture.keys)}"] if picture.keys else []
    roles += [f"event time: {picture.time_column}"] if picture.time_column is not None else []
    return [f"<div>{escaped('; '.join(roles))}</div>"] if roles else []
