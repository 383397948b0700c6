"""The queries of NEXMark in SQL, with the names of columns that this package has. Each gives what the function does.

They are Flink's texts where both can say it so.
"""

from __future__ import annotations

from typing import Final

_TEN = "INTERVAL '10' SECOND"
_HOT = f"""SELECT auction, COUNT(*) AS num, window_start AS starttime, window_end AS endtime
        FROM TABLE(HOP(TABLE bid, DESCRIPTOR(date_time), INTERVAL '2' SECOND, {_TEN}))
        GROUP BY auction, window_start, window_end"""
_RANKS = ("price < 10000", "price >= 10000 AND price < 1000000", "price >= 1000000")


def _counts(*columns: str) -> str:
    found = ["COUNT(*) AS total_bids"]
    found += [f"COUNT(*) FILTER (WHERE {prices}) AS rank{i}_bids" for i, prices in enumerate(_RANKS, 1)]
    for column in columns:
        found.append(f"COUNT(DISTINCT {column}) AS total_{column}s")
        found += [
            f"COUNT(DISTINCT {column}) FILTER (WHERE {prices}) AS rank{i}_{column}s"
            for i, prices in enumerate(_RANKS, 1)
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
    {_counts("bidder", "auction")}
FROM bid GROUP BY DATE_FORMAT(date_time, 'yyyy-MM-dd')""",
    "q16": f"""SELECT channel, `day`, DATE_FORMAT(latest, 'HH:mm') AS `minute`, {
        ", ".join(
            f"{what}_{of}s" for of in ("bid", "bidder", "auction") for what in ("total", "rank1", "rank2", "rank3")
        )
    }
FROM (
    SELECT channel, DATE_FORMAT(date_time, 'yyyy-MM-dd') AS `day`, MAX(date_time) AS latest,
    {_counts("bidder", "auction")}
    FROM bid GROUP BY channel, DATE_FORMAT(date_time, 'yyyy-MM-dd')
)""",
    "q17": f"""SELECT auction, DATE_FORMAT(date_time, 'yyyy-MM-dd') AS `day`,
    {_counts()},
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
