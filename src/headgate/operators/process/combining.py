"""Values that what is added is combined with: reducing and aggregating state by row (ST19).

To a backend and a checkpoint both are a value per key; only the function in front of it differs, and it belongs to the
program. Counterparts: ``functions``, whose ``StateHandle`` makes them; ``batch_reducing`` has the form by batch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, NoReturn, Protocol, TypeVar

from headgate.errors import UsageError

Value = TypeVar("Value")
Accumulator = TypeVar("Accumulator")
Result_co = TypeVar("Result_co", covariant=True)


class AggregateFunction(Generic[Value, Accumulator, Result_co]):
    """Base class of functions that combine values into one result through an accumulator, which the state holds.

    Headgate calls the methods for the current key. The function itself has no state.
    """

    def initial(self) -> Accumulator:
        """Return the accumulator of a key to which nothing has been added yet."""
        raise NotImplementedError

    def add(self, accumulator: Accumulator, value: Value) -> Accumulator:
        """Return the accumulator with ``value`` added. It may be the given object, changed, but not None."""
        raise NotImplementedError

    def result(self, accumulator: Accumulator) -> Result_co:
        """Return the result of all values that were added so far."""
        raise NotImplementedError


class _OneValue(Protocol):
    """What is asked of a value state (``functions.ValueState``)."""

    @property
    def exists(self) -> bool: ...

    def get(self, default: Any = None) -> Any: ...

    def put(self, value: Any) -> None: ...

    def clear(self) -> None: ...


class _Combined:
    """What both kinds share."""

    def __init__(self, node: str, name: str, value: _OneValue) -> None:
        """For Headgate only; declare states with ``StateHandle``."""
        self._node = node
        self._name = name
        self._value = value

    @property
    def exists(self) -> bool:
        """Whether anything was added for the key since it was cleared."""
        return self._value.exists

    def clear(self) -> None:
        """Forget what the key has in this state; nothing of it remains in snapshots."""
        self._value.clear()

    def _put(self, combined: Any) -> None:
        if combined is None:  # ``put(None)`` would clear: whatever was added so far would be gone without a word
            self._refuse("its function returned None instead of what it has so far; return that, or call clear()")
        self._value.put(combined)

    def _refuse_none(self, value: Any) -> None:
        if value is None:
            self._refuse("None cannot be added; leave it out")

    def _refuse(self, problem: str) -> NoReturn:
        raise UsageError(f"state '{self._name}' of operator '{self._node}': {problem}")


class ReducingState(_Combined):
    """One value of the current key: the first value that was added, combined with each later one."""

    def __init__(self, node: str, name: str, value: _OneValue, combine: Callable[[Any, Any], Any]) -> None:
        """For Headgate only; declare states with ``StateHandle``."""
        super().__init__(node, name, value)
        self._combine = combine

    def add(self, value: Any) -> None:
        """Combine ``value`` with the present value, if there is one.

        Raises:
            UsageError: ``value`` or the result is None, or the result does not fit the state's type.
        """
        self._refuse_none(value)
        found = self._value.get()
        self._put(value if found is None else self._combine(found, value))

    def get(self, default: Any = None) -> Any:
        """Return the combined value, or ``default`` if nothing was added."""
        return self._value.get(default)


class AggregatingState(_Combined):
    """An accumulator of the current key. Reading it returns the result of its ``AggregateFunction``."""

    def __init__(self, node: str, name: str, value: _OneValue, function: AggregateFunction[Any, Any, Any]) -> None:
        """For Headgate only; declare states with ``StateHandle``."""
        super().__init__(node, name, value)
        self._function = function

    def add(self, value: Any) -> None:
        """Add ``value`` to the accumulator.

        Raises:
            UsageError: ``value`` or the accumulator is None, or the accumulator does not fit the state's type.
        """
        self._refuse_none(value)
        found = self._value.get()
        self._put(self._function.add(self._function.initial() if found is None else found, value))

    def get(self, default: Any = None) -> Any:
        """Return the result, or ``default`` if nothing has been added."""
        found = self._value.get()
        return default if found is None else self._function.result(found)
