"""The key whose turn it is in a function by row."""

from __future__ import annotations

from typing import Any, NoReturn

from headgate.errors import UsageError


class NoKey:
    """Stands for the key while there is none: using it as one says so, at no cost for those who have one."""

    def __hash__(self) -> NoReturn:
        raise UsageError(
            "state belongs to a key, and there is none in open(), in process_broadcast() or without key_by; use it in "
            "process(), on_timer() and on_round()"
        )


class Cursor:
    """The key whose turn it is; shared by the context and all states of one operator."""

    __slots__ = ("key",)

    def __init__(self) -> None:
        self.key: Any = NoKey()
