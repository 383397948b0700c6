"""The option ``--restart``: a restart strategy as text, with the names and values that ``headgate.FixedDelay`` and the
others have in a program."""

from __future__ import annotations

from headgate.api.config import ExponentialDelay, FailureRate, FixedDelay, NoRestart, Restart
from headgate.errors import UsageError
from headgate.model.config import RestartStrategy

_KINDS: dict[str, type[Restart]] = {
    "none": NoRestart,
    "fixed-delay": FixedDelay,
    "failure-rate": FailureRate,
    "exponential-delay": ExponentialDelay,
}
_NUMBERS: dict[str, type[int] | type[float]] = {"attempts": int, "failures": int, "multiplier": float, "jitter": float}

RESTART_DEFAULT = "exponential-delay"


def restart_strategy(text: str) -> RestartStrategy:
    """Return the strategy of a text such as ``none`` or ``fixed-delay:attempts=3,delay=5s``.

    Raises:
        UsageError: there is no such strategy or value.
    """
    name, _, rest = text.partition(":")
    kind = _KINDS.get(name.strip().replace("_", "-"))
    if kind is None:
        raise UsageError(f"--restart must begin with one of {', '.join(_KINDS)}, not {name!r}")
    known = list(kind.__dataclass_fields__)
    values: dict[str, object] = {}
    for part in filter(None, rest.split(",")):
        key, is_given, value = (word.strip() for word in part.partition("="))
        key = key.replace("-", "_")
        if key not in known or not is_given:
            what = f"takes {', '.join(f'{field}=…' for field in known)}" if known else "takes no values"
            raise UsageError(f"--restart {name} {what}; {part.strip()!r} is none of them")
        values[key] = _value(key, value)
    return kind(**values).to_config()  # type: ignore[arg-type]


def _value(key: str, text: str) -> object:
    kind = _NUMBERS.get(key)
    if kind is None:
        return text  # a duration: the strategy checks it
    try:
        return kind(text)
    except ValueError:
        what = "a whole number" if kind is int else "a number"
        raise UsageError(f"--restart: {key} must be {what}, not {text!r}") from None
