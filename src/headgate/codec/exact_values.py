"""Values of a declared type: a value fits it exactly, or it is refused with its place, itself and the type.

Arrow converts whole columns and is lenient: it cuts 1.5 to 1, takes a number for a time and a text for a list. So Arrow
converts only values of Python types for which it is exact; values of all other types are looked at one by one.
docs/how-to/types.md has the rules. Counterpart: ``operators.schemas``, which does the same for Arrow columns.
"""

from __future__ import annotations

import operator
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, date, datetime, time, timedelta
from decimal import Context, Decimal, Inexact, InvalidOperation
from functools import cache
from itertools import chain
from numbers import Rational
from typing import Any

import numpy as np
import pyarrow as pa

_VALUE_CHARS_MAX = 200

_REFUSALS = (TypeError, ValueError, OverflowError, ArithmeticError, pa.ArrowException)
"""What a conversion raises for a value that does not fit."""

_NS_OF_UNIT = {"s": 1_000_000_000, "ms": 1_000_000, "us": 1_000, "ns": 1}
_PS_OF_NUMPY_UNIT = {
    "W": 604_800 * 10**12,
    "D": 86_400 * 10**12,
    "h": 3_600 * 10**12,
    "m": 60 * 10**12,
    "s": 10**12,
    "ms": 10**9,
    "us": 10**6,
    "ns": 10**3,
    "ps": 1,
}

_US = timedelta(microseconds=1)

_NUMPY_INTEGERS = (np.int8, np.int16, np.int32, np.int64, np.uint8, np.uint16, np.uint32, np.uint64)
_NUMPY_FLOATS = (np.float16, np.float32, np.float64)


class MisfitError(ValueError):
    """A value that does not fit its declared type.

    Attributes:
        index: its place among the values that were given.
        path: where it is, such as ``.size[2]`` within that value or ``x.size[2]`` in column ``x``; "": it is the value.
        value: it.
        type: the declared type at ``path``.
    """

    def __init__(self, index: int, path: str, value: object, type: pa.DataType) -> None:
        super().__init__(index, path, value, type)
        self.index = index
        self.path = path
        self.value = value
        self.type = type

    def __str__(self) -> str:
        place = f"'{self.path.removeprefix('.')}'" if self.path else "the value"
        return f"{place} is {self.type}, which cannot hold {described(self.value)}"

    def within(self, column: str) -> MisfitError:
        """Return it with the name of its column in front of its path."""
        return MisfitError(self.index, f"{column}{self.path}", self.value, self.type)


def described(value: object) -> str:
    """Return the type of a value and its repr, of bounded length."""
    try:
        text = repr(value)
    except Exception as error:  # a user's __repr__ must not hide what is wrong
        text = f"whose repr raised {type(error).__name__}"
    return f"{type(value).__name__} {shortened_text(text)}"


def shortened_text(text: str) -> str:
    """Return the text of a value, of bounded length, for a message."""
    return text if len(text) <= _VALUE_CHARS_MAX else text[:_VALUE_CHARS_MAX] + "…"


def exact_array(values: Sequence[Any], dtype: pa.DataType) -> pa.Array:
    """Return Python values as a column of ``dtype``, none of them changed. None is null.

    Raises:
        MisfitError: the first value that does not fit.
    """
    form = _form_of(dtype)
    if form.is_exact_in_arrow(values):
        try:
            return pa.array(values if isinstance(values, list) else list(values), dtype)
        except _REFUSALS:
            pass  # which one it was is found below
    return pa.array([form.exact(value, index, "") for index, value in enumerate(values)], dtype)


def exact_value(value: Any, dtype: pa.DataType) -> Any:
    """Return ``value`` as Arrow takes it for ``dtype`` without a change; None for a null.

    Raises:
        MisfitError: it does not fit.
    """
    return _form_of(dtype).exact(value, 0, "")


def misfits(values: Iterable[Any], dtype: pa.DataType) -> list[MisfitError]:
    """Return all values that do not fit."""
    form, found = _form_of(dtype), []
    for index, value in enumerate(values):
        try:
            form.exact(value, index, "")
        except MisfitError as error:
            found.append(error)
    return found


class _Form(ABC):
    """How values of one type are converted."""

    def __init__(self, dtype: pa.DataType) -> None:
        self.dtype = dtype

    @abstractmethod
    def is_exact_in_arrow(self, values: Sequence[Any]) -> bool:
        """Whether Arrow's own conversion of ``values`` changes none of them. It may still raise."""

    @abstractmethod
    def exact(self, value: Any, index: int, path: str) -> Any:
        """Return what Arrow takes for ``value``.

        Raises:
            MisfitError: it does not fit.
        """


