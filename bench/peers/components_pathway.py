"""Connected components with Pathway's ``iterate``: a peer of ``bench/loops.py``.

Counterpart of ``examples/connected_components.py``: labels become the smallest of the neighbours' labels until none
changes. Written like Pathway's own graph algorithms (``pathway.stdlib.graphs``), with every setting in its favour: all
edges are there from the start, in one file that its engine parses; nothing is persisted. Runs in the peers' own
environment: ``.venv-peers/bin/python -m bench.peers.components_pathway``; the last printed line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bench.components import smallest_connected
from bench.machine import CpuMeter


def components(edges: Any) -> Any:
    """Return the table of labels (by vertex) of ``edges``, a table with ``a`` and ``b``."""
    import pathway as pw

    there = edges.select(u=edges.a, v=edges.b)
    back = edges.select(u=edges.b, v=edges.a)
    both = pw.Table.concat_reindex(there, back)
    vertices = both.groupby(both.u).reduce(vertex=both.u).with_id_from(pw.this.vertex)
    ends = both.select(u=both.pointer_from(both.u), v=both.pointer_from(both.v))
    own = vertices.select(u=vertices.id, v=vertices.id)  # every vertex also tells itself
    told_by = pw.Table.concat_reindex(ends, own)

    def step(labels: Any, told_by: Any) -> Any:
        told = told_by.select(told_by.v, label=labels.ix(told_by.u).label)
        return told.groupby(id=told.v).reduce(label=pw.reducers.min(told.label)).with_universe_of(labels)

    first = vertices.select(label=vertices.vertex)
    labels = pw.iterate(lambda labels, told_by: step(labels, told_by), labels=first, told_by=told_by)
    return vertices.select(vertices.vertex, label=labels.with_universe_of(vertices).label)


def measure(count: int, vertices: int) -> dict[str, Any]:
    """Insert ``count`` edges at once; return the rate and whether the labels are right."""
    import pathway as pw

    dice = np.random.default_rng(7)
    a, b = dice.integers(0, vertices, count), dice.integers(0, vertices, count)
    with tempfile.TemporaryDirectory(prefix="headgate-peer-") as directory:
        source, target = Path(directory) / "edges.csv", Path(directory) / "labels.csv"
        np.savetxt(source, np.column_stack([a, b]), fmt="%d", delimiter=",", header="a,b", comments="")
        edges = pw.io.csv.read(source, schema=pw.schema_from_types(a=int, b=int), mode="static")
        pw.io.csv.write(components(edges), target)
        meter = CpuMeter()
        started = time.monotonic()
        pw.run(monitoring_level=pw.MonitoringLevel.NONE)
        seconds = time.monotonic() - started
        cpu_s, cores_used = meter.cpu_seconds(), meter.cpu_seconds() / meter.seconds()
        found = np.loadtxt(target, delimiter=",", skiprows=1, usecols=(0, 1, 3), dtype=np.int64, quotechar='"')
    expected, kept = smallest_connected(a, b, vertices), found[found[:, 2] > 0]
    return {
        "edges_per_s_at_once": count / seconds,
        "edges": count,
        "seconds": round(seconds, 2),
        "cpu_cores_used": round(cores_used, 2),
        "edges_per_cpu_s": count / cpu_s,
        "is_right": bool((expected[kept[:, 0]] == kept[:, 1]).all()) and len(kept) == len(np.unique([a, b])),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print the result as the last line."""
    parser = argparse.ArgumentParser(description="connected components with Pathway")
    parser.add_argument("--edges", type=int, default=1_000_000)
    parser.add_argument("--vertices", type=int, default=500_000)
    parser.add_argument("--cores", type=int, default=2)
    options = parser.parse_args(arguments)
    os.environ["PATHWAY_THREADS"] = str(options.cores)  # read when Pathway is imported
    import pathway

    head = {"peer": "pathway", "version": pathway.__version__}
    print(json.dumps(head | measure(options.edges, options.vertices)), flush=True)


if __name__ == "__main__":
    main()
