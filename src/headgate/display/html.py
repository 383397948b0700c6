"""HTML of streams, and SVG of a pipeline's graph, for notebooks.

Names that users choose are escaped. Colours are those of the page around it, light or dark; nothing is loaded from
elsewhere and nothing is a script. A stream shows only rows that are in memory already. The layout of a graph follows
the rules of ``web/page/graph.js``, so that both pictures look alike.
"""

from __future__ import annotations

import html
import re
import reprlib
from collections.abc import Iterable, Mapping, Sequence

from headgate.dataclass import dataclass
from headgate.model.graph import MAIN, Edge, Node, Partitioner, Role
from headgate.model.ids import NodeName

CELL_CHARACTERS_MAX = 60

_NOT_XML = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\ud800-\udfff\ufffe\uffff]")
_CELL = "padding:1px 8px;text-align:{};white-space:nowrap"

_values = reprlib.Repr()
_values.maxlist = _values.maxdict = _values.maxtuple = 6
_values.maxstring = _values.maxother = CELL_CHARACTERS_MAX


def escaped(text: object) -> str:
    """Return ``text`` for HTML and SVG, in elements and in attributes; what XML cannot hold at all becomes U+FFFD."""
    return html.escape(_NOT_XML.sub("\ufffd", str(text)), quote=True)


def shortened(text: str, length: int = CELL_CHARACTERS_MAX) -> str:
    """Return ``text``, or its beginning."""
    return text if len(text) <= length else text[: length - 1] + "…"


def value_text(value: object) -> str:
    """Return a value of a record as text that fits a cell, however large the value is."""
    if value is None:
        return "null"
    return shortened(value if isinstance(value, str) else _values.repr(value))


def table(titles: Iterable[str], rows: Sequence[Iterable[str]], *, numbers_from: int | None = None) -> str:
    """Return a table of texts. Cells from ``numbers_from`` on stand at the right."""

    def line(tag: str, cells: Iterable[str]) -> str:
        sides = ("right" if numbers_from is not None and at >= numbers_from else "left" for at, _ in enumerate(cells))
        made = (
            f'<{tag} style="{_CELL.format(side)}">{escaped(cell)}</{tag}>'
            for side, cell in zip(sides, cells, strict=True)
        )
        return f"<tr>{''.join(made)}</tr>"

    body = "".join(line("td", tuple(row)) for row in rows)
    return f"<table><thead>{line('th', tuple(titles))}</thead><tbody>{body}</tbody></table>"


WIDTH, HEIGHT = 190, 54
GAP_X, GAP_Y = 90, 26
MARGIN = 14
LOOP_HEIGHT = 50
"""Room below the operators for what leads back."""


@dataclass(frozen=True, slots=True)
class Place:
    """The upper left corner of an operator."""

    x: float
    y: float


@dataclass(frozen=True, slots=True)
class Arrow:
    """What flows from one operator to another; ``how`` is written on it."""

    start: NodeName
    end: NodeName
    how: str
    is_feedback: bool = False


@dataclass(frozen=True, slots=True)
class Layout:
    """Where everything is, and how large the whole is."""

    places: dict[NodeName, Place]
    arrows: tuple[Arrow, ...]
    width: float
    height: float


def make_layout(nodes: Sequence[Node]) -> Layout:
    """Return the layout of ``nodes``, which are in topological order. Feedback edges do not influence it."""
    depth: dict[NodeName, int] = {}
    for node in nodes:
        depth[node.name] = max((depth[edge.upstream] + 1 for edge in node.inputs), default=0)
    row = _rows(nodes, depth)
    columns, rows = max(depth.values(), default=0) + 1, max(row.values(), default=0) + 1
    arrows = tuple(arrow for node in nodes for arrow in _arrows(node))
    return Layout(
        {name: Place(MARGIN + depth[name] * (WIDTH + GAP_X), MARGIN + row[name] * (HEIGHT + GAP_Y)) for name in depth},
        arrows,
        2 * MARGIN + columns * WIDTH + (columns - 1) * GAP_X,
        2 * MARGIN + rows * HEIGHT + (rows - 1) * GAP_Y + (LOOP_HEIGHT if any(a.is_feedback for a in arrows) else 0),
    )


def _rows(nodes: Sequence[Node], depth: dict[NodeName, int]) -> dict[NodeName, float]:
    """Return the row of each node: beside those that feed it, as far as there is room; no two share a place."""
    row: dict[NodeName, float] = {}
    for column in range(max(depth.values(), default=0) + 1):
        wishes: dict[NodeName, float] = {}
        for node in nodes:
            if depth[node.name] == column:
                before = [row[edge.upstream] for edge in node.inputs]
                wishes[node.name] = sum(before) / len(before) if before else 0.0
        free = 0.0
        for name in sorted(wishes, key=wishes.__getitem__):
            row[name] = max(free, wishes[name])
            free = row[name] + 1
    return row


