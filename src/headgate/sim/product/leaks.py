"""What must not be left when a pipeline has finished and a user has started it once more (I6, SM13).

Looks at the disks, and at a worker with work that is done, as an observer: what may be there follows from the rules,
not from a machine. Each function yields a sentence for every find.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping

from headgate.codec.json_files import decode_log_entry
from headgate.connectors.files.publish_log import (
    CLAIMS,
    COMMITTED,
    MERGE_AFTER,
    OWNERS,
    PUBLISHING,
    STAGING,
    decode_files,
)
from headgate.errors import CorruptionError
from headgate.model.manifest import Claim, Manifest
from headgate.runtime.wire.spill import SpillBudget
from headgate.sim.machine.sockets import Network
from headgate.sim.machine.tasks import SimProcess, Tasks
from headgate.sim.product.settings import NAME

_SNAPSHOT = re.compile(rf"{NAME}/chk-(\d+)/.+")
_ASIDE = re.compile(rf"{NAME}/aside/(\d+)-(\d+)/(?:why|behind|log-\d+)")
_BEAT = re.compile(rf"{NAME}/heartbeats/([0-9]{{10}})(-ended)?")
_ENTRY = re.compile(rf"{NAME}/log/\d{{10,}}")
_ID = re.compile(rf"{NAME}/ids/\d{{10,}}")
_RECORD = re.compile(rf"{NAME}/targets/\d{{10,}}-[0-9a-f]{{16}}")
"""What the sinks write to, for who starts over: one for each life and each set of sinks (SO1)."""

_NOTES = (f"{NAME}/life", f"{NAME}/log-hint")


def of_checkpoints(objects: Mapping[str, bytes], retained: int) -> Iterator[str]:
    """Look at a directory of checkpoints, of which the newest ``retained`` are kept (C31, R7, R43, R51)."""
    entries = {path: entry for path in objects if _ENTRY.fullmatch(path) if (entry := _entry(path, objects[path]))}
    manifests = [entry for entry in entries.values() if isinstance(entry, Manifest)]
    kept = {int(manifest.checkpoint) for manifest in manifests}
    asides = [found for path in objects if (found := _ASIDE.fullmatch(path))]
    passed_over = {c for c in kept if any(int(aside[1]) < c < int(aside[2]) for aside in asides)}
    passed_over = {c for c in passed_over if c > min(kept - passed_over, default=0)}  # entries go from the oldest on
    needed = {f"{NAME}/{path}" for manifest in manifests for path in manifest.files}  # perhaps of an older checkpoint
    if len(kept - passed_over) > retained:
        yield f"the log has {len(kept - passed_over)} manifests, and {retained} are retained"
    writers = {manifest.generation for manifest in manifests}
    unreadable = {_number(path) for path in objects if _ENTRY.fullmatch(path)} - {_number(path) for path in entries}
    claims = {path: entry for path, entry in entries.items() if isinstance(entry, Claim)}
    idle = [claim.generation for path, claim in claims.items() if _number(path) + 1 not in unreadable]
    idle = [generation for generation in sorted(idle) if generation not in writers]
    if len(idle) > 1:
        yield f"the log has claims of generations {idle}, which completed nothing"
    until = max((int(aside[2]) for aside in asides), default=0)  # what is aside may need anything older (SF7)
    beats = [int(found[1]) for path in objects if (found := _BEAT.fullmatch(path))]
    if len(set(beats)) > 1:
        yield f"generations {sorted(set(beats))} have signs of life, or ends, on record"
    ids = [path for path in sorted(objects) if _ID.fullmatch(path)]
    if len(ids) > 1:
        yield f"more than one reserved id is there: {ids}"
    for path in sorted(objects):
        snapshot = _SNAPSHOT.fullmatch(path)
        if snapshot is not None:
            if int(snapshot[1]) not in kept and path not in needed and int(snapshot[1]) >= until:
                yield f"{path} belongs to no checkpoint of the log"
        elif path not in _NOTES and not any(form.fullmatch(path) for form in (_ENTRY, _ID, _ASIDE, _BEAT, _RECORD)):
            yield f"{path} is nothing that anybody needs"


def _number(path: str) -> int:
    return int(path.rsplit("/", 1)[1])


def _entry(path: str, data: bytes) -> Claim | Manifest | None:
    try:
        return decode_log_entry(data, path)
    except CorruptionError:
        return None  # damage that nobody has asked for yet


ASKING = "asking"
"""A thread of a simulated user, who may have begun to ask in the moment in which the process ends."""


def of_process(process: SimProcess, tasks: Tasks, network: Network, budget: SpillBudget | None) -> Iterator[str]:
    """Look at a process with work that is done; ``budget`` is that of a worker's loops (L26)."""
    yield from (f"thread {name}" for name in tasks.of(process) if name != ASKING)
    yield from network.of(process)
    if budget is not None and (budget.memory_used_bytes or budget.disk_used_bytes):
        yield f"{budget.memory_used_bytes} bytes of loops in memory and {budget.disk_used_bytes} on disk"


def of_sink(objects: Mapping[str, bytes]) -> Iterator[str]:
    """Look at a directory of committed files: everything is decided, and listed (D4, D8, D11)."""
    rooms = Counter(path.split("/", 1)[0] for path in objects if "/" in path)
    for room in (STAGING, PUBLISHING):
        if rooms.pop(room, 0):
            yield f"undecided output is there: {sorted(p for p in objects if p.startswith(f'{room}/'))[:3]}"
    for room in (CLAIMS, OWNERS):
        if rooms.pop(room, 0) > 1:
            yield f"more than one object is there: {sorted(p for p in objects if p.startswith(f'{room}/'))[:3]}"
    manifests = [path for path in objects if path.startswith(f"{COMMITTED}/")]
    if rooms.pop(COMMITTED, 0) > MERGE_AFTER + 1:
        yield f"there are {len(manifests)} manifests of what was committed"
    if rooms:
        yield f"nobody needs what is in {sorted(rooms)}"
    listed = {file.name for path in manifests for file in decode_files(path, objects[path])}
    for path in sorted(objects):
        if "/" not in path and path not in listed:
            yield f"{path} was published, and nobody lists it"
