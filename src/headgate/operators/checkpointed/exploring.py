"""What a user's function has to do with checkpoints, found out while the pipeline is being built, and its copies."""

from __future__ import annotations

from typing import TypeVar

from headgate.errors import UsageError
from headgate.operators.checkpointed.functions import CheckpointedFunction, CheckpointListener, RestoreContext
from headgate.operators.checkpointed.lists import OperatorLists
from headgate.operators.user_function import HookError, copied, user_traceback

F = TypeVar("F")


def own_copy_of(node: str, function: F) -> F:
    """Return ``function`` for one subtask: a copy if checkpoints have to do with it (HL2), else itself.

    Raises:
        UsageError: it cannot be copied.
    """
    if isinstance(function, CheckpointListener | CheckpointedFunction):
        return copied(node, function)  # type: ignore[no-any-return]
    return function


def lists_text(node: str, function: object) -> str:
    """Return the identity of the operator state that ``function`` declares, learned from a copy; "" for none (HL14).

    Raises:
        UsageError: a wrong declaration.
        HookError: its ``restore`` raised.
    """
    if not isinstance(function, CheckpointedFunction):
        return ""
    lists = OperatorLists(node)
    restored(copied(node, function), lists, is_restored=False)
    return lists.text()


def restored(function: CheckpointedFunction, lists: OperatorLists, *, is_restored: bool) -> None:
    """Call the function's ``restore``.

    Raises:
        UsageError: a wrong declaration, or one that does not fit the checkpoint.
        HookError: it raised.
    """
    try:
        function.restore(RestoreContext(lists, is_restored=is_restored))
    except UsageError:
        raise
    except Exception as error:
        raise HookError(lists.node, "restore()", user_traceback(error)) from None
    lists.close()
