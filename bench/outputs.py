"""Outputs of operators that are measured alone."""

from __future__ import annotations

import pyarrow as pa

from headgate.model.graph import OutputTag


class Nowhere:
    """An output that drops what it is given."""

    def emit(self, batch: pa.RecordBatch) -> None:
        """See ``Output``."""

    def emit_to(self, tag: OutputTag, batch: pa.RecordBatch) -> None:
        """See ``Output``."""
        raise AssertionError(tag)

    def emit_watermark(self, watermark_ms: int) -> None:
        """See ``Output``."""

    def emit_idle(self, is_idle: bool) -> None:
        """See ``Output``."""

    def divert(self, bad: pa.RecordBatch) -> None:
        """See ``Output``."""
        raise AssertionError(bad)
