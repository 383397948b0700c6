"""A whole pipeline over TLS: the switch reaches the driver, the workers and every connection between them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from tests.runtime.running import Run, definition_of, pipeline_at

import headgate as hg
from headgate.connectors.files.file_committer import read_committed

Start = Callable[..., Run]


@pytest.mark.parametrize("tls", [True, None])
def test_a_pipeline_runs_over_tls_when_its_user_says_so(start: Start, tmp_path: Path, tls: bool | None) -> None:
    pipeline = pipeline_at(tmp_path, parallelism=2, security=hg.Security(tls=tls))
    rows = pipeline.source(hg.FromRows([{"id": number, "key": number % 7} for number in range(500)]))
    rows.rebalance().sink(hg.FileSink(tmp_path / "out"))
    run = start(definition_of(pipeline))
    assert (run.driver.workers._server._listener._tls is not None) is bool(tls)
    assert run.result().is_finished
    assert read_committed(str(tmp_path / "out"))["id"].sort().to_list() == list(range(500))
