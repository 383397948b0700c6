"""A run as it is seen in a notebook, live, and anywhere else as one line. ``runtime.driver.handle`` derives from it."""

from __future__ import annotations

from concurrent.futures import Future, wait

from headgate.display.live import LiveDisplay, Shown, in_notebook
from headgate.display.progress import end_text, progress_html
from headgate.model.progress import Progress, RunResult


class ShownRun:
    """What shows itself; ``progress`` is the run's."""

    def __init__(self, name: str, result: Future[RunResult]) -> None:
        """Of the pipeline ``name``, whose run has ended with ``result``."""
        self._name, self._result = name, result
        self._live = LiveDisplay(self._shown, lambda timeout_s: not wait([result], timeout_s).not_done)

    @property
    def progress(self) -> Progress:
        """The latest snapshot."""
        raise NotImplementedError

    def __repr__(self) -> str:
        return f"PipelineHandle({self._name!r}, {self.progress.state.value})"

    def _repr_html_(self) -> str:
        return self._shown()["text/html"]

    def _ipython_display_(self) -> None:
        """Show the run for as long as it goes on: notebooks call this for what a cell returns (ND4)."""
        if not in_notebook():
            raise NotImplementedError("only what a notebook shows can change")
        self._live.show()

    def close_display(self) -> None:
        """The run has ended: what is shown of it shows that."""
        self._live.close()

    def _shown(self) -> Shown:
        result = self._result
        end = (result.exception() or result.result()) if result.done() else None
        html = progress_html(self._name, self.progress, None if end is None else end_text(end))
        return {"text/html": html, "text/plain": repr(self)}
