"""What a repetition cannot cure when a generation begins stops the pipeline, with a sentence (K5).

For calls that promise nothing yet: whose a target is, whether it is there, what may write to it. What a checkpoint
promised is ``sink_commits``'s. Hooks are left to the restart strategy (EI8).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from headgate.errors import CorruptionError, StorageError, UsageError


@contextmanager
def stopping_for_good(problem: str) -> Iterator[None]:
    """Refuse to go on when something is damaged, or storage says that waiting does not help.

    Args:
        problem: what cannot be done then, as a clause.

    Raises:
        UsageError: starting again cannot help.
    """
    try:
        yield
    except StorageError as error:
        if error.is_transient:
            raise
        raise _refusal(problem, error) from error
    except CorruptionError as error:
        raise _refusal(problem, error) from error


def _refusal(problem: str, error: Exception) -> UsageError:
    return UsageError(f"{problem}: {error}; starting again cannot help before that is mended")
