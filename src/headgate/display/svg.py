"""The graph of a pipeline as SVG. Pure text: ``display.layout`` says where things stand, ``display.html`` escapes."""

from __future__ import annotations

from collections.abc import Sequence

from headgate.display.html import escaped, shortened
from headgate.display.layout import HEIGHT, WIDTH, Arrow, Layout, laid_out
from headgate.model.graph import Node, Role

NODES_MAX = 200
"""A picture of more is of no use, and makes a notebook slow (ND3)."""

_STROKES = {Role.SOURCE: "#2b6cd4", Role.SINK: "#7c4dbd", Role.LOOP_HEAD: "#b25e00"}
_FONT = "font-family:system-ui,sans-serif"
_PAPER = '<rect width="100%" height="100%" fill="#ffffff"/>'


def graph_svg(nodes: Sequence[Node], *, is_standalone: bool = False) -> str:
    """Return the picture. ``is_standalone``: it has colours of its own, else those of the page that it stands in.

    ``nodes`` are at most ``NODES_MAX``.
    """
    assert len(nodes) <= NODES_MAX
    layout = laid_out(nodes)
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
    """Return a triangle whose tip is at the end of a line: no marker, whose id two pictures in one page would share."""
    if towards == "up":
        return f"M{x:g} {y:g} l-4 8 l8 0 z"
    return f"M{x:g} {y:g} l-8 -4 l0 8 z"
