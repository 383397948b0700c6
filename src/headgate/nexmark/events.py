"""The source of NEXMark events: persons, auctions and bids, each a function of its event id and the seed.

Every 50 consecutive events are 1 person, 3 auctions and 46 bids. A source delivers the events of one kind; three of
them with the same options are one auction house. Whole columns are computed from arrays of event ids, so that any
division into splits and any restart gives the same events. Text comes from pools that are made once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, TypeAlias

import numpy as np
import polars as pl
import pyarrow as pa

from headgate.connectors.base import Source, SourceContext, SourceReader
from headgate.connectors.generator import GeneratedSplit, GeneratorReader, splitmix
from headgate.errors import UsageError

Ints: TypeAlias = np.ndarray[Any, np.dtype[np.int64]]
Words: TypeAlias = np.ndarray[Any, np.dtype[np.uint64]]

CYCLE = 50
"""Events of one person, three auctions and 46 bids, in this order."""

AUCTIONS = 3
BASE_MS = 1_436_918_400_000
"""2015-07-15 00:00:00 UTC."""

FIRST_ID = 1_000
FIRST_CATEGORY = 10
CATEGORIES = 5
HOT_SPAN = 100
LEAD = 10
IN_FLIGHT = 100
ACTIVE = 1_000
HOT_RATIOS = {"auction": 2, "seller": 4, "bidder": 4}
CHANNELS = 10_000
POOL = 8_192

_TEXT, _TIME = pa.large_string(), pa.timestamp("us")

SCHEMAS = {
    "person": pa.schema(
        [
            ("id", pa.int64()),
            *((name, _TEXT) for name in ("name", "email_address", "credit_card", "city", "state")),
            ("date_time", _TIME),
            ("extra", _TEXT),
        ]
    ),
    "auction": pa.schema(
        [
            ("id", pa.int64()),
            ("item_name", _TEXT),
            ("description", _TEXT),
            ("initial_bid", pa.int64()),
            ("reserve", pa.int64()),
            ("date_time", _TIME),
            ("expires", _TIME),
            ("seller", pa.int64()),
            ("category", pa.int64()),
            ("extra", _TEXT),
        ]
    ),
    "bid": pa.schema(
        [
            ("auction", pa.int64()),
            ("bidder", pa.int64()),
            ("price", pa.int64()),
            ("channel", _TEXT),
            ("url", _TEXT),
            ("date_time", _TIME),
            ("extra", _TEXT),
        ]
    ),
}

Kind: TypeAlias = Literal["person", "auction", "bid"]

FIRST_NAMES = ("Peter", "Paul", "Luke", "John", "Saul", "Vicky", "Kate", "Julie", "Sarah", "Deiter", "Walter")
LAST_NAMES = ("Shultz", "Abrams", "Spencer", "White", "Bartels", "Walton", "Smith", "Jones", "Noris")
CITIES = (
    "Phoenix",
    "Los Angeles",
    "San Francisco",
    "Boise",
    "Portland",
    "Bend",
    "Redmond",
    "Seattle",
    "Kent",
    "Cheyenne",
)
STATES = ("AZ", "CA", "ID", "OR", "WA", "WY")
HOT_CHANNELS = ("Google", "Facebook", "Baidu", "Apple")


@dataclass(frozen=True, slots=True)
class Nexmark(Source):
    """A source of the NEXMark events of one ``kind``: ``"person"``, ``"auction"`` or ``"bid"``.

    Event n is the same in every run with the same ``seed``, whatever the splits and the parallelism. Its time is
    2015-07-15 00:00 UTC plus n / ``tps`` seconds, in column ``date_time``.

    Attributes:
        kind: which events are delivered. Sources of the three kinds with otherwise equal options belong together.
        events: the number of events of all kinds, after which the source ends: 92 % of them are bids, 6 % auctions,
            2 % persons. None: it never ends.
        tps: how many events of all kinds lie within a second of event time. It says nothing about speed.
        rows_per_second: how many events of all kinds are made per second of real time. None: as fast as possible.
        columns: the columns to make. None: all. Text costs most of the time.
        seed: another seed gives other events.
        out_of_order_group: within each group of so many events, their order is changed.
        base_ms: the time of the first event in milliseconds since 1970.
        compat: make events as the reference does: bidders are shifted by 1,000 twice, the first ids do not occur, and
            ``extra`` has characters from H to z.
        splits: a fixed number of splits. None: as many as the first start has subtasks.
        batch_rows: the number of events of all kinds that make a batch.
    """

    kind: Kind
    events: int | None = None
    tps: int = 10_000
    rows_per_second: float | None = None
    columns: tuple[str, ...] | None = None
    seed: int = 0
    out_of_order_group: int = 1
    base_ms: int = BASE_MS
    compat: bool = False
    splits: int | None = None
    batch_rows: int = 65_536

    @property
    def rows(self) -> int | None:
        """The number of events of all kinds."""
        return self.events

    def schema(self) -> pa.Schema:
        """Return the columns of the kind, or those that were chosen.

        Raises:
            UsageError: a number is out of range, or there is no such kind or column.
        """
        if self.kind not in SCHEMAS:
            raise UsageError(f"Nexmark(kind={self.kind!r}) must be 'person', 'auction' or 'bid'")
        for name in ("tps", "rows_per_second", "out_of_order_group", "splits", "batch_rows"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise UsageError(f"Nexmark({name}={value}) must be positive")
        if self.events is not None and self.events < 0:
            raise UsageError(f"Nexmark(events={self.events}) must not be negative")
        schema = SCHEMAS[self.kind]
        if self.columns is None:
            return schema
        if isinstance(self.columns, str) or not self.columns:
            raise UsageError("Nexmark(columns=...) takes the names of columns, such as ('date_time',)")
        for name in self.columns:
            if name not in schema.names:
                raise UsageError(f"Nexmark('{self.kind}') has no column '{name}'; it has {', '.join(schema.names)}")
        if len(set(self.columns)) != len(self.columns):
            raise UsageError(f"Nexmark(columns={self.columns!r}) names a column twice")
        return pa.schema([schema.field(name) for name in self.columns])

    def identity(self) -> str:
        """Positions are numbers of events: they mean the same only for the same events."""
        way = f"{self.kind}; {self.tps}/s from {self.base_ms}; groups of {self.out_of_order_group}"
        return f"nexmark, version 1: {way}; seed {self.seed}" + ("; compat" if self.compat else "")

    def how_to_end(self) -> str | None:
        return "give Nexmark(events=...)" if self.events is None else None

    def open(self, context: SourceContext) -> SourceReader:
        """Return a reader of the splits that this subtask owns."""
        return GeneratorReader(self, context)

    def split_at(self, index: int, count: int, restored: int | None) -> GeneratedSplit:
        """Return one of ``count`` splits, which has delivered ``restored`` events."""
        return _Split(self, index, count, restored)

    def batch(self, numbers: Ints) -> pa.RecordBatch:
        """Return the records of this kind among the events with these numbers, which count from 0."""
        first = 1 if self.compat else 0
        numbers = numbers + first
        group = self.out_of_order_group
        adjusted = numbers if group == 1 else numbers // group * group + numbers * 953 % group
        rem = (adjusted + first) % CYCLE
        if self.kind == "person":
            adjusted = adjusted[rem < 1]
        elif self.kind == "auction":
            adjusted = adjusted[(rem >= 1) & (rem <= AUCTIONS)]
        else:
            adjusted = adjusted[rem > AUCTIONS]
        values = _Values(self, adjusted + first, adjusted)
        schema = self.schema()
        return pa.RecordBatch.from_arrays([_MAKERS[self.kind][name](values) for name in schema.names], schema=schema)


class _Split:
    """Every ``count``-th cycle of events, from cycle ``index`` on."""

    def __init__(self, config: Nexmark, index: int, count: int, restored: int | None) -> None:
        self.name = f"{index} of {count}"
        self.position = restored or 0
        self.rows: int | None = None
        if config.events is not None:
            cycles, rest = divmod(config.events, CYCLE)
            whole = max(0, -(-(cycles - index) // count))
            self.rows = whole * CYCLE + (rest if cycles % count == index else 0)
        self.is_ended = self.rows is not None and restored is not None and restored >= self.rows
        self._config, self._index, self._count = config, index, count

    def remaining(self) -> int:
        """Return how many events are left, or a batch's worth when there is no end."""
        return self._config.batch_rows if self.rows is None else self.rows - self.position

    def take(self, rows: int, now_us: int, schema: pa.Schema) -> pa.RecordBatch:
        """Return the records among the next ``rows`` events."""
        own = np.arange(self.position, self.position + rows, dtype=np.int64)
        self.position += rows
        cycle, place = np.divmod(own, CYCLE)
        return self._config.batch((cycle * self._count + self._index) * CYCLE + place)


