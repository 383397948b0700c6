"""State with a TTL, in plain Python and in both forms of process functions: each record is one operation on one key.

What a record's operation saw is told as text, so that the forms and the model can be compared.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import polars as pl
import pyarrow as pa

import headgate as hg

SCHEMA = pa.schema([("key", pa.int64()), ("do", pa.large_string()), ("m", pa.int64()), ("n", pa.int64())])
SEEN = {"key": pa.int64(), "seen": pa.large_string()}
OPERATIONS = (
    *("value put", "value last", "value min", "value add", "value get", "value exists", "value clear"),
    *("list append", "list append", "list get", "list count", "list put", "list clear"),
    *("map put", "map put", "map get", "map contains", "map items", "map remove", "map clear"),
)
FOREVER = 1 << 60


@dataclass
class Model:
    """State as plain dicts, and a clock: every value, element and entry is a pair with its expiry."""

    ttl_ms: int | None
    renews: bool
    now_ms: int = 0
    values: dict[int, tuple[int, int]] = field(default_factory=dict)
    lists: dict[int, list[tuple[int, int]]] = field(default_factory=dict)
    maps: dict[int, dict[int, tuple[int, int]]] = field(default_factory=dict)

    @property
    def next_ms(self) -> int:
        return FOREVER if self.ttl_ms is None else self.now_ms + self.ttl_ms

    def drop(self) -> None:
        self.values = {k: p for k, p in self.values.items() if p[1] > self.now_ms}
        self.lists = {k: kept for k, found in self.lists.items() if (kept := [p for p in found if p[1] > self.now_ms])}
        maps = {k: {m: p for m, p in found.items() if p[1] > self.now_ms} for k, found in self.maps.items()}
        self.maps = {k: found for k, found in maps.items() if found}

    def restore(self, ttl_ms: int | None, renews: bool) -> None:
        """What has expired is gone; nothing lives longer than the TTL from now on, if there is one."""
        if ttl_ms is not None:
            self.drop()
        self.ttl_ms, self.renews = ttl_ms, renews
        limit = self.next_ms
        clip = (lambda p: (p[0], FOREVER)) if ttl_ms is None else (lambda p: (p[0], min(p[1], limit)))
        self.values = {k: clip(p) for k, p in self.values.items()}
        self.lists = {k: [clip(p) for p in found] for k, found in self.lists.items()}
        self.maps = {k: {m: clip(p) for m, p in found.items()} for k, found in self.maps.items()}

    def rows(self) -> int:
        """Return how many rows a snapshot has."""
        self.drop()
        return len(self.values) + sum(map(len, self.lists.values())) + sum(map(len, self.maps.values()))

    def keys(self) -> set[int]:
        self.drop()
        return {*self.values, *self.lists, *self.maps}

    def do(self, key: int, do: str, m: int, n: int) -> str:
        self.drop()
        kind, what = do.split(" ")
        found: Any = getattr(self, f"_{kind}")(what, key, m, n)
        return repr(found)

    def _value(self, what: str, key: int, m: int, n: int) -> object:
        old = self.values[key][0] if key in self.values else None
        new = {
            "put": n,
            "last": n,
            "min": n if old is None else min(old, n),
            "add": n + (old or 0),
        }.get(what)
        if what == "clear":
            self.values.pop(key, None)
        elif new is not None:
            self.values[key] = new, self.next_ms
        elif old is not None and self.renews:
            self.values[key] = old, self.next_ms
        return {"get": old, "exists": old is not None}.get(what)

    def _list(self, what: str, key: int, m: int, n: int) -> object:
        found = self.lists.get(key, [])
        if what == "append":
            self.lists[key] = [*found, (n, self.next_ms)]
        elif what == "put":
            self.lists[key] = [(n, self.next_ms), (m, self.next_ms)]
        elif what == "clear":
            self.lists.pop(key, None)
        elif self.renews:
            self.lists[key] = [(v, self.next_ms) for v, _ in found]
        return {"get": [v for v, _ in found], "count": len(found)}.get(what)

    def _map(self, what: str, key: int, m: int, n: int) -> object:
        found = self.maps.setdefault(key, {})
        old = found.get(m, (None, 0))[0]
        seen: object = {"get": old, "contains": old is not None}.get(what)
        if what == "items":
            seen = sorted((m, v) for m, (v, _) in found.items())
        if what == "put":
            found[m] = n, self.next_ms
        elif what == "remove":
            found.pop(m, None)
        elif what == "clear":
            found.clear()
        elif what == "items" and self.renews:
            self.maps[key] = {m: (v, self.next_ms) for m, (v, _) in found.items()}
        elif old is not None and self.renews:
            found[m] = old, self.next_ms
        return seen


class ByRow(hg.ProcessFunction):
    """By row."""

    schema = SEEN

    def __init__(self, ttl: hg.TTL | None) -> None:
        self.ttl = ttl

    def open(self, state: hg.StateHandle) -> None:
        self.value = state.value("value", pa.int64(), ttl=self.ttl)
        self.list = state.list("list", pa.int64(), ttl=self.ttl)
        self.map = state.map("map", pa.int64(), pa.int64(), ttl=self.ttl)

    def process(self, row: dict[str, Any], context: hg.ProcessContext) -> list[dict[str, Any]]:
        kind, what = row["do"].split(" ")
        seen = getattr(self, f"of_{kind}")(what, row["m"], row["n"])
        return [{"key": row["key"], "seen": repr(seen)}]

    def on_round(self, round: int, context: hg.ProcessContext) -> list[dict[str, Any]]:
        return [{"key": context.key, "seen": "round"}]

    def of_value(self, what: str, m: int, n: int) -> object:
        state = self.value
        match what:
            case "put" | "last":
                state.put(n)
            case "min":
                state.put(min(state.get(n), n))
            case "add":
                state.put(state.get(0) + n)
            case "clear":
                state.clear()
            case "get":
                return state.get()
            case "exists":
                return state.exists
        return None

    def of_list(self, what: str, m: int, n: int) -> object:
        state = self.list
        match what:
            case "append":
                state.append(n)
            case "put":
                state.put([n, m])
            case "clear":
                state.clear()
            case "get":
                found = state.get()
                assert state.exists is (len(found) > 0)
                return found
            case "count":
                return len(state)
        return None

    def of_map(self, what: str, m: int, n: int) -> object:
        state = self.map
        match what:
            case "put":
                state.put(m, n)
            case "remove":
                state.remove(m)
            case "clear":
                state.clear()
            case "get":
                return state.get(m)
            case "contains":
                return state.contains(m)
            case "items":
                found = sorted(state.items())
                assert sorted(state.keys()) == [m for m, _ in found]
                assert (len(state), state.exists) == (len(found), len(found) > 0)
                return found
        return None


class ByBatch(hg.BatchProcessFunction):
    """By batch, one row of it after the other: the order of operations counts."""

    schema = SEEN

    def __init__(self, ttl: hg.TTL | None) -> None:
        self.ttl = ttl

    def open(self, state: hg.BatchStateHandle) -> None:
        self.value = state.value("value", pa.int64(), ttl=self.ttl)
        self.list = state.list("list", pa.int64(), ttl=self.ttl)
        self.map = state.map("map", pa.int64(), pa.int64(), ttl=self.ttl)

    def process(self, batch: pl.DataFrame, context: hg.BatchContext) -> pl.DataFrame:
        seen = []
        for index in range(len(batch)):
            row = batch[index]
            kind, what = row["do"][0].split(" ")
            seen.append(repr(getattr(self, f"of_{kind}")(what, context.lookup(row), row["m"], row["n"])))
        return batch.select("key").with_columns(seen=pl.Series(seen))

    def on_round(self, round: int, context: hg.BatchContext) -> pl.DataFrame:
        return context.keys.frame().with_columns(seen=pl.lit("round"))

    def of_value(self, what: str, keys: hg.Keys, m: pl.Series, n: pl.Series) -> object:
        state = self.value
        match what:
            case "put":
                state.put(n, keys=keys)
            case "last" | "min" | "add":
                before = state.get(keys=keys)[0]
                changed = state.update(n, what, keys=keys)  # type: ignore[arg-type]
                assert changed[0] is (before != state.get(keys=keys)[0])
            case "clear":
                state.clear(keys=keys)
            case "get":
                return state.get(keys=keys)[0]
            case "exists":
                return state.exists(keys=keys)[0]
        return None

    def of_list(self, what: str, keys: hg.Keys, m: pl.Series, n: pl.Series) -> object:
        state = self.list
        match what:
            case "append":
                state.append(n, keys=keys)
            case "put":
                state.put(pl.Series([[n[0], m[0]]]), keys=keys)
            case "clear":
                state.clear(keys=keys)
            case "get":
                found = state.get(keys=keys)[0].to_list()
                assert state.explode(keys=keys)[1].to_list() == found
                return found
            case "count":
                return state.counts(keys=keys)[0]
        return None

    def of_map(self, what: str, keys: hg.Keys, m: pl.Series, n: pl.Series) -> object:
        state = self.map
        match what:
            case "put":
                state.put(m, n, keys=keys)
            case "remove":
                state.remove(m, keys=keys)
            case "clear":
                state.clear(keys=keys)
            case "get":
                return state.get(m, keys=keys)[0]
            case "contains":
                return state.contains(m, keys=keys)[0]
            case "items":
                _, map_keys, values = state.items(keys=keys)
                return sorted(zip(map_keys.to_list(), values.to_list(), strict=True))
        return None


FORMS: dict[str, Any] = {"row": ByRow, "batch": ByBatch}
