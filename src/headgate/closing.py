"""Closes several things whole: one that fails leaves no other open (N73)."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from headgate.threads import ThreadEnded


def close_all(closes: Iterable[Callable[[], object]]) -> None:
    """Make every call, whatever the others raise; then raise the first error.

    Connectors are users' code: ``SystemExit`` and a panic of a native library are errors like others (CS26).
    """
    first: BaseException | None = None
    for close in closes:
        try:
            close()
        except ThreadEnded:
            raise
        except BaseException as error:
            first = first or error
    if first is not None:
        raise first
