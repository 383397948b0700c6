"""The queries of NEXMark in SQL for the peers of ``bench/nexmark``. Standard library only.

Flink's texts are those of ``headgate.nexmark``, apart from what it says in words of its own. Structured Streaming has
its own functions of windows. It has no text for q4, q7, q9, q15, q16 and q19: they aggregate results that change,
join a stream with its own aggregate, count distinct values, or rank without a window.
"""

from __future__ import annotations

from collections.abc import Mapping

FLINK: Mapping[str, str] = {
    "q12": """SELECT bidder, COUNT(*) AS bid_count, window_start AS starttime, window_end AS endtime
FROM TABLE(TUMBLE(TABLE bid_now, DESCRIPTOR(p_time), INTERVAL '10' SECOND))
GROUP BY bidder, window_start, window_end""",
    "q13": """SELECT B.auction, B.bidder, B.price, B.date_time, S.`value`
FROM bid AS B JOIN side_input AS S ON MOD(B.auction, 10000) = S.key""",
}
"""What Flink says in its own way: processing time, which a view has, and q13, whose files it does not look up."""

_COUNTS = "".join(
    f", COUNT(*) FILTER (WHERE {prices}) AS rank{i}_bids"
    for i, prices in enumerate(("price < 10000", "price >= 10000 AND price < 1000000", "price >= 1000000"), 1)
)

STREAMING: Mapping[str, str] = {
    "q0": "SELECT auction, bidder, price, date_time, extra FROM bid",
    "q1": "SELECT auction, bidder, 0.908 * price AS price, date_time, extra FROM bid",
    "q2": "SELECT auction, price FROM bid WHERE MOD(auction, 123) = 0",
    "q3": """SELECT P.name, P.city, P.state, A.id
FROM auction AS A INNER JOIN person AS P ON A.seller = P.id
WHERE A.category = 10 AND (P.state = 'OR' OR P.state = 'ID' OR P.state = 'CA')""",
    "q5": """SELECT hot.auction, hot.num FROM (
    SELECT EXPLODE(FILTER(counts, c -> c.num = most)) AS hot FROM (
        SELECT MAX(num) AS most, COLLECT_LIST(STRUCT(auction, num)) AS counts FROM (
            SELECT auction, COUNT(*) AS num, window AS of FROM bid
            GROUP BY auction, window(date_time, '10 seconds', '2 seconds')
        ) GROUP BY window(of, '2 seconds')))""",
    "q8": """SELECT P.id, P.name, P.of.start AS starttime
FROM (SELECT id, name, window AS of FROM person GROUP BY id, name, window(date_time, '10 seconds')) AS P
JOIN (SELECT seller, window AS of FROM auction GROUP BY seller, window(date_time, '10 seconds')) AS A
ON P.id = A.seller AND P.of = A.of""",
    "q10": """SELECT auction, bidder, price, date_time, extra,
    DATE_FORMAT(date_time, 'yyyy-MM-dd') AS dt, DATE_FORMAT(date_time, 'HH:mm') AS hm
FROM bid""",
    "q11": """SELECT bidder, COUNT(*) AS bid_count, session_window.start AS starttime, session_window.end AS endtime
FROM bid GROUP BY bidder, session_window(date_time, '10 seconds')""",
    "q12": """SELECT bidder, COUNT(*) AS bid_count, window.start AS starttime, window.end AS endtime
FROM bid_now GROUP BY bidder, window(p_time, '10 seconds')""",
    "q13": """SELECT B.auction, B.bidder, B.price, B.date_time, S.value
FROM bid AS B JOIN side_input AS S ON MOD(B.auction, 10000) = S.key""",
    "q14": """SELECT auction, bidder, 0.908 * price AS price,
    CASE WHEN HOUR(date_time) >= 8 AND HOUR(date_time) <= 18 THEN 'dayTime'
        WHEN HOUR(date_time) <= 6 OR HOUR(date_time) >= 20 THEN 'nightTime'
        ELSE 'otherTime' END AS bid_time_type,
    date_time, extra, CHAR_LENGTH(extra) - CHAR_LENGTH(REPLACE(extra, 'c', '')) AS c_counts
FROM bid WHERE 0.908 * price > 1000000 AND 0.908 * price < 50000000""",
    "q17": f"""SELECT auction, DATE_FORMAT(date_time, 'yyyy-MM-dd') AS day, COUNT(*) AS total_bids{_COUNTS},
    MIN(price) AS min_price, MAX(price) AS max_price, AVG(price) AS avg_price, SUM(price) AS sum_price
FROM bid GROUP BY auction, DATE_FORMAT(date_time, 'yyyy-MM-dd')""",
    "q18": """SELECT last.* FROM (
    SELECT MAX_BY(STRUCT(auction, bidder, price, channel, url, date_time, extra), date_time) AS last
    FROM bid GROUP BY bidder, auction)""",
    "q20": """SELECT B.auction, B.bidder, B.price, B.channel, B.url, B.date_time, B.extra,
    A.item_name, A.description, A.initial_bid, A.reserve, A.date_time AS date_time_auction, A.expires, A.seller,
    A.category, A.extra AS extra_auction
FROM bid AS B INNER JOIN auction AS A ON B.auction = A.id WHERE A.category = 10""",
    "q21": """SELECT * FROM (
    SELECT auction, bidder, price, channel,
        CASE WHEN LOWER(channel) = 'apple' THEN '0' WHEN LOWER(channel) = 'google' THEN '1'
            WHEN LOWER(channel) = 'facebook' THEN '2' WHEN LOWER(channel) = 'baidu' THEN '3'
            ELSE NULLIF(REGEXP_EXTRACT(url, '(&|^)channel_id=([^&]*)', 2), '') END AS channel_id
    FROM bid
) WHERE channel_id IS NOT NULL""",
    "q22": """SELECT auction, bidder, price, channel,
    SPLIT(url, '/')[3] AS dir1, SPLIT(url, '/')[4] AS dir2, SPLIT(url, '/')[5] AS dir3
FROM bid""",
}
"""What Structured Streaming can express."""

UPDATING = ("q12", "q17", "q18")
"""Queries that Structured Streaming writes in update mode: without an event time that closes a group."""