class _ScalarForm(_Form):
    """A type without types in it.

    ``exact_types``: of values that Arrow converts exactly or refuses. ``convert`` makes such a value of any other one,
    or None of one that stands for null, and raises for those that do not fit.
    """

    def __init__(self, dtype: pa.DataType, exact_types: Iterable[type], convert: Callable[[Any], Any]) -> None:
        super().__init__(dtype)
        self._exact_types = frozenset([*exact_types, type(None)])
        self._convert = convert

    def is_exact_in_arrow(self, values: Sequence[Any]) -> bool:
        return self._exact_types.issuperset(map(type, values))

    def exact(self, value: Any, index: int, path: str) -> Any:
        if value is None:
            return None
        try:
            found = self._convert(value)
            pa.scalar(found, self.dtype)
        except _REFUSALS:
            raise MisfitError(index, path, value, self.dtype) from None
        return found


class _SingleForm(_ScalarForm):
    """``float32`` and ``float16``: a float is rounded, as floats are, but a finite one does not become infinite."""

    def is_exact_in_arrow(self, values: Sequence[Any]) -> bool:
        if not super().is_exact_in_arrow(values):
            return False
        try:
            wide = pa.array(values, pa.float64()).to_numpy(zero_copy_only=False)
        except _REFUSALS:
            return False
        return not _overflows(wide, self.dtype)

    def exact(self, value: Any, index: int, path: str) -> Any:
        found = super().exact(value, index, path)
        if found is not None and _overflows(np.array([found]), self.dtype):
            raise MisfitError(index, path, value, self.dtype)
        return found


class _ListForm(_Form):
    """Lists: of lists and tuples, other sequences, and arrays and series of one dimension. A text is no list."""

    def __init__(self, dtype: pa.DataType) -> None:
        super().__init__(dtype)
        self._inner = _form_of(dtype.value_type)
        self._size: int | None = dtype.list_size if pa.types.is_fixed_size_list(dtype) else None

    def is_exact_in_arrow(self, values: Sequence[Any]) -> bool:
        if not {list, tuple, type(None)}.issuperset(map(type, values)):
            return False
        given = (value for value in values if value is not None)
        return self._inner.is_exact_in_arrow(list(chain.from_iterable(given)))

    def exact(self, value: Any, index: int, path: str) -> Any:
        if value is None:
            return None
        elements = elements_of(value)
        if elements is None or self._size not in (None, len(elements)):
            raise MisfitError(index, path, value, self.dtype)
        return [self._inner.exact(element, index, f"{path}[{at}]") for at, element in enumerate(elements)]


class _StructForm(_Form):
    """Structs: of dicts without unknown fields. A field that is missing is null."""

    def __init__(self, dtype: pa.DataType) -> None:
        super().__init__(dtype)
        self._fields = {field.name: _form_of(field.type) for field in dtype}

    def is_exact_in_arrow(self, values: Sequence[Any]) -> bool:
        if not {dict, type(None)}.issuperset(map(type, values)):
            return False
        given = [value for value in values if value is not None]
        if not self._fields.keys() >= set(chain.from_iterable(given)):
            return False
        return all(form.is_exact_in_arrow([value.get(name) for value in given]) for name, form in self._fields.items())

    def exact(self, value: Any, index: int, path: str) -> Any:
        if value is None:
            return None
        if not isinstance(value, Mapping) or not self._fields.keys() >= set(value):
            raise MisfitError(index, path, value, self.dtype)
        return {name: form.exact(value.get(name), index, f"{path}.{name}") for name, form in self._fields.items()}


class _MapForm(_Form):
    """Maps of a stream's type: of dicts, and of lists of pairs or of entries with ``key`` and ``value``."""

    def __init__(self, dtype: pa.DataType) -> None:
        super().__init__(dtype)
        self._key, self._item = _form_of(dtype.key_type), _form_of(dtype.item_type)

    def is_exact_in_arrow(self, values: Sequence[Any]) -> bool:
        return not any(value is not None for value in values)

    def exact(self, value: Any, index: int, path: str) -> Any:
        if value is None:
            return None
        try:
            pairs = map_entries(value)
        except (TypeError, ValueError, KeyError):
            raise MisfitError(index, path, value, self.dtype) from None
        if any(key is None for key, _ in pairs):
            raise MisfitError(index, path, value, self.dtype)
        return [
            (self._key.exact(key, index, f"{path}[{at}].key"), self._item.exact(item, index, f"{path}[{at}].value"))
            for at, (key, item) in enumerate(pairs)
        ]


