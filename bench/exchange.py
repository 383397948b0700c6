"""Throughput between two workers: Arrow batches from one process to another over loopback.

Measures the whole data plane (encode, frame, authenticate, send, receive, check, decode) without operators, for large
and for small batches: gigabytes of batches' memory per second, and CPU seconds of both processes per gigabyte, which
say more on a machine that does something else, too.
"""

from __future__ import annotations

import multiprocessing
import threading
import time
from multiprocessing.connection import Connection as Pipe

import pyarrow as pa

from bench.harness import Options, Result, median
from headgate.codec.frames import EndOfData, batch_element
from headgate.codec.messages import Address
from headgate.model.graph import Edge, Graph, Node, Partitioner, Role
from headgate.model.ids import Generation, NodeName, SubtaskId, WorkerIndex
from headgate.model.plan import Plan, make_plan
from headgate.runtime.wire.exchange import Exchange, ExchangeCallbacks

NAME = "exchange"
SCHEMA = pa.schema([("key", pa.int64()), ("value", pa.int64()), ("at", pa.int64())])
SECRET = b"b" * 32
CREDIT_BYTES = 4 << 20
ROW_BYTES = 24
ROWS = {"large": 65_536, "small": 1_000}
BYTES = {"large": 6_000_000_000, "small": 1_000_000_000}


def run(options: Options) -> Result:
    """Measure each size of batch ``repeat`` times; keep the medians."""
    repeat = int(options.number("repeat", 5, quick=1))
    figures: dict[str, float] = {}
    for size, rows in ROWS.items():
        count = BYTES[size] // (10 if options.quick else 1) // (rows * ROW_BYTES)
        runs = [measure(rows, count) for _ in range(repeat)]
        figures[f"{size}_gb_per_s"] = round(median([rate for rate, _ in runs]), 3)
        figures[f"{size}_cpu_s_per_gb"] = round(median([cpu for _, cpu in runs]), 3)
    return Result(figures, {})


def measure(rows: int, count: int) -> tuple[float, float]:
    """Send ``count`` batches to another process; return gigabytes per second and CPU seconds per gigabyte."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    receiver = context.Process(target=receive, args=(there, count))
    receiver.start()
    changed = threading.Event()
    exchange = make_exchange(0, changed)
    here.send(exchange.address)
    exchange.start(Generation(1), [exchange.address, here.recv()], CREDIT_BYTES)
    edge = plan().edges[0]
    output = exchange.outputs(edge)[1]
    element = batch_element(pa.record_batch([range(rows)] * 3, schema=SCHEMA))
    begun, cpu = time.perf_counter(), time.process_time()
    for _ in range(count):
        while not output.can_send:
            changed.wait(1.0)
            changed.clear()
        output.send(element)
    output.send(EndOfData())
    cpu_there: float = here.recv()
    seconds, cpu = time.perf_counter() - begun, time.process_time() - cpu + cpu_there
    receiver.join()
    exchange.close()
    gigabytes = count * rows * ROW_BYTES / 1e9
    return gigabytes / seconds, cpu / gigabytes


def receive(pipe: Pipe, count: int) -> None:
    """Take all batches, then say what they cost here."""
    changed = threading.Event()
    exchange = make_exchange(1, changed)
    other: Address = pipe.recv()
    pipe.send(exchange.address)
    exchange.start(Generation(1), [other, exchange.address], CREDIT_BYTES)
    channel = exchange.inputs(SubtaskId(plan().edges[0].target, WorkerIndex(1)))[0]
    taken, cpu = 0, time.process_time()
    while taken <= count:  # and the end of data
        if channel.poll() is None:
            changed.wait(1.0)
            changed.clear()
        else:
            taken += 1
    pipe.send(time.process_time() - cpu)
    exchange.close()


def make_exchange(worker: int, changed: threading.Event) -> Exchange:
    def lost(*reason: object) -> None:
        print("lost:", *reason)

    callbacks = ExchangeCallbacks(lambda _: changed.set(), lambda _: changed.set(), lost, lost)
    return Exchange(WorkerIndex(worker), plan(), [SCHEMA], SECRET, callbacks)


def plan() -> Plan:
    """Return a source and a sink with a shuffle in between, two subtasks each."""
    source, sink = NodeName("source"), NodeName("sink")
    edge = Edge(source, Partitioner.HASH, ("key",))
    nodes = (Node(source, Role.SOURCE, (), None), Node(sink, Role.SINK, (edge,), None))
    return make_plan(Graph(nodes), 2, 128)
