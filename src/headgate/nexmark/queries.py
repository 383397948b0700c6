"""The queries of NEXMark, in Python and in SQL. A function takes the tables and returns the stream of its results.

Query 6 is not there, as in Flink; query 12 has windows of processing time, which a second run does not repeat. The
texts of SQL have the names of columns that this package has, are Flink's where both can say it so, and give what the
functions do.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from decimal import Decimal
from functools import cached_property
from typing import Final

import polars as pl
import pyarrow as pa

from headgate.api.pipeline import Pipeline
from headgate.api.sql.query import sql
from headgate.api.streams.stream import Stream
from headgate.api.streams.windowed_stream import Session, Sliding, Tumbling
from headgate.connectors.base import Source
from headgate.connectors.memory import FromRows
from headgate.dataclass import dataclass
from headgate.errors import UsageError
from headgate.model.config import Duration
from headgate.nexmark.events import SCHEMAS, Kind, Nexmark

SIDE_ROWS = 10_000
"""Rows of the table of q13."""

OUT_OF_ORDERNESS = "4s"
"""Of the reference's tables."""


class Tables:
    """The streams ``person``, ``auction`` and ``bid`` of a pipeline, and its table ``side_input``.

    Each is read only if a query uses it. The event time of the streams is ``date_time``.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        source: Callable[[Kind], Source] = Nexmark,
        *,
        out_of_orderness: Duration = OUT_OF_ORDERNESS,
    ) -> None:
        """Make the tables of ``pipeline``.

        Args:
            pipeline: what reads them.
            source: returns the source of one kind of events.
            out_of_orderness: how much older than the latest an event may be.
        """
        self._pipeline, self._source, self._out_of_orderness = pipeline, source, out_of_orderness

    def sql(self, query: str) -> Stream:
        """Return the result of a query in SQL over the tables that it names."""
        words = set(re.findall(r"(?i)\b(?:FROM|JOIN|TABLE)\s+(\w+)", query))
        words |= set(re.findall(r"(?i)\bFROM\s+\w+\s+AS\s+\w+\s*,\s*(\w+)", query))
        return sql(query, **{name: getattr(self, name) for name in (*SCHEMAS, "side_input") if name in words})

    @cached_property
    def person(self) -> Stream:
        """People who sell and bid."""
        return self._table("person")

    @cached_property
    def auction(self) -> Stream:
        """What is sold, from ``date_time`` to ``expires``."""
        return self._table("auction")

    @cached_property
    def bid(self) -> Stream:
        """Offers for auctions."""
        return self._table("bid")

    @cached_property
    def side_input(self) -> Stream:
        """A bounded table of 10,000 rows, with which q13 joins: ``key`` and ``value``."""
        numbers = pa.array(range(SIDE_ROWS), pa.int64())
        return self._pipeline.source(FromRows(pa.table({"key": numbers, "value": numbers})), name="side-input")

    def _table(self, kind: Kind) -> Stream:
        records = self._pipeline.source(self._source(kind), name=kind)
        return records.with_timestamps("date_time", out_of_orderness=self._out_of_orderness, name=f"{kind}-times")


@dataclass(frozen=True, slots=True)
class Query:
    """One query.

    Attributes:
        name: such as ``"q5"``.
        about: what its result is.
        build: makes the stream of its results from the tables.
        partition_by: columns by which the files of its results are divided: of q10, which is about files.
    """

    name: str
    about: str
    build: Callable[[Tables], Stream]
    partition_by: tuple[str, ...] = ()

    @property
    def sql(self) -> str:
        """Its text in SQL."""
        return SQL[self.name]


QUERIES: dict[str, Query] = {}
"""All queries that are there, by name."""


def _query(build: Callable[[Tables], Stream], *partition_by: str) -> Callable[[Tables], Stream]:
    assert build.__doc__ is not None
    QUERIES[build.__name__] = Query(build.__name__, build.__doc__.split("\n", 1)[0].rstrip("."), build, partition_by)
    return build


def query(name: str) -> Query:
    """Return the query of that name, such as ``"q5"``.

    Raises:
        UsageError: there is none.
    """
    if name not in QUERIES:
        raise UsageError(f"there is no query '{name}'; there are {', '.join(found.name for found in in_order())}")
    return QUERIES[name]


def in_order() -> list[Query]:
    """Return all queries by their numbers."""
    return sorted(QUERIES.values(), key=lambda found: int(found.name[1:]))


_IN_DOLLARS = pl.col("price") * pl.lit(Decimal("0.908"))
"""An exact decimal, as in the reference."""


@_query
def q0(tables: Tables) -> Stream:
    """Every bid."""
    return tables.bid.select("auction", "bidder", "price", "date_time", "extra")


@_query
def q1(tables: Tables) -> Stream:
    """Every bid with its price times 0.908."""
    return tables.bid.select("auction", "bidder", _IN_DOLLARS.alias("price"), "date_time", "extra")


@_query
def q2(tables: Tables) -> Stream:
    """The bids for one auction in 123."""
    return tables.bid.filter(pl.col("auction") % 123 == 0).select("auction", "price")


@_query
def q14(tables: Tables) -> Stream:
    """Bids of a range of prices, with the time of day and a count of characters."""
    hour = pl.col("date_time").dt.hour()
    day, night = hour.is_between(8, 18), (hour <= 6) | (hour >= 20)
    wanted = _IN_DOLLARS.is_between(Decimal(1_000_000), Decimal(50_000_000), closed="none")
    return tables.bid.filter(wanted).select(
        "auction",
        "bidder",
        _IN_DOLLARS.alias("price"),
        pl.when(day).then(pl.lit("dayTime")).when(night).then(pl.lit("nightTime")).otherwise(pl.lit("otherTime"))
        .alias("bid_time_type"),
        "date_time",
        "extra",
        pl.col("extra").str.count_matches("c", literal=True).cast(pl.Int64).alias("c_counts"),
    )  # fmt: skip


@_query
def q21(tables: Tables) -> Stream:
    """Bids with the number of their channel, by its name or from the url."""
    names = {"apple": "0", "google": "1", "facebook": "2", "baidu": "3"}
    known = pl.col("channel").str.to_lowercase().replace_strict(names, default=None, return_dtype=pl.String)
    found = pl.col("url").str.extract("(?:&|^)channel_id=([^&]*)", 1)
    numbered = tables.bid.select("auction", "bidder", "price", "channel", channel_id=known.fill_null(found))
    return numbered.filter(pl.col("channel_id").is_not_null())


@_query
def q22(tables: Tables) -> Stream:
    """Bids with the three directories of their url."""
    parts = pl.col("url").str.split("/")
    directories = [parts.list.get(i, null_on_oob=True).alias(f"dir{i - 2}") for i in (3, 4, 5)]
    return tables.bid.select("auction", "bidder", "price", "channel", *directories)


@_query
def q5(tables: Tables) -> Stream:
    """The auctions with the most bids in each 10 s, every 2 s."""
    windows = tables.bid.key_by("auction").window(Sliding("10s", "2s"))
    counted = windows.agg(num=pl.len())
    return counted.top_per_window(1, by="num", ties=True).select("auction", "num")


@_query
def q7(tables: Tables) -> Stream:
    """The highest bids of each 10 s."""
    columns = ("auction", "bidder", "price", "date_time", "extra")
    bids = tables.bid.select(*columns)
    return bids.top_per_window(1, by="price", ties=True, window=Tumbling("10s")).select(*columns)


@_query
def q11(tables: Tables) -> Stream:
    """How many bids each bidder makes without a pause of 10 s."""
    sessions = tables.bid.key_by("bidder").window(Session("10s")).agg(bid_count=pl.len())
    return sessions.select("bidder", "bid_count", starttime="window_start", endtime="window_end")


_RANKS = {
    "rank1": pl.col("price") < 10_000,
    "rank2": pl.col("price").is_between(10_000, 1_000_000, closed="left"),
    "rank3": pl.col("price") >= 1_000_000,
}
_DAY = pl.col("date_time").dt.strftime("%Y-%m-%d")


def q10(tables: Tables) -> Stream:
    """Every bid with its day and minute, by which files are divided."""
    minute = pl.col("date_time").dt.strftime("%H:%M")
    return tables.bid.select("auction", "bidder", "price", "date_time", "extra", dt=_DAY, hm=minute)


_query(q10, "dt", "hm")


def _counts(*columns: str) -> list[pl.Expr]:
    """Return counts of bids and of the values of columns, in total and by ranges of prices."""
    found = [pl.len().alias("total_bids")]
    found += [pl.col("price").filter(is_in).len().alias(f"{rank}_bids") for rank, is_in in _RANKS.items()]
    for column in columns:
        found.append(pl.col(column).n_unique().alias(f"total_{column}s"))
        found += [
            pl.col(column).filter(is_in).drop_nulls().n_unique().alias(f"{rank}_{column}s")
            for rank, is_in in _RANKS.items()
        ]
    return found


@_query
def q15(tables: Tables) -> Stream:
    """Bids, bidders and auctions of each day by ranges of prices; a stream with changes."""
    return tables.bid.with_columns(day=_DAY).key_by("day").agg(*_counts("bidder", "auction"))


@_query
def q16(tables: Tables) -> Stream:
    """The statistics of q15 for each channel and day, with the latest minute; a stream with changes."""
    days = tables.bid.with_columns(day=_DAY).key_by("channel", "day")
    counted = days.agg(pl.col("date_time").max().alias("minute"), *_counts("bidder", "auction"))
    return counted.with_columns(minute=pl.col("minute").dt.strftime("%H:%M"))


@_query
def q17(tables: Tables) -> Stream:
    """Bids and prices of each auction and day; a stream with changes."""
    price, days = pl.col("price"), tables.bid.with_columns(day=_DAY).key_by("auction", "day")
    prices = {"min_price": price.min(), "max_price": price.max(), "avg_price": price.mean(), "sum_price": price.sum()}
    return days.agg(*_counts(), *(found.alias(name) for name, found in prices.items()))


@_query
def q18(tables: Tables) -> Stream:
    """The last bid of each bidder for each auction; a stream with changes."""
    return tables.bid.key_by("bidder", "auction").deduplicate("last", by="date_time", within=None)


@_query
def q19(tables: Tables) -> Stream:
    """The ten highest bids for each auction; a stream with changes."""
    return tables.bid.key_by("auction").top(10, by="price", within=None, rank="rank_number")


@_query
def q3(tables: Tables) -> Stream:
    """Who sells in category 10, of three states."""
    auctions = tables.auction.filter(pl.col("category") == 10).select("id", "seller")
    people = tables.person.filter(pl.col("state").is_in(["OR", "ID", "CA"])).select("id", "name", "city", "state")
    return auctions.join(people, left_on="seller", right_on="id", ttl=None).select("name", "city", "state", "id")


def _bids_in_time(tables: Tables, *columns: str) -> Stream:
    """Return auctions with their bids from ``date_time`` to ``expires``; columns of bids end in ``_bid`` if need be."""
    auctions = tables.auction.select(*columns)
    of_bids = ("auction", "price", "date_time", *(("bidder", "extra") if "extra" in columns else ()))
    bids = tables.bid.select(*of_bids)
    pairs = auctions.join(bids, left_on="id", right_on="auction", ttl=None, suffix="_bid")
    return pairs.filter(pl.col("date_time_bid").is_between(pl.col("date_time"), pl.col("expires")))


@_query
def q4(tables: Tables) -> Stream:
    """The average of the winning bids of each category; a stream with changes."""
    pairs = _bids_in_time(tables, "id", "category", "date_time", "expires")
    highest = pairs.key_by("id", "category").agg(final=pl.col("price").max(), retractions=True)
    return highest.key_by("category").agg(average=pl.col("final").mean())


@_query
def q8(tables: Tables) -> Stream:
    """Persons who sell in the 10 s in which they came."""
    sellers = tables.auction.select("date_time", id="seller")
    found = tables.person.select("id", "name", "date_time").join(sellers, on="id", how="semi", window=Tumbling("10s"))
    return found.select("id", "name", starttime=pl.col("date_time").dt.truncate("10s"))


@_query
def q9(tables: Tables) -> Stream:
    """The winning bid of each auction; a stream with changes."""
    pairs = _bids_in_time(tables, *SCHEMAS["auction"].names)
    by = ["price", "date_time_bid"]
    return pairs.key_by("id").top(1, by=by, descending=[True, False], within=None)


@_query
def q12(tables: Tables) -> Stream:
    """How many bids of each bidder come in each 10 s of processing time."""
    windows = tables.bid.key_by("bidder").window(Tumbling("10s", time="processing")).agg(bid_count=pl.len())
    return windows.select("bidder", "bid_count", starttime="window_start", endtime="window_end")


@_query
def q13(tables: Tables) -> Stream:
    """Bids with what a table of 10,000 rows has for their auction."""
    bids = tables.bid.select("auction", "bidder", "price", "date_time", key=pl.col("auction") % SIDE_ROWS)
    joined = bids.join(tables.side_input.broadcast(), on="key")
    return joined.select("auction", "bidder", "price", "date_time", "value")


@_query
def q20(tables: Tables) -> Stream:
    """Bids with their auctions of category 10."""
    auctions = tables.auction.filter(pl.col("category") == 10)
    return tables.bid.join(auctions, left_on="auction", right_on="id", ttl=None, suffix="_auction")


_TEN = "INTERVAL '10' SECOND"
_HOT = f"""SELECT auction, COUNT(*) AS num, window_start AS starttime, window_end AS endtime
        FROM TABLE(HOP(TABLE bid, DESCRIPTOR(date_time), INTERVAL '2' SECOND, {_TEN}))
        GROUP BY auction, window_start, window_end"""
_SQL_RANKS = ("price < 10000", "price >= 10000 AND price < 1000000", "price >= 1000000")


def _sql_counts(*columns: str) -> str:
    found = ["COUNT(*) AS total_bids"]
    found += [f"COUNT(*) FILTER (WHERE {prices}) AS rank{i}_bids" for i, prices in enumerate(_SQL_RANKS, 1)]
    for column in columns:
        found.append(f"COUNT(DISTINCT {column}) AS total_{column}s")
        found += [
            f"COUNT(DISTINCT {column}) FILTER (WHERE {prices}) AS rank{i}_{column}s"
            for i, prices in enumerate(_SQL_RANKS, 1)
        ]
    return ",\n    ".join(found)


SQL: Final[dict[str, str]] = {
    "q0": "SELECT auction, bidder, price, date_time, extra FROM bid",
    "q1": "SELECT auction, bidder, 0.908 * price AS price, date_time, extra FROM bid",
    "q2": "SELECT auction, price FROM bid WHERE MOD(auction, 123) = 0",
    "q3": """SELECT P.name, P.city, P.state, A.id