@cache
def _form_of(dtype: pa.DataType) -> _Form:
    types = pa.types
    if types.is_struct(dtype):
        return _StructForm(dtype)
    if types.is_map(dtype):
        return _MapForm(dtype)
    if types.is_list(dtype) or types.is_large_list(dtype) or types.is_fixed_size_list(dtype):
        return _ListForm(dtype)
    if types.is_boolean(dtype):
        return _ScalarForm(dtype, (bool, np.bool_), _refuse)
    if types.is_integer(dtype):
        return _ScalarForm(dtype, (int, *_NUMPY_INTEGERS), _whole)
    if types.is_float64(dtype):
        return _ScalarForm(dtype, (int, float, *_NUMPY_INTEGERS, *_NUMPY_FLOATS), _float)
    if types.is_floating(dtype):
        return _SingleForm(dtype, (int, float, *_NUMPY_INTEGERS, *_NUMPY_FLOATS), lambda value: _single(value, dtype))
    if types.is_string(dtype) or types.is_large_string(dtype) or types.is_string_view(dtype):
        return _ScalarForm(dtype, (str, np.str_), _text)
    if types.is_binary(dtype) or types.is_large_binary(dtype) or types.is_binary_view(dtype):
        return _ScalarForm(dtype, (bytes, bytearray), _bytes)
    if types.is_date32(dtype):
        return _ScalarForm(dtype, (date,), _date)
    if types.is_timestamp(dtype):
        is_plain = dtype.unit == "us"  # Arrow cuts what is finer than its unit
        return _ScalarForm(dtype, (datetime,) if is_plain else (), lambda value: _timestamp(value, dtype.unit))
    if types.is_duration(dtype):
        is_plain = dtype.unit == "us"
        return _ScalarForm(dtype, (timedelta,) if is_plain else (), lambda value: _duration(value, dtype.unit))
    if types.is_time(dtype):
        return _ScalarForm(dtype, (), lambda value: _time(value, dtype.unit))
    if types.is_decimal(dtype):
        return _ScalarForm(dtype, (Decimal, int), lambda value: _decimal(value, dtype))
    return _ScalarForm(dtype, (), lambda value: value)


def _refuse(value: Any) -> Any:
    if type(value) in (bool, np.bool_):
        return value
    raise TypeError


def _whole(value: Any) -> int:
    """Return an integer, and a float, a Decimal or a Fraction that is whole as one. A bool is no number."""
    if isinstance(value, bool | np.bool_ | np.timedelta64):
        raise TypeError
    if isinstance(value, float | np.floating | Decimal | Rational):
        number: Any = value
        found = int(number)
        if found != value:
            raise ValueError
        return found
    return operator.index(value)


def _float(value: Any) -> float:
    """Return a float, and an integer that a float is equal to as one."""
    if isinstance(value, float | np.floating):
        found = float(value)
        if found != value and value == value:  # longer than a float
            raise ValueError
        return found
    whole = _whole_only(value)
    if int(float(whole)) != whole:
        raise ValueError
    return float(whole)


def _single(value: Any, dtype: pa.DataType) -> float:
    found = _float(value)
    if not isinstance(value, float | np.floating):
        with np.errstate(over="ignore"):
            if float(dtype.to_pandas_dtype()(found)) != found:
                raise ValueError
    return found


def _whole_only(value: Any) -> int:
    if isinstance(value, bool | np.bool_ | np.timedelta64):
        raise TypeError
    return operator.index(value)


def _overflows(wide: np.ndarray[Any, Any], dtype: pa.DataType) -> bool:
    """Whether a finite number is infinite in ``dtype``."""
    with np.errstate(over="ignore", invalid="ignore"):
        narrow = wide.astype(dtype.to_pandas_dtype())
    return bool((np.isinf(narrow) & ~np.isinf(wide)).any())


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError
    return str.__str__(value)  # of an enum, too, the text itself


def _bytes(value: Any) -> bytes:
    if not isinstance(value, bytes | bytearray | memoryview):
        raise TypeError
    return bytes(value)


def _date(value: Any) -> date | int | None:
    if isinstance(value, np.datetime64):
        days = _ticks(value, 86_400 * 10**12) if np.datetime_data(value)[0] in ("Y", "M", "W", "D", "generic") else 1.5
        if days is None or isinstance(days, int):
            return days
        raise ValueError
    if _is_not_a_time(value):
        return None
    if isinstance(value, datetime) or not isinstance(value, date):
        raise TypeError
    return date(value.year, value.month, value.day)


