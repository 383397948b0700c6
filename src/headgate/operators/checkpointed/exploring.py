"""What a user's function has to do with checkpoints, found out while the pipeline is being built, and its copies."""

from __future__ import annotations

from functools import partial
from types import MethodType
from typing import TypeVar

from headgate.errors import UsageError
from headgate.model.evolution import NO_OPERATOR_RULES, OperatorRules
from headgate.operators.checkpointed.functions import CheckpointedFunction, CheckpointListener, RestoreContext
from headgate.operators.checkpointed.lists import OperatorLists
from headgate.operators.user_function import HookError, copied, user_traceback
from headgate.threads import ThreadEnded

F = TypeVar("F")


def own_copy_of(node: str, function: F) -> F:
    """Return ``function`` for one subtask: a copy if checkpoints have to do with it (HL2), else itself.

    Raises:
        UsageError: it cannot be copied.
    """
    if isinstance(function, CheckpointListener | CheckpointedFunction):
        return copied(node, function)  # type: ignore[no-any-return]
    return function


def unheard(found: object, names: tuple[str, ...] = ("notify_checkpoint_",)) -> str | None:
    """Return why ``found`` would not be called: a method begins with one of ``names``, and it derives from no class
    whose objects are (HL1); None if nothing is wrong.
    """
    for name, mixin in _CALLED.items():
        has_it = name.startswith(names) and callable(getattr(type(found), name, None))
        if has_it and not isinstance(found, mixin):
            return (
                f"{type(found).__name__}.{name} would never be called: derive the class from "
                f"headgate.{mixin.__name__}, too, or give the method another name if it is for your own use"
            )
    return None


def hidden(function: object) -> object | None:
    """Return the object behind a bound method or a partial function that nobody would tell or ask (HL20)."""
    if isinstance(function, partial):
        inner: object = function.func
    elif isinstance(function, MethodType):
        inner = function.__self__
    else:
        return None
    return inner if isinstance(inner, CheckpointListener | CheckpointedFunction) else hidden(inner)


_CALLED = {
    "notify_checkpoint_complete": CheckpointListener,
    "notify_checkpoint_aborted": CheckpointListener,
    "snapshot": CheckpointedFunction,
    "restore": CheckpointedFunction,
}
"""Who derives from what, has such a method called."""


def lists_text(node: str, function: object) -> str:
    """Return the identity of the operator state that ``function`` declares, learned from a copy; "" for none (HL14).

    Raises:
        UsageError: a wrong declaration.
        HookError: its ``restore`` raised.
    """
    lists = _declared(node, function)
    return "" if lists is None else lists.text()


def lists_rules(node: str, function: object) -> OperatorRules:
    """Return what ``function`` says about its lists in older checkpoints, as ``lists_text`` learns them.

    Raises:
        UsageError, HookError
    """
    lists = _declared(node, function)
    return NO_OPERATOR_RULES if lists is None else lists.rules()


def _declared(node: str, function: object) -> OperatorLists | None:
    if not isinstance(function, CheckpointedFunction):
        return None
    lists = OperatorLists(node)
    restored(copied(node, function), lists, is_restored=False)
    return lists


def restored(function: CheckpointedFunction, lists: OperatorLists, *, is_restored: bool) -> None:
    """Call the function's ``restore``.

    Raises:
        UsageError: a wrong declaration, or one that does not fit the checkpoint.
        HookError: it raised.
    """
    try:
        function.restore(RestoreContext(lists, is_restored=is_restored))
    except (UsageError, ThreadEnded, KeyboardInterrupt):  # a pipeline may just be being built
        raise
    except BaseException as error:  # CS26
        raise HookError(lists.node, "restore()", user_traceback(error)) from None
    lists.close()
