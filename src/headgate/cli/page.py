"""The page of a run (``headgate run --ui PORT``): hears what is shown, and shows it in browsers, too."""

from __future__ import annotations

import os
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from types import TracebackType
from typing import TYPE_CHECKING, Self

from headgate.api.pages import announced
from headgate.cli.progress import ShownObserver, outcome_of
from headgate.cli.text import result_text
from headgate.clock import SYSTEM_CLOCK
from headgate.errors import HeadgateError, UsageError
from headgate.model.definition import PipelineDefinition
from headgate.model.ids import CheckpointId
from headgate.model.progress import LogPlace, PipelineHandle, Progress, RunResult

if TYPE_CHECKING:
    from headgate.web.asking import Asking
    from headgate.web.logs import LogShelf
    from headgate.web.story import Story

TOKEN = "HEADGATE_UI_TOKEN"
"""Environment variable; not an option, which everybody on the machine can read."""
HOST = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class PagePlace:
    """Where a page is served."""

    port: int
    host: str = HOST

    def check(self, option: str = "--ui") -> None:
        """Refuse what cannot be; ``option`` is what was given, for messages.

        Raises:
            UsageError: it is no port, or the packages are missing.
        """
        if not 0 <= self.port < 65_536:
            raise UsageError(f"{option} is {self.port}, but a port is a number up to 65535, or 0 for a free one")
        missing = [name for name in ("starlette", "uvicorn") if find_spec(name) is None]
        if missing:
            raise UsageError(f"the page needs the package {missing[0]}: pip install 'headgate[ui]'")


class ShownByPage:
    """A ``ShownObserver`` in front of another one: shows what it hears in browsers, too.

    Of a run that goes on in another's place (``must_run``) a page that cannot be served is a note, and no error (PG7).
    """

    def __init__(
        self, other: ShownObserver, definition: PipelineDefinition, place: PagePlace, *, must_run: bool = False
    ) -> None:
        self._must_run = must_run
        self._other = other
        self._definition = definition
        self._place = place
        self._opened = ExitStack()
        self._story: Story
        self._asking: Asking
        self._logs: LogShelf
        self._handle: PipelineHandle | None = None

    def __enter__(self) -> Self:
        from headgate.web.app import make_app
        from headgate.web.asking import Asking
        from headgate.web.logs import LogShelf
        from headgate.web.serving import serving
        from headgate.web.story import Story

        self._story, self._asking, self._logs = Story(self._definition), Asking(), LogShelf()
        token = os.environ.pop(TOKEN, None)  # workers run what others wrote: it is not for them (PG3)
        more = "add #token=… with the token to be able to stop it" if token else "read only"
        with ExitStack() as opened:
            answering = partial(make_app, self._story, self._asking, self._logs)
            served = serving(answering, self._place.port, self._place.host, token or None)
            try:
                address = opened.enter_context(served)
                opened.enter_context(announced(self._definition.config.name, address))
                note = f"page: {address} ({more})"
            except UsageError as error:
                if not self._must_run:
                    raise
                note = f"running without a page: {error}"
            opened.enter_context(self._other)
            self._opened = opened.pop_all()
        self._other.on_note(note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._opened.__exit__(kind, error, trace)

    def on_start(self, handle: PipelineHandle) -> None:
        """See ``ShownObserver``."""
        self._asking.begin(handle)
        self._handle = handle
        self._other.on_start(handle)

    def on_progress(self, progress: Progress) -> None:
        """See ``Observer``."""
        self._story.progressed(progress, SYSTEM_CLOCK.wall_ms(), SYSTEM_CLOCK.monotonic_ms())
        if self._handle is not None:
            self._story.aligned(self._handle.alignments())
        self._other.on_progress(progress)

    def on_restart(self, reason: str, delay_ms: int) -> None:
        """See ``Observer``."""
        self._story.restarted(reason, delay_ms, SYSTEM_CLOCK.wall_ms())
        self._other.on_restart(reason, delay_ms)

    def on_note(self, text: str) -> None:
        """See ``Observer``."""
        self._story.noted(text, SYSTEM_CLOCK.wall_ms())
        if isinstance(text, LogPlace):
            self._logs.are_in(text.directory)
        self._other.on_note(text)

    def on_checkpoint(self, checkpoint: CheckpointId, duration_ms: int, size_bytes: int) -> None:
        """See ``Observer``."""
        self._story.checkpoint_completed(checkpoint, duration_ms, size_bytes, SYSTEM_CLOCK.wall_ms())
        self._other.on_checkpoint(checkpoint, duration_ms, size_bytes)

    def on_result(self, result: RunResult) -> None:
        """See ``ShownObserver``."""
        self._story.ended(outcome_of(result), result_text(result), SYSTEM_CLOCK.wall_ms())
        self._other.on_result(result)

    def on_failure(self, error: HeadgateError) -> None:
        """See ``ShownObserver``."""
        self._story.ended("failed", str(error), SYSTEM_CLOCK.wall_ms())
        self._other.on_failure(error)
