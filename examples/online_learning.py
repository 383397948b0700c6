"""Online learning: workers learn a model together from examples that stream in, and predict with it meanwhile.

    headgate run examples/online_learning.py

``python examples/online_learning.py`` also checks the result. Examples are distributed to ``WORKERS`` keys. A worker
predicts the waiting examples with its current model, sends the gradient of its errors to the single keeper of the
weights, and waits for the new model, which comes back through the loop. So no model is older than one step of each
worker.
``out/predictions`` gets one prediction for each example, ``out/models`` every version of the weights.
"""

import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa

import headgate as hg

WORKERS, EXAMPLES, BATCH, RATE = 4, 6_000, 16, 0.2
WEIGHTS = (2.0, -1.0, 0.5, 3.0)
NOISE, ERROR_MAX = 0.1, 0.05

VECTOR = pa.list_(pa.float64())
EXAMPLE = {"id": pa.int64(), "x": VECTOR, "y": pa.float64()}

Row = dict[str, Any]


class Worker(hg.ProcessFunction):
    """A row is an example, or a model that came back (``weights``). Results are predictions and gradients."""

    schema = {"worker": pa.int64(), "id": pa.int64(), "y": pa.float64(), "prediction": pa.float64(),
              "gradient": VECTOR, "examples": pa.int64()}  # fmt: skip

    def open(self, state: hg.StateHandle) -> None:
        """Declare what a worker keeps."""
        self.weights = state.value("weights", VECTOR)
        self.queue = state.list("queue", pa.struct(list(EXAMPLE.items())))
        self.is_waiting = state.value("is-waiting", pa.bool_())

    def process(self, row: Row, context: hg.ProcessContext) -> Iterator[Row]:
        """Queue an example or take a model; use the next examples unless a gradient is still under way."""
        if row["weights"] is None:
            self.queue.append({name: row[name] for name in EXAMPLE})
        else:
            self.weights.put(row["weights"])
            self.is_waiting.clear()
        queue = [] if self.is_waiting.exists else self.queue.get()
        if queue:
            self.queue.put(queue[BATCH:])
            self.is_waiting.put(True)
            yield from self._used(context.key, queue[:BATCH])

    def _used(self, worker: int, examples: list[Row]) -> Iterator[Row]:
        x, y = np.array([e["x"] for e in examples]), np.array([e["y"] for e in examples])
        predictions = x @ np.array(self.weights.get([0.0] * x.shape[1]))
        for example, prediction in zip(examples, predictions.tolist(), strict=True):
            yield {"worker": worker, "id": example["id"], "y": example["y"], "prediction": prediction,
                   "gradient": None, "examples": None}  # fmt: skip
        gradient = ((predictions - y) @ x).tolist()
        yield {"worker": worker, "id": None, "y": None, "prediction": None,
               "gradient": gradient, "examples": len(examples)}  # fmt: skip


class Keeper(hg.ProcessFunction):
    """Applies gradients to the weights, one after another; answers each with the new model."""

    schema = {"worker": pa.int64(), "weights": VECTOR, "examples": pa.int64()}

    def open(self, state: hg.StateHandle) -> None:
        """Declare what is kept."""
        self.weights = state.value("weights", VECTOR)
        self.examples = state.value("examples", pa.int64())

    def process(self, row: Row, context: hg.ProcessContext) -> Iterator[Row]:
        """Take a step of stochastic gradient descent."""
        gradient = np.array(row["gradient"])
        weights = np.array(self.weights.get([0.0] * len(gradient))) - RATE / BATCH * gradient
        self.weights.put(weights.tolist())
        self.examples.put(self.examples.get(0) + row["examples"])
        yield {"worker": row["worker"], "weights": weights.tolist(), "examples": self.examples.get()}


def learn(loop: hg.KeyedStream) -> tuple[hg.Stream, tuple[hg.Stream, hg.Stream]]:
    """The body of the loop: feed back models; put out predictions and models."""
    used = loop.process(Worker(), name="worker")
    gradients = used.filter(pl.col("gradient").is_not_null()).with_columns(model=pl.lit(0))
    models = gradients.key_by("model").process(Keeper(), name="keeper")
    nothing = [pl.lit(None, dtype).alias(name) for name, dtype in NO_EXAMPLE.items()]
    predictions = used.filter(pl.col("id").is_not_null()).select("id", "y", "prediction")
    return models.select("worker", *nothing, "weights"), (predictions, models.select("examples", "weights"))


NO_EXAMPLE = {"id": pl.Int64(), "x": pl.List(pl.Float64), "y": pl.Float64()}


def build(examples: hg.Stream) -> tuple[hg.Stream, hg.Stream]:
    """Return predictions (``id``, ``y``, ``prediction``) and models (``examples`` used so far, ``weights``).

    ``examples`` have an ``id`` (int64), a vector ``x`` and the value ``y`` that is to be learned.
    """
    dealt = examples.select(*EXAMPLE, worker=pl.col("id") % WORKERS, weights=pl.lit(None, pl.List(pl.Float64)))
    return dealt.select("worker", *EXAMPLE, "weights").key_by("worker").iterate(learn, name="learning")


def random_examples(count: int = EXAMPLES, seed: int = 7) -> pl.DataFrame:
    """Return examples of a linear function with noise."""
    dice = np.random.default_rng(seed)
    x = dice.normal(size=(count, len(WEIGHTS)))
    y = x @ np.array(WEIGHTS) + dice.normal(scale=NOISE, size=count)
    return pl.DataFrame({"id": range(count), "x": x.tolist(), "y": y})


def learned(predictions: pl.DataFrame, models: pl.DataFrame, count: int = EXAMPLES) -> tuple[bool, list[float]]:
    """Return whether every example was used exactly once and the last weights are close to the true ones; these."""
    used_once = sorted(predictions["id"]) == list(range(count)) and models["examples"].max() == count
    weights: list[float] = models.sort("examples")["weights"][-1].to_list()
    return used_once and all(abs(w - true) < ERROR_MAX for w, true in zip(weights, WEIGHTS, strict=True)), weights


def pipeline() -> hg.Pipeline:
    """Return the pipeline; ``headgate run`` calls this."""
    p = hg.Pipeline("online-learning", parallelism=2, checkpointing=hg.Checkpointing(interval="1s"))
    predictions, models = build(p.source(hg.FromRows(random_examples(), splits=2, batch_rows=100)))
    predictions.sink(hg.FileSink("out/predictions", "parquet"), name="predictions")
    models.sink(hg.FileSink("out/models", "parquet"), name="models")
    return p


def main() -> int:
    """Run to the end; compare the weights with those that made the examples."""
    pipeline().run()
    is_right, weights = learned(pl.read_parquet("out/predictions/*.parquet"), pl.read_parquet("out/models/*.parquet"))
    print(f"learned {', '.join(f'{w:.2f}' for w in weights)} from {WEIGHTS}: {'right' if is_right else 'WRONG'}")
    return 0 if is_right else 1


if __name__ == "__main__":
    sys.exit(main())