FROM auction AS A INNER JOIN person AS P ON A.seller = P.id
WHERE A.category = 10 AND (P.state = 'OR' OR P.state = 'ID' OR P.state = 'CA')""",
    "q4": """SELECT Q.category, AVG(Q.final) AS average
FROM (
    SELECT MAX(B.price) AS final, A.id, A.category
    FROM auction AS A JOIN bid AS B ON A.id = B.auction
    WHERE B.date_time BETWEEN A.date_time AND A.expires
    GROUP BY A.id, A.category
) AS Q
GROUP BY Q.category""",
    "q5": f"""SELECT AuctionBids.auction, AuctionBids.num
FROM ({_HOT}) AS AuctionBids
JOIN (
    SELECT MAX(CountBids.num) AS maxn, CountBids.starttime, CountBids.endtime
    FROM ({_HOT}) AS CountBids
    GROUP BY CountBids.starttime, CountBids.endtime
) AS MaxBids
ON AuctionBids.starttime = MaxBids.starttime AND AuctionBids.endtime = MaxBids.endtime
    AND AuctionBids.num >= MaxBids.maxn""",
    "q7": f"""SELECT B.auction, B.bidder, B.price, B.date_time, B.extra
FROM bid AS B
JOIN (
    SELECT MAX(price) AS maxprice, window_start AS starttime, window_end AS endtime
    FROM TABLE(TUMBLE(TABLE bid, DESCRIPTOR(date_time), {_TEN}))
    GROUP BY window_start, window_end
) AS B1
ON B.price = B1.maxprice
WHERE B.date_time >= B1.endtime - {_TEN} AND B.date_time < B1.endtime""",
    "q8": f"""SELECT P.id, P.name, P.starttime
