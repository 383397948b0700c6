"""What a hook of a pipeline must be (``Pipeline.add_hook``)."""

from __future__ import annotations

from headgate.api.builder import check_name
from headgate.api.not_yet import refuse_lists, refuse_unheard
from headgate.connectors.hooks import CoordinatorHook
from headgate.errors import UsageError
from headgate.model.config import Duration, duration_ms
from headgate.model.definition import HookSpec


def hook_spec(name: str, hook: object, timeout: Duration) -> HookSpec:
    """Return it as what the driver calls, each call for ``timeout`` at most.

    Raises:
        UsageError: it is not a hook, cannot have that name, or the timeout is not positive.
    """
    check_name(name, "a hook")
    if not isinstance(hook, CoordinatorHook):
        raise UsageError(f"hook '{name}' must be an instance of a headgate.CoordinatorHook, not {hook!r}")
    refuse_unheard(f"hook '{name}'", hook)
    refuse_lists(f"hook '{name}'", hook)
    timeout_ms = duration_ms(timeout, f"timeout of hook '{name}'")
    if timeout_ms == 0:
        raise UsageError(f"timeout of hook '{name}' must be positive")
    return HookSpec(name, hook, timeout_ms)
