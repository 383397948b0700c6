"""Whether a sink that is closed lets everything go: files, connections, pipes (KT6)."""

from __future__ import annotations

import gc
import itertools

import psutil

from headgate.testing.sinks.target import Target
from headgate.testing.sinks.world import World

LIVES = 4
"""So many are closed one after the other. What the first opens for the whole process may stay."""


def check_closed(target: Target) -> str | None:
    """Every life opens, writes, commits and is closed: the process has no more open files than behind the first one."""
    me = psutil.Process()
    if not hasattr(me, "num_fds"):
        return "open files and connections: this system does not count them"
    world = World(target, 3, "a sink was closed")
    counts: list[int] = []
    for _ in range(LIVES):
        life = world.start(2)
        world.advance(life)
        life.close()
        del life
        gc.collect()  # what only lost objects hold is closed with them
        counts.append(me.num_fds())
    grown = [after - before for before, after in itertools.pairwise(counts)]
    assert min(grown) <= 0, f"{world.story}: each time {min(grown)} more files or connections stay open"
    return None