FROM (
    SELECT id, name, window_start AS starttime, window_end AS endtime
    FROM TABLE(TUMBLE(TABLE person, DESCRIPTOR(date_time), {_TEN}))
    GROUP BY id, name, window_start, window_end
) AS P
JOIN (
    SELECT seller, window_start AS starttime, window_end AS endtime
    FROM TABLE(TUMBLE(TABLE auction, DESCRIPTOR(date_time), {_TEN}))
    GROUP BY seller, window_start, window_end
) AS A
ON P.id = A.seller AND P.starttime = A.starttime AND P.endtime = A.endtime""",
    "q9": """SELECT id, item_name, description, initial_bid, reserve, date_time, expires, seller, category, extra,
    auction, bidder, price, date_time_bid, extra_bid, `rank`
FROM (
    SELECT A.*, B.auction, B.bidder, B.price, B.date_time AS date_time_bid, B.extra AS extra_bid,
        ROW_NUMBER() OVER (PARTITION BY A.id ORDER BY B.price DESC, B.date_time ASC) AS `rank`
    FROM auction AS A, bid AS B
    WHERE A.id = B.auction AND B.date_time BETWEEN A.date_time AND A.expires
)
WHERE `rank` <= 1""",
    "q10": """SELECT auction, bidder, price, date_time, extra,
    DATE_FORMAT(date_time, 'yyyy-MM-dd') AS dt, DATE_FORMAT(date_time, 'HH:mm') AS hm
