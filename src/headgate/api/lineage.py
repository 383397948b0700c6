"""The lineage of nodes: keeps state from going to a wrong node after the program was edited (EV13, EV14).

Digests are the same in every process that runs the same program: no address, no order of a set and no hash of Python's
goes into them. Counterpart: ``protocol.checkpoints.compatibility``, which compares them. Never runs anything.
"""

from __future__ import annotations

import functools
import hashlib
import re
import types
from collections.abc import Collection, Iterator
from enum import Enum
from typing import Any

import polars as pl
import pyarrow as pa

from headgate.connectors.base import Sink, Source
from headgate.model.graph import Edge, Graph, Node, Role
from headgate.model.ids import NodeName
from headgate.model.lineage import Lineage, Location, NodeKind
from headgate.operators.timestamps import WithTimestampsSpec
from headgate.plain_text import encodable

VALUES_MAX = 20_000
"""How many values of one node go into its digest."""
BYTES_MAX = 1 << 20
"""Of an array: larger ones are distinguished by their types and sizes."""

_OPAQUE = ("pyspark", "py4j", "threading", "_thread", "socket", "_socket", "ssl", "io", "_io", "logging")
"""Modules of objects that hold other things in each process."""

_ADDRESS = re.compile(r"0x[0-9a-fA-F]+")
_PLAIN = (bool, int, float, complex, str, bytes, type(None), pa.DataType, pa.Field, pa.Schema)


def lineages_of(graph: Graph, derived: Collection[str]) -> dict[str, Lineage]:
    """Return the lineage of every node for which it matters: of sources, sinks, and unnamed nodes with state.

    Args:
        graph: the program.
        derived: nodes without a name of their own.
    """
    return _LineageBuilder(graph, derived).found()


class _LineageBuilder:
    """One pass over a graph, in topological order."""

    def __init__(self, graph: Graph, derived: Collection[str]) -> None:
        self._graph, self._derived = graph, derived
        self._sources: dict[NodeName, frozenset[str]] = {}
        self._digests: dict[NodeName, str] = {}

    def found(self) -> dict[str, Lineage]:
        for node in self._graph.nodes:
            self._describe(node)
        return {str(node.name): self._lineage(node) for node in self._graph.nodes if self._matters(node)}

    def _matters(self, node: Node) -> bool:
        if node.role in (Role.SOURCE, Role.SINK):
            return True
        has_state = bool(node.state_text) or isinstance(node.spec, WithTimestampsSpec) or node.role is Role.LOOP_HEAD
        return has_state and str(node.name) in self._derived

    def _describe(self, node: Node) -> None:
        upstream = [self._sources[edge.upstream] for edge in node.inputs]
        self._sources[node.name] = frozenset().union(*upstream) if upstream else frozenset((str(node.name),))
        if str(node.name) not in self._derived:  # its name tells it
            self._digests[node.name] = ""
            return
        self._digests[node.name] = _digest(_spec_text(node.spec), node.state_text, *self._ways(node.inputs))

    def _ways(self, edges: tuple[Edge, ...]) -> Iterator[str]:
        """Yield what inputs add to a digest; a source or named node represents everything upstream of it."""
        for edge in edges:
            is_known = str(edge.upstream) not in self._derived or not self._graph.node(edge.upstream).inputs
            way = edge.partitioner.value, edge.keys, edge.tag, edge.input
            yield repr((str(edge.upstream) if is_known else self._digests[edge.upstream], way))

    def _lineage(self, node: Node) -> Lineage:
        is_derived = str(node.name) in self._derived
        kind = {Role.SOURCE: NodeKind.SOURCE, Role.SINK: NodeKind.SINK}.get(node.role, NodeKind.OPERATOR)
        spec = node.spec
        places = _locations_of(spec) or ()
        locations = tuple(Location(encodable(place.name), encodable(place.real)) for place in places)
        if not is_derived:
            return Lineage(kind, locations=locations)
        sources = tuple(sorted(self._sources[node.name])) if node.inputs else ()
        digest = self._digests[node.name]
        if node.feedback:  # loops are identified by their bodies
            digest = _digest(digest, *self._ways(node.feedback))
        return Lineage(kind, True, locations, sources, digest)


