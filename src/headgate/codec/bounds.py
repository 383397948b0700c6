"""What numbers and texts a control message may hold: types for its own fields, checks for the values that it carries.

Counterpart: ``messages``. Source: CN10 of docs/spec/connections.md. A value of the protocol says what its fields mean;
how much of each a peer may send is said here.
"""

from __future__ import annotations

from typing import Annotated, TypeAlias

from msgspec import Meta

from headgate.model.ids import SubtaskId

NAME_CHARS_MAX = 1_024
TEXT_CHARS_MAX = 65_536
LIST_MAX = 1 << 20
ID_MAX = (1 << 63) - 1
ROUND_MAX = (1 << 30) - 2

Id: TypeAlias = Annotated[int, Meta(ge=0, le=ID_MAX)]
Name: TypeAlias = Annotated[str, Meta(max_length=NAME_CHARS_MAX)]
Text: TypeAlias = Annotated[str, Meta(max_length=TEXT_CHARS_MAX)]
Port: TypeAlias = Annotated[int, Meta(ge=0, le=65_535)]


def check_ids(*numbers: int) -> None:
    """Raise ValueError unless each of ``numbers`` could be an ``Id``."""
    for number in numbers:
        if not 0 <= number <= ID_MAX:
            raise ValueError(f"{number} is not from 0 to {ID_MAX}")


def check_rounds(*rounds: int) -> None:
    """Raise ValueError unless each of ``rounds`` is a round of a loop, or -1: none."""
    for round_ in rounds:
        if not -1 <= round_ <= ROUND_MAX:
            raise ValueError(f"round {round_} is not from -1 to {ROUND_MAX}")


def check_subtask(subtask: SubtaskId) -> None:
    """Raise ValueError when the name is too long or the index is none."""
    check_ids(subtask.index)
    if len(subtask.vertex) > NAME_CHARS_MAX:
        raise ValueError(f"a name of {len(subtask.vertex)} characters; there are at most {NAME_CHARS_MAX}")