FROM bid""",
    "q11": f"""SELECT bidder, COUNT(*) AS bid_count, window_start AS starttime, window_end AS endtime
FROM TABLE(SESSION(TABLE bid PARTITION BY bidder, DESCRIPTOR(date_time), {_TEN}))
GROUP BY bidder, window_start, window_end""",
    "q12": f"""WITH bid_now AS (SELECT *, PROCTIME() AS p_time FROM bid)
SELECT bidder, COUNT(*) AS bid_count, window_start AS starttime, window_end AS endtime
FROM TABLE(TUMBLE(TABLE bid_now, DESCRIPTOR(p_time), {_TEN}))
GROUP BY bidder, window_start, window_end""",
    "q13": """SELECT B.auction, B.bidder, B.price, B.date_time, S.`value`
FROM (SELECT *, PROCTIME() AS p_time FROM bid) AS B
JOIN side_input FOR SYSTEM_TIME AS OF B.p_time AS S ON MOD(B.auction, 10000) = S.key""",
    "q14": """SELECT auction, bidder, 0.908 * price AS price,
    CASE WHEN HOUR(date_time) >= 8 AND HOUR(date_time) <= 18 THEN 'dayTime'
        WHEN HOUR(date_time) <= 6 OR HOUR(date_time) >= 20 THEN 'nightTime'
        ELSE 'otherTime' END AS bid_time_type,
    date_time, extra, CHAR_LENGTH(extra) - CHAR_LENGTH(REPLACE(extra, 'c', '')) AS c_counts