def _arrows(node: Node) -> list[Arrow]:
    forward = [Arrow(edge.upstream, node.name, _how(edge)) for edge in node.inputs]
    return forward + [Arrow(edge.upstream, node.name, _how(edge), is_feedback=True) for edge in node.feedback]


def _how(edge: Edge) -> str:
    how = "" if edge.partitioner is Partitioner.FORWARD else edge.partitioner.value
    if edge.partitioner is Partitioner.HASH:
        how = f"by {', '.join(edge.keys)}"
    return how if edge.tag == MAIN else ", ".join(filter(None, (edge.tag, how)))


NODES_MAX = 200
"""A picture of more is of no use, and makes a notebook slow."""

_STROKES = {Role.SOURCE: "#2b6cd4", Role.SINK: "#7c4dbd", Role.LOOP_HEAD: "#b25e00"}
_FONT = "font-family:system-ui,sans-serif"
_PAPER = '<rect width="100%" height="100%" fill="#ffffff"/>'


def graph_svg(nodes: Sequence[Node], *, is_standalone: bool = False) -> str:
    """Return the picture. ``is_standalone``: it has colours of its own, else those of the page that it stands in.

    ``nodes`` are at most ``NODES_MAX``.
    """
    assert len(nodes) <= NODES_MAX
    layout = make_layout(nodes)
    parts = [_PAPER] if is_standalone else []
    parts += [_arrow(arrow, layout) for arrow in layout.arrows] + [_box(node, layout) for node in nodes]
    width, height = round(layout.width), round(layout.height)
    colour = ' color="#1c2430"' if is_standalone else ""
    size = f'width="{width}" height="{height}" viewBox="0 0 {width} {height}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size}{colour} style="{_FONT};max-width:100%;height:auto">'
    return f"{head}{''.join(parts)}</svg>"


def _box(node: Node, layout: Layout) -> str:
    place = layout.places[node.name]
    stroke = _STROKES.get(node.role, "currentColor")
    return (
        f'<g transform="translate({place.x:g} {place.y:g})">'
        f"<title>{escaped(f'{node.name} ({node.role.value})')}\n{escaped(node.schema_text)}</title>"
        f'<rect width="{WIDTH}" height="{HEIGHT}" rx="8" fill="none" stroke="{stroke}" stroke-opacity="0.8"/>'
        f'<text x="10" y="22" font-size="13" fill="currentColor">{escaped(shortened(node.name, 26))}</text>'
        f'<text x="10" y="42" font-size="11" fill="currentColor" fill-opacity="0.65">{node.role.value}</text></g>'
    )


def _arrow(arrow: Arrow, layout: Layout) -> str:
    start, end = layout.places[arrow.start], layout.places[arrow.end]
    if arrow.is_feedback:
        low = layout.height + 20
        x1, x2, y1, y2 = start.x + WIDTH / 2, end.x + WIDTH / 2, start.y + HEIGHT, end.y + HEIGHT + 2
        return _line(f"M{x1:g} {y1:g} C{x1:g} {low:g} {x2:g} {low:g} {x2:g} {y2:g}", _head(x2, y2, "up"), "#b25e00")
    x1, y1, x2, y2 = start.x + WIDTH, start.y + HEIGHT / 2, end.x - 2, end.y + HEIGHT / 2
    bend = max(30.0, (x2 - x1) / 2)
    line = _line(f"M{x1:g} {y1:g} C{x1 + bend:g} {y1:g} {x2 - bend:g} {y2:g} {x2:g} {y2:g}", _head(x2, y2, "right"))
    x, y = (x1 + x2) / 2, (y1 + y2) / 2 - 6
    style = 'font-size="11" fill="currentColor" fill-opacity="0.65" text-anchor="middle"'
    how = escaped(shortened(arrow.how, 14))
    return f'{line}<text x="{x:g}" y="{y:g}" {style}>{how}</text>' if how else line


def _line(path: str, head: str, colour: str = "currentColor") -> str:
    return (
        f'<g stroke="{colour}" stroke-opacity="0.6" fill="{colour}"><path d="{path}" fill="none" stroke-width="1.3"/>'
        f'<path d="{head}" stroke="none" fill-opacity="0.6"/></g>'
    )


def _head(x: float, y: float, towards: str) -> str:
    """Return an arrow head at the end of a line. It is no SVG marker: two pictures in one page would share its id."""
    if towards == "up":
        return f"M{x:g} {y:g} l-4 8 l8 0 z"
    return f"M{x:g} {y:g} l-8 -4 l0 8 z"


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