def _timestamp(value: Any, unit: str) -> datetime | int | None:
    if isinstance(value, np.datetime64):
        return _ticks(value, _NS_OF_UNIT[unit] * 1_000)
    if not isinstance(value, datetime):
        raise TypeError
    if _is_not_a_time(value):
        return None
    finer_ns = int(getattr(value, "nanosecond", 0))  # of pandas
    if unit == "us" and not finer_ns:
        return value
    epoch = datetime(1970, 1, 1, tzinfo=None if value.tzinfo is None else UTC)
    plain = value.to_pydatetime(warn=False) if hasattr(value, "to_pydatetime") else value
    return _in_unit(((plain - epoch) // _US) * 1_000 + finer_ns, _NS_OF_UNIT[unit])


def _duration(value: Any, unit: str) -> int | None:
    if hasattr(value, "to_timedelta64"):  # of pandas
        value = value.to_timedelta64()
    if isinstance(value, np.timedelta64):
        return _ticks(value, _NS_OF_UNIT[unit] * 1_000)
    if not isinstance(value, timedelta):
        raise TypeError
    return _in_unit((value // _US) * 1_000, _NS_OF_UNIT[unit])


def _time(value: Any, unit: str) -> int:
    if not isinstance(value, time) or value.tzinfo is not None:
        raise TypeError
    seconds = (value.hour * 60 + value.minute) * 60 + value.second
    return _in_unit((seconds * 1_000_000 + value.microsecond) * 1_000, _NS_OF_UNIT[unit])


def _decimal(value: Any, dtype: pa.DataType) -> Decimal:
    if not isinstance(value, Decimal):
        return Decimal(_whole_only(value))
    exact = Context(prec=76, traps=[Inexact, InvalidOperation])
    return value.quantize(Decimal(1).scaleb(-dtype.scale), context=exact)


def _ticks(value: np.datetime64 | np.timedelta64, ps_of_tick: int) -> int | None:
    """Return a numpy time or duration in whole ticks; None for NaT.

    Raises:
        ValueError: it is no whole number of them, or has no unit of a fixed length.
    """
    found = picoseconds(value)
    return None if found is None else _in_unit(found, ps_of_tick)


def picoseconds(value: np.datetime64 | np.timedelta64) -> int | None:
    """Return a time since 1970 or a duration of numpy; None for NaT.

    Raises:
        ValueError: its unit has no fixed length.
    """
    if np.isnat(value):
        return None
    unit, step = np.datetime_data(value)
    if unit in ("Y", "M") and isinstance(value, np.datetime64):
        value, unit, step = value.astype("datetime64[D]"), "D", 1
    if unit not in _PS_OF_NUMPY_UNIT:
        raise ValueError
    return int(value.astype(np.int64)) * step * _PS_OF_NUMPY_UNIT[unit]


def _in_unit(amount: int, size: int) -> int:
    whole, rest = divmod(amount, size)
    if rest:
        raise ValueError
    return whole


def _is_not_a_time(value: Any) -> bool:
    """Whether it is pandas' NaT, which is a datetime and not equal to itself."""
    return isinstance(value, datetime) and value != value


def elements_of(value: Any) -> Sequence[Any] | None:
    """Return the elements of what may be a list, or None."""
    if isinstance(value, str | bytes | bytearray | memoryview):
        return None
    if isinstance(value, np.ndarray):
        return list(value) if value.ndim == 1 else None
    if isinstance(value, Sequence):
        return value
    if hasattr(value, "to_list") and hasattr(value, "dtype"):  # a series of Polars or pandas
        found: list[Any] = value.to_list()
        return found
    return None


def map_entries(value: Any) -> list[tuple[Any, Any]]:
    """Return the entries of a map: of a dict, or of a list of pairs or of dicts with ``key`` and ``value``.

    Raises:
        TypeError, ValueError, KeyError: it is none.
    """
    if isinstance(value, Mapping):
        return list(value.items())
    if isinstance(value, str | bytes) or not isinstance(value, Iterable):
        raise TypeError
    pairs = []
    for entry in value:
        if isinstance(entry, Mapping):
            if entry.keys() != {"key", "value"}:
                raise KeyError
            pairs.append((entry["key"], entry["value"]))
        else:
            if not isinstance(entry, tuple | list):
                raise TypeError
            key, item = entry
            pairs.append((key, item))
    return pairs