FROM bid
WHERE 0.908 * price > 1000000 AND 0.908 * price < 50000000""",
    "q15": f"""SELECT DATE_FORMAT(date_time, 'yyyy-MM-dd') AS `day`,
    {_sql_counts("bidder", "auction")}
FROM bid GROUP BY DATE_FORMAT(date_time, 'yyyy-MM-dd')""",
    "q16": f"""SELECT channel, `day`, DATE_FORMAT(latest, 'HH:mm') AS `minute`, {
        ", ".join(
            f"{what}_{of}s" for of in ("bid", "bidder", "auction") for what in ("total", "rank1", "rank2", "rank3")
        )
    }
FROM (
    SELECT channel, DATE_FORMAT(date_time, 'yyyy-MM-dd') AS `day`, MAX(date_time) AS latest,
    {_sql_counts("bidder", "auction")}
    FROM bid GROUP BY channel, DATE_FORMAT(date_time, 'yyyy-MM-dd')
)""",
    "q17": f"""SELECT auction, DATE_FORMAT(date_time, 'yyyy-MM-dd') AS `day`,
    {_sql_counts()},
    MIN(price) AS min_price, MAX(price) AS max_price, AVG(price) AS avg_price, SUM(price) AS sum_price
FROM bid GROUP BY auction, DATE_FORMAT(date_time, 'yyyy-MM-dd')""",
    "q18": """SELECT auction, bidder, price, channel, url, date_time, extra
FROM (SELECT *, ROW_NUMBER() OVER (PARTITION BY bidder, auction ORDER BY date_time DESC) AS rank_number FROM bid)
WHERE rank_number <= 1""",
    "q19": """SELECT *
FROM (SELECT *, ROW_NUMBER() OVER (PARTITION BY auction ORDER BY price DESC) AS rank_number FROM bid)
WHERE rank_number <= 10""",
    "q20": """SELECT B.auction, B.bidder, B.price, B.channel, B.url, B.date_time, B.extra,
    A.item_name, A.description, A.initial_bid, A.reserve, A.date_time AS date_time_auction, A.expires, A.seller,
    A.category, A.extra AS extra_auction
FROM bid AS B INNER JOIN auction AS A ON B.auction = A.id
WHERE A.category = 10""",
    "q21": """SELECT * FROM (
    SELECT auction, bidder, price, channel,
        CASE WHEN LOWER(channel) = 'apple' THEN '0' WHEN LOWER(channel) = 'google' THEN '1'
            WHEN LOWER(channel) = 'facebook' THEN '2' WHEN LOWER(channel) = 'baidu' THEN '3'
            ELSE REGEXP_EXTRACT(url, '(&|^)channel_id=([^&]*)', 2) END AS channel_id
    FROM bid
) WHERE channel_id IS NOT NULL""",
    "q22": """SELECT auction, bidder, price, channel,
    SPLIT_INDEX(url, '/', 3) AS dir1, SPLIT_INDEX(url, '/', 4) AS dir2, SPLIT_INDEX(url, '/', 5) AS dir3
FROM bid""",
}
"""The queries that can be said in SQL, by name."""
