"""Loops: connected components of a growing graph, side by side with micro-batch loops and with Pathway.

Random edges, inserted as fast as they are taken → every vertex learns the smallest vertex it is connected with; two
workers, exactly-once checkpoints each second. *Edge updates per second* are the inserted edges over the time from the
first edge read to the end of the pipeline, when no label circulates any more and everything is committed: no credit is
given for edges that were read and not yet worked off. All labels are checked in every run.

A micro-batch is Structured Streaming's checkpoint: it gets about as many as Headgate takes checkpoints for the same
edges. What it reaches with all edges in one micro-batch, which is no stream any more, stands beside it without a
target. Pathway gets all edges at once, so that it goes through its loop once.
Settings: ``edges``, ``vertices``, ``pairs`` (of runs with checkpoints off and on), ``peer_share`` (of the edges, for
peers too slow for all of them; the average degree stays), ``peer_batches`` (number of micro-batches).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from bench.harness import Options, Result, Target, at_least, at_most, median, skipped, spread
from bench.peers.measure import NotInstalled, measure_components_pathway, measure_components_streaming

NAME = "loops"

EDGES, VERTICES = 1_000_000, 500_000
CHECKPOINT_INTERVAL_MS = 1_000
RATE_MIN = 200_000.0
MICRO_BATCHES = 5
OVERHEAD_MAX = 0.10
RATIO_STREAMING_MIN = 10.0
RATIO_PATHWAY_MIN = 5.0

Measure = Callable[[int | None], dict[str, Any]]
"""One run of Headgate with checkpoints each so many milliseconds (None: off)."""


def run(options: Options) -> Result:
    """Measure Headgate with checkpoints off and on, then the peers; judge."""
    # Imported here, not above: comparing figures must be testable without a runtime.
    from bench.headgate_components import expected_labels, measure, spark

    edges = int(options.number("edges", EDGES, quick=200_000))
    vertices = int(options.number("vertices", edges // 2))
    expected = expected_labels(edges, vertices)
    with spark() as session:
        headgate = measure_pairs(
            lambda interval_ms: measure(session, edges, vertices, interval_ms, expected),
            int(options.number("pairs", 5, quick=2)),
        )
    shown = {name: value for name, value in headgate.items() if not name.startswith("runs")}
    print(json.dumps({"headgate": shown}), flush=True)  # the peers take minutes
    share = options.number("peer_share", 1.0)
    peer_edges, peer_vertices = int(edges * share), int(vertices * share)
    batches = int(options.number("peer_batches", MICRO_BATCHES))
    streaming = measure_components_streaming(peer_edges, peer_vertices, [peer_edges // batches, peer_edges])
    pathway = measure_components_pathway(peer_edges, peer_vertices)
    return compare({"edges": edges, "vertices": vertices}, headgate, streaming, pathway)


def measure_pairs(measure: Measure, pairs: int) -> dict[str, Any]:
    """Measure with checkpoints off and on in turns, after one run that is thrown away (the JVM is cold)."""
    measure(CHECKPOINT_INTERVAL_MS)
    off, on = [], []
    for _ in range(pairs):
        off.append(measure(None))
        on.append(measure(CHECKPOINT_INTERVAL_MS))
    rate, rate_off = (median([run["edges_per_s"] for run in runs]) for runs in (on, off))
    return {
        "edges_per_s": rate,
        "edges_per_s_no_checkpoints": rate_off,
        "edges_per_s_spread": spread([run["edges_per_s"] for run in on]),
        "edges_per_cpu_s": median([run["edges_per_cpu_s"] for run in on]),
        "labels_told": median([run["labels_told"] for run in on]),
        "checkpoint_bytes_max": max(run["checkpoint_bytes_max"] for run in on),
        "slowdowns": [1 - b["edges_per_s"] / a["edges_per_s"] for a, b in zip(off, on, strict=True)],
        # How many labels circulate differs from run to run; what one costs, less so.
        "slowdowns_per_label": [1 - _labels_per_s(b) / _labels_per_s(a) for a, b in zip(off, on, strict=True)],
        "runs": on,
        "runs_no_checkpoints": off,
    }


def compare(
    size: Mapping[str, int],
    headgate: Mapping[str, Any],
    streaming: Mapping[str, Any],
    pathway: Mapping[str, Any] | NotInstalled,
) -> Result:
    """Return ratios and targets; a peer with wrong labels has no rate to compare with."""
    rate = float(headgate["edges_per_s"])
    figures: dict[str, Any] = {
        **size,
        "edges_per_s": rate,
        "slowdown_by_checkpoints": median(headgate["slowdowns"]),
        "slowdown_per_label": median(headgate["slowdowns_per_label"]),
        "headgate": dict(headgate),
        "structured_streaming": dict(streaming),
        "ratio_streaming": _ratio(rate, streaming, "edges_per_s_growing"),
        "ratio_streaming_at_once": _ratio(rate, streaming, "edges_per_s_at_once"),
        "ratio_streaming_per_cpu_s": _ratio(float(headgate["edges_per_cpu_s"]), streaming, "edges_per_cpu_s_growing"),
    }
    targets: dict[str, Target] = {
        "edges_per_s": at_least(RATE_MIN),
        "slowdown_by_checkpoints": at_most(OVERHEAD_MAX),
        "ratio_streaming": at_least(RATIO_STREAMING_MIN),
        "ratio_pathway": at_least(RATIO_PATHWAY_MIN),
    }
    if isinstance(pathway, NotInstalled):
        print(pathway.reason, flush=True)
        targets["ratio_pathway"] = skipped(targets["ratio_pathway"], "not installed")
    else:
        per_cpu = _ratio(float(headgate["edges_per_cpu_s"]), pathway, "edges_per_cpu_s")
        figures |= {
            "pathway": dict(pathway),
            "ratio_pathway": _ratio(rate, pathway, "edges_per_s_at_once"),
            "ratio_pathway_per_cpu_s": per_cpu,
        }
    return Result(figures, targets)


def _labels_per_s(run: Mapping[str, Any]) -> float:
    return float(run["labels_told"]) / float(run["seconds"])


def _ratio(rate: float, peer: Mapping[str, Any], figure: str) -> float | None:
    return rate / float(peer[figure]) if peer["is_right"] else None