def draw(seed: int, ids: Words, k: int) -> Words:
    """Return the k-th random word of each event."""
    with np.errstate(over="ignore"):
        start = np.uint64((seed * 0xD1342543DE82EF95 + k * 0xC2B2AE3D27D4EB4F + 1) % 2**64)
        z = ids * np.uint64(0x9E3779B97F4A7C15) + start
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return z ^ (z >> np.uint64(31))


class _Values:
    """What several columns of the same events need."""

    def __init__(self, config: Nexmark, ids: Ints, adjusted: Ints) -> None:
        self.config, self.ids, self.adjusted = config, ids, adjusted
        self._words = ids.astype(np.uint64)

    def rnd(self, k: int, n: int | Ints) -> Ints:
        """Return a number from 0 to n - 1 for each event; n is less than 2³²."""
        high = draw(self.config.seed, self._words, k) >> np.uint64(32)
        bound = np.uint64(n) if isinstance(n, int) else n.astype(np.uint64)
        return (high * bound >> np.uint64(32)).astype(np.int64)

    def times_us(self, adjusted: Ints) -> Ints:
        """Return event times in whole milliseconds, as microseconds since 1970."""
        return (adjusted * 1_000 // self.config.tps + self.config.base_ms) * 1_000

    def last_person(self) -> Ints:
        return self.ids // CYCLE

    def last_auction(self) -> Ints:
        cycle, rem = np.divmod(self.ids, CYCLE)
        return cycle * AUCTIONS + np.minimum(rem, AUCTIONS) - 1

    def price(self, k: int) -> Ints:
        """Return cents from 100 to 10⁸, each magnitude equally likely: integers between points of the exact curve."""
        place, part = np.divmod(self.rnd(k, _POINTS << 16), 1 << 16)
        low = _price_points()
        found: Ints = low[place] + ((low[place + 1] - low[place]) * part >> 16)
        return found

    def any_person(self, k: int) -> Ints:
        people: Ints = self.last_person() + 1
        active: Ints = np.minimum(people, ACTIVE)
        found: Ints = people - active + self.rnd(k, active + LEAD)
        return found

    def any_auction(self, k: int) -> Ints:
        last = self.last_auction()
        low: Ints = np.maximum(last - IN_FLIGHT, 0)
        return low + self.rnd(k, np.maximum(last - low + 1 + LEAD, 1))


_POINTS = 4_096


@cache
def _price_points() -> Ints:
    return np.array([round(100 * 10 ** (6 * i / _POINTS)) for i in range(_POINTS + 1)], dtype=np.int64)


def _hot(values: _Values, k: int, ratio: int, hot: Ints, cold: Ints) -> Ints:
    return np.where(values.rnd(k, ratio) > 0, hot, cold)


def _array(values: Ints) -> pa.Array:
    return pa.array(values)


def _times(values: Ints) -> pa.Array:
    return pa.Array.from_buffers(_TIME, len(values), [None, pa.py_buffer(np.ascontiguousarray(values))])


# -- text -------------------------------------------------------------------------------------------------------------


def _words(count: int, longest: int, seed: int, blank: str = " ") -> list[str]:
    """Return texts of 3 to ``longest`` letters, with a blank for one letter in 13."""
    raw = splitmix(count * longest, seed).reshape(count, longest)
    letters = (raw % np.uint64(26)).astype(np.uint8) + ord("a")
    letters[(raw >> np.uint64(32)) % np.uint64(13) == 0] = ord(blank)
    text = letters.tobytes().decode()
    spread = max(longest - 3, 1)
    sizes = 3 + (splitmix(count, seed + 1) % np.uint64(spread)).astype(np.int64)
    found = (text[i * longest : i * longest + size] for i, size in enumerate(sizes.tolist()))
    return [word.strip() for word in found]


def _pool(texts: Sequence[str]) -> pa.Array:
    return pa.array(list(texts), _TEXT)


@cache
def _text_pool(longest: int) -> pa.Array:
    return _pool(_words(POOL, longest, longest))


@cache
def _names() -> pa.Array:
    return _pool([f"{first} {last}" for first in FIRST_NAMES for last in LAST_NAMES])


@cache
def _emails() -> pa.Array:
    names, hosts = _words(POOL, 7, 301), _words(POOL, 5, 302)
    return _pool([f"{name}@{host}.com" for name, host in zip(names, hosts, strict=True)])


@cache
def _cards() -> pa.Array:
    groups = (splitmix(POOL * 4, 303) % np.uint64(10_000)).reshape(POOL, 4).tolist()
    return _pool([" ".join(f"{group:04}" for group in card) for card in groups])


@cache
def _channels() -> pa.Array:
    return _pool([*HOT_CHANNELS, *(f"channel-{i}" for i in range(CHANNELS))])


def _channel_id(i: int) -> int:
    """Return the reversed 32 bits of ``i`` as a positive number."""
    word = int(f"{i:032b}"[::-1], 2)
    return abs(word - 2**32 if word >= 2**31 else word)


@cache
def _urls() -> pa.Array:
    """Return the url of each of the channels, in their order."""
    count = len(HOT_CHANNELS) + CHANNELS
    parts = _words(count * 3, 5, 304, "_")
    with_id = (splitmix(count, 305) % np.uint64(10) > 0).tolist()
    urls = []
    for i in range(count):
        url = f"https://www.nexmark.com/{'/'.join(parts[3 * i : 3 * i + 3])}/item.htm?query=1"
        number = i - len(HOT_CHANNELS)
        urls.append(f"{url}&channel_id={_channel_id(number)}" if number >= 0 and with_id[i] else url)
    return _pool(urls)


_FILL_MAX = 640


@cache
def _fill(compat: bool) -> pl.Series:
    """Return texts that are longer than any filler."""
    count = 1_024
    raw = (splitmix(count * _FILL_MAX, 306) % np.uint64(51 if compat else 26)).astype(np.uint8)
    text = (raw + (ord("a") - (25 if compat else 0))).tobytes().decode()
    return pl.Series([text[i * _FILL_MAX : (i + 1) * _FILL_MAX] for i in range(count)])


def _taken(values: _Values, k: int, pool: pa.Array) -> pa.Array:
    return pool.take(_array(values.rnd(k, len(pool))))


def _extra(values: _Values, average: int, others: Ints) -> pa.Array:
    """Return filler that brings a record to its average size; ``others``: the bytes of its other columns."""
    wanted = average - others
    delta = np.rint(0.2 * np.maximum(wanted, 0)).astype(np.int64)
    sizes = np.where(wanted < 0, 0, wanted - delta + values.rnd(90, np.maximum(2 * delta, 1)))
    pool = _fill(values.config.compat)
    texts = pool.gather(values.rnd(91, len(pool)))
    return texts.str.slice(0, pl.Series(np.clip(sizes, 0, _FILL_MAX))).to_arrow().cast(_TEXT)


@cache
def _bid_extras(compat: bool) -> pa.Array:
    """Return the fillers of bids, which do not depend on the other columns."""
    others = np.full(POOL, 32, np.int64)
    return _extra(_Values(Nexmark("bid", compat=compat), np.arange(POOL, dtype=np.int64), others), 100, others)


def _sizes(texts: pa.Array) -> Ints:
    offsets = np.frombuffer(texts.buffers()[1], np.int64, len(texts) + 1, texts.offset * 8)
    return offsets[1:] - offsets[:-1]


# -- columns ----------------------------------------------------------------------------------------------------------


def _person_text(name: str) -> Callable[[_Values], pa.Array]:
    k, pool = {
        "name": (1, _names),
        "email_address": (2, _emails),
        "credit_card": (3, _cards),
        "city": (4, cache(lambda: _pool(CITIES))),
        "state": (5, cache(lambda: _pool(STATES))),
    }[name]
    return lambda values: _taken(values, k, pool())


def _person_extra(values: _Values) -> pa.Array:
    texts = ("name", "email_address", "credit_card", "city", "state")
    others = np.full(len(values.ids), 8, np.int64)
    for name in texts:
        others += _sizes(_PERSON[name](values))
    return _extra(values, 200, others)


def _item_name(values: _Values) -> pa.Array:
    return _taken(values, 11, _text_pool(20))


def _description(values: _Values) -> pa.Array:
    return _taken(values, 12, _text_pool(100))


def _expires(values: _Values) -> pa.Array:
    now = values.times_us(values.adjusted)
    horizon = (values.times_us(values.adjusted + IN_FLIGHT * CYCLE // AUCTIONS) - now) // 1_000
    return _times(now + (1 + values.rnd(13, np.maximum(2 * horizon, 1))) * 1_000)


def _seller(values: _Values) -> pa.Array:
    hot = values.last_person() // HOT_SPAN * HOT_SPAN
    return _array(_hot(values, 14, HOT_RATIOS["seller"], hot, values.any_person(15)) + FIRST_ID)


def _auction_extra(values: _Values) -> pa.Array:
    return _extra(values, 500, 56 + _sizes(_item_name(values)) + _sizes(_description(values)))


def _bid_auction(values: _Values) -> pa.Array:
    hot = values.last_auction() // HOT_SPAN * HOT_SPAN
    return _array(_hot(values, 21, HOT_RATIOS["auction"], hot, values.any_auction(22)) + FIRST_ID)


def _bidder(values: _Values) -> pa.Array:
    hot = values.last_person() // HOT_SPAN * HOT_SPAN + 1
    first = 2 * FIRST_ID if values.config.compat else FIRST_ID
    return _array(_hot(values, 23, HOT_RATIOS["bidder"], hot, values.any_person(24)) + first)


def _channel_numbers(values: _Values) -> pa.Array:
    """Return places in the list of channels: half of them of the four that everyone knows."""
    place = values.rnd(26, 2 * CHANNELS)
    return _array(np.where(place < CHANNELS, place % len(HOT_CHANNELS), place - CHANNELS + len(HOT_CHANNELS)))


def _date_time(values: _Values) -> pa.Array:
    return _times(values.times_us(values.adjusted))


_PERSON: dict[str, Callable[[_Values], pa.Array]] = {
    "id": lambda values: _array(values.last_person() + FIRST_ID),
    **{name: _person_text(name) for name in ("name", "email_address", "credit_card", "city", "state")},
    "date_time": _date_time,
    "extra": _person_extra,
}
_MAKERS: dict[str, dict[str, Callable[[_Values], pa.Array]]] = {
    "person": _PERSON,
    "auction": {
        "id": lambda values: _array(values.last_auction() + FIRST_ID),
        "item_name": _item_name,
        "description": _description,
        "initial_bid": lambda values: _array(values.price(16)),
        "reserve": lambda values: _array(values.price(16) + values.price(17)),
        "date_time": _date_time,
        "expires": _expires,
        "seller": _seller,
        "category": lambda values: _array(FIRST_CATEGORY + values.rnd(18, CATEGORIES)),
        "extra": _auction_extra,
    },
    "bid": {
        "auction": _bid_auction,
        "bidder": _bidder,
        "price": lambda values: _array(values.price(25)),
        "channel": lambda values: _channels().take(_channel_numbers(values)),
        "url": lambda values: _urls().take(_channel_numbers(values)),
        "date_time": _date_time,
        "extra": lambda values: _taken(values, 27, _bid_extras(values.config.compat)),
    },
}
