"""Time ranges in the condition of a join: ``b.ts BETWEEN a.ts - INTERVAL '5' SECOND AND a.ts``.

A range with two ends says how long each row waits for partners. Nothing runs here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, TypeAlias

from headgate.api.sql.expressions import exp, interval_ms
from headgate.dataclass import dataclass

if TYPE_CHECKING:
    from sqlglot.expressions import Expression


@dataclass(frozen=True, slots=True)
class TimeRange:
    """``lower_ms`` <= right time - left time <= ``upper_ms``; ``conditions`` say so."""

    lower_ms: int
    upper_ms: int
    conditions: tuple[Expression, ...]


Times: TypeAlias = Mapping[str, int]
"""The columns of a side that tell its event time: name → how many milliseconds later they are."""


def time_range(conditions: Sequence[Expression], left: Times, right: Times) -> TimeRange | None:
    """Return the range that conditions set.

    Conditions about anything else are left out. None: one end is missing, or the ends cross.
    """
    lower: list[int] = []
    upper: list[int] = []
    used = []
    for condition in conditions:
        found = [ends for part in _comparisons(condition) for ends in [_ends(part, left, right)] if ends is not None]
        if len(found) == len(_comparisons(condition)):
            used.append(condition)
            lower += [end for end, _ in found if end is not None]
            upper += [end for _, end in found if end is not None]
    if not lower or not upper or max(lower) > min(upper):
        return None
    return TimeRange(max(lower), min(upper), tuple(used))


def _comparisons(condition: Expression) -> list[Expression]:
    """Return a condition without BETWEEN."""
    if isinstance(condition, exp().Between):
        value, low, high = condition.this, condition.args["low"], condition.args["high"]
        return [exp().GTE(this=value, expression=low), exp().LTE(this=value, expression=high)]
    return [condition]


def _ends(condition: Expression, left: Times, right: Times) -> tuple[int | None, int | None] | None:
    """Return the least and the greatest value of right time - left time that a comparison allows."""
    kind, other = type(condition), condition.args.get("expression")
    terms = [_terms(node, left, right) for node in (condition.this, other)]
    if kind not in (exp().EQ, exp().LTE, exp().LT, exp().GTE, exp().GT) or terms[0] is None or terms[1] is None:
        return None
    lefts, rights, shift_ms = (one - another for one, another in zip(terms[0], terms[1], strict=True))
    if (lefts, rights) not in ((-1, 1), (1, -1)):
        return None
    end = -shift_ms * rights
    if kind is exp().EQ:
        return end, end
    strict = 1 if kind in (exp().LT, exp().GT) else 0
    is_upper = (kind in (exp().LTE, exp().LT)) == (rights == 1)
    return (None, end - strict) if is_upper else (end + strict, None)


def _terms(node: Expression | None, left: Times, right: Times) -> tuple[int, int, int] | None:
    """Return how often the left and the right time are in a sum, and the milliseconds that are added to them."""
    if isinstance(node, exp().Column) and (node.name in left or node.name in right):
        return int(node.name in left), int(node.name in right), {**left, **right}[node.name]
    if isinstance(node, exp().Interval):
        return 0, 0, interval_ms(node)
    if not isinstance(node, exp().Add | exp().Sub):
        return None
    one, other = _terms(node.this, left, right), _terms(node.expression, left, right)
    if one is None or other is None:
        return None
    sign = 1 if isinstance(node, exp().Add) else -1
    return one[0] + sign * other[0], one[1] + sign * other[1], one[2] + sign * other[2]