def _spec_text(spec: object) -> str:
    """Return a text that identifies what a node does; where it reads or writes is in its locations."""
    return repr(list(_Fingerprint().values(spec))) if _locations_of(spec) is None else type(spec).__qualname__


def _locations_of(spec: object) -> tuple[Location, ...] | None:
    """Return what a source or sink reads or writes; None if it does not say that."""
    return spec.locations() if isinstance(spec, Source | Sink) else None


class _Fingerprint:
    """Walks a value and yields texts that distinguish it from others."""

    def __init__(self, around: frozenset[int] = frozenset()) -> None:
        """``around``: the objects that the value is inside of, by their ids."""
        self._around = set(around)
        self._count = 0

    def values(self, value: Any) -> Iterator[str]:
        self._count += 1
        if self._count > VALUES_MAX:
            return
        if isinstance(value, (Enum, *_PLAIN)):
            yield f"{type(value).__name__} {value!r}"
        elif isinstance(value, pl.Expr):
            yield _expression(value)
        elif isinstance(value, type | types.BuiltinFunctionType):
            yield value.__qualname__
        elif id(value) in self._around:
            yield "again"
        else:
            self._around.add(id(value))
            yield from self._parts(value)
            self._around.discard(id(value))

    def _parts(self, value: Any) -> Iterator[str]:
        match value:
            case types.FunctionType():
                yield from self._function(value)
            case types.MethodType():
                yield from self.values(value.__func__)
                yield from self.values(value.__self__)
            case types.CodeType():
                yield f"code {value.co_code.hex()} {value.co_names} {value.co_varnames} {value.co_freevars}"
                yield from self.values(value.co_consts)
            case functools.partial():
                yield from self._each("partial", (value.func, value.args, value.keywords))
            case dict() | types.MappingProxyType():
                yield from self._each("dict", [part for item in value.items() for part in item])
            case set() | frozenset():
                yield f"set {sorted(self._apart(one) for one in value)}"
            case list() | tuple():
                yield from self._each(type(value).__name__, value)
            case _:
                yield from self._object(value)

    def _apart(self, value: Any) -> str:
        return repr(list(_Fingerprint(frozenset(self._around)).values(value)))

    def _each(self, what: str, values: Any) -> Iterator[str]:
        yield f"{what} of {len(values)}"
        for value in values:
            yield from self.values(value)

    def _function(self, function: types.FunctionType) -> Iterator[str]:
        yield f"function {function.__qualname__}"
        yield from self.values(function.__code__)
        yield from self.values([_content(cell) for cell in function.__closure__ or ()])
        yield from self.values([function.__defaults__, function.__kwdefaults__])

    def _object(self, value: Any) -> Iterator[str]:
        yield f"object {type(value).__qualname__}"
        if "<locals>" in type(value).__qualname__:  # another one may be called so
            yield from self.values({name: one for name, one in vars(type(value)).items() if callable(one)})
        if type(value).__module__.partition(".")[0] not in _OPAQUE:
            yield from self._attributes(value)

    def _attributes(self, value: Any) -> Iterator[str]:
        """Yield the attributes of an object, or its bytes, without calling its methods."""
        try:
            view = memoryview(value)
        except TypeError:
            slots = [name for kind in type(value).__mro__ for name in getattr(kind, "__slots__", ())]
            held = {name: getattr(value, name, None) for name in slots if isinstance(name, str)}
            yield from self.values({**held, **getattr(value, "__dict__", {})})
            return
        yield f"{view.format} {view.shape}"
        if view.nbytes <= BYTES_MAX:
            yield hashlib.sha256(view.tobytes()).hexdigest()


def _expression(value: pl.Expr) -> str:
    """Return a digest of an expression: its text leaves out what is long."""
    try:
        return hashlib.sha256(value.meta.serialize()).hexdigest()
    except Exception:  # it holds a function that cannot be serialized, which Polars says in several ways
        return _ADDRESS.sub("", str(value))


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # it is empty
        return None


def _digest(*parts: str) -> str:
    return hashlib.sha256(repr(parts).encode("utf-8", "surrogatepass")).hexdigest()[:16]
