"""Where files of checkpoints are, and what a pipeline was restored from by name (docs/spec/savepoints.md)."""

from __future__ import annotations

from dataclasses import field, replace
from typing import TypeAlias

from headgate.dataclass import dataclass
from headgate.model.config import Guarantee
from headgate.model.ids import CheckpointId, Generation, SubtaskId
from headgate.model.lineage import Lineage


@dataclass(frozen=True, slots=True)
class Place:
    """Files below the directory ``prefix`` of the storage at ``url``."""

    url: str
    prefix: str

    @property
    def text(self) -> str:
        """As one word, for messages between processes."""
        return f"{self.prefix}@{self.url}"

    @classmethod
    def parse(cls, text: str) -> Place:
        """Return what ``text`` made of it; a prefix has no '@'."""
        prefix, _, url = text.partition("@")
        return cls(url, prefix)


@dataclass(frozen=True, slots=True)
class RestoredFrom:
    """Origin of a restore by name. Every later checkpoint of the pipeline has it, too (SV24).

    Attributes:
        source: the id of the savepoint, or the life of the pipeline that took the checkpoint.
        checkpoint: its id there.
        url: as it was named.
        life: of the pipeline that the state belongs to; "" if that is not known.
        adopted: the id that it got in the log of the pipeline that restored it; None until then.
    """

    source: str
    checkpoint: CheckpointId
    url: str
    life: str = ""
    adopted: CheckpointId | None = None


LOG_VERSION = 1
"""Format of the entries of the checkpoint log."""

BUNDLE = ""
"""Section of a part that holds several small ones: a container of ``codec.snapshot``."""

Rows: TypeAlias = dict[str, dict[str, int]]
"""How many rows each state has, by operator and state."""

Totals: TypeAlias = dict[str, dict[str, int]]
"""How many records were counted, by operator and by what was counted (``model.progress``)."""


@dataclass(frozen=True, slots=True)
class KeyGroups:
    """The contiguous key groups from ``first``, ``count`` of them."""

    first: int
    count: int

    def __post_init__(self) -> None:
        """Refuse what no subtask owns."""
        if self.first < 0 or self.count < 1:
            raise ValueError("a range of key groups begins at 0 or later and is not empty")

    def overlaps(self, other: KeyGroups) -> bool:
        """Whether any key group is in both."""
        return self.first < other.first + other.count and other.first < self.first + self.count

    def common(self, other: KeyGroups) -> KeyGroups:
        """Return the key groups that are in both; they overlap."""
        first = max(self.first, other.first)
        return KeyGroups(first, min(self.first + self.count, other.first + other.count) - first)


@dataclass(frozen=True, slots=True)
class SnapshotPart:
    """Bytes of a checkpoint: inline, or a range of a file in its storage.

    ``path`` is relative to the pipeline's directory in the checkpoint storage; "" means inline.
    ``checksum`` is xxh3-64 of the part's bytes.
    ``rows`` says how many rows each state in it had at the barrier, by node and state; None for files with rows
    that only their backend can count. ``section`` names its owner (``state/<node>``), or says that it is a ``BUNDLE``;
    ``key_groups`` are those of its keys, if it has keys.
    """

    size_bytes: int
    checksum: int
    path: str = ""
    inline: bytes = b""
    rows: Rows | None = field(default=None, hash=False)
    section: str = BUNDLE
    key_groups: KeyGroups | None = None
    offset: int = 0
    name: str = ""
    """The operator's own name for it; nothing else reads it."""

    def __post_init__(self) -> None:
        """Refuse values that no snapshot has; the decoder reports them."""
        if self.size_bytes < 0 or self.checksum < 0 or self.offset < 0:
            raise ValueError("a part of a snapshot has an offset, a size and a checksum, none of them negative")


@dataclass(frozen=True, slots=True)
class Committable:
    """Output of one sink subtask for one checkpoint, prepared: durable and invisible.

    ``payload`` is opaque to everybody but the sink; a large one is in ``stored`` instead, until it is committed.
    ``pieces`` are the output of a sink that prepares it piece by piece; then ``payload`` says what they are.
    Its identity is (pipeline, sink, checkpoint, subtask, generation): K8.
    """

    sink: str
    checkpoint: CheckpointId
    subtask_index: int
    generation: Generation
    payload: bytes
    stored: SnapshotPart | None = None
    pieces: tuple[SnapshotPart, ...] = ()

    @property
    def parts(self) -> tuple[SnapshotPart, ...]:
        """What of it is in the checkpoint storage."""
        return self.pieces if self.stored is None else (self.stored, *self.pieces)


@dataclass(frozen=True, slots=True)
class SnapshotDelays:
    """How long a subtask waited, in milliseconds by its own clock.

    ``start_ms``: from the trigger until the first barrier had come. ``alignment_ms``: from then to the snapshot.
    """

    start_ms: int
    alignment_ms: int


@dataclass(frozen=True, slots=True)
class SubtaskEntry:
    """What one subtask contributed to a checkpoint."""

    subtask: SubtaskId
    parts: tuple[SnapshotPart, ...]
    committables: tuple[Committable, ...] = ()
    """Everything prepared by this subtask and not yet known to belong to a completed checkpoint."""
    delays: SnapshotDelays | None = None
    """None where barriers do not overtake."""
    totals: Totals = field(default_factory=dict, hash=False)
    """What its operators had counted at the barrier, since their generation began. Not in the manifest, which has the
    sum of all."""

    def without_totals(self) -> SubtaskEntry:
        """Return it as it is in the manifest."""
        return SubtaskEntry(self.subtask, self.parts, self.committables, self.delays) if self.totals else self

    @property
    def size_bytes(self) -> int:
        """Size of its snapshot, shared parts included."""
        return sum(part.size_bytes for part in self.parts)

    @property
    def rows(self) -> Rows | None:
        """How many rows each state of it had, by node and state; None if nothing was counted."""
        counted = [part.rows for part in self.parts if part.rows is not None]
        total: Rows = {}
        for rows in counted:
            for node, states in rows.items():
                of_node = total.setdefault(node, {})
                for state, count in states.items():
                    of_node[state] = of_node.get(state, 0) + count
        return total if counted else None


@dataclass(frozen=True, slots=True)
class HookState:
    """What a hook of the coordinator returned for a checkpoint (EI4); ``data`` None: it returned nothing."""

    hook: str
    data: bytes | None = None
    checkpoint: CheckpointId | None = None
    """For which checkpoint it was called, if that is not the manifest's own: one that was restored by name has another
    id here than there."""


@dataclass(frozen=True, slots=True)
class Claim:
    """A generation begins. ``owner`` says who, for messages (host and process), and whether two are the same one."""

    generation: Generation
    owner: str
    wall_ms: int
    follows: int | None = None
    """Sequence of the newest manifest (or of what cannot be read and may be one) when this was written, 0 if there was
    none; what lies between counts for nothing. None: the entry right before this one."""
    life: int = 0
    """Sequence of the claim that ended the life before the present one, by removing all checkpoints; 0: there was none
    (C72). That claim names itself."""
    order: str | None = None
    """Token of the order to start over that this claim, which ends a life, makes count (SO9). None: it is none."""


@dataclass(frozen=True, slots=True)
class Left:
    """The checkpoints after ``above`` and before ``below`` were left: the pipeline went back to ``above`` (SV26).

    With a ``sink``, only what that one had prepared for them was: it was given up (SV30).
    """

    above: CheckpointId
    below: CheckpointId
    sink: str | None = None


@dataclass(frozen=True, slots=True)
class Manifest:
    """A completed checkpoint.

    ``is_final``: taken after all input had ended and every operator had finished.
    ``state_texts``: ``Plan.state_texts()`` of the plan that wrote it.
    """

    checkpoint: CheckpointId
    generation: Generation
    parallelism: int
    max_parallelism: int
    entries: tuple[SubtaskEntry, ...]
    carried: tuple[Committable, ...] = ()
    """Committables of earlier completed checkpoints that were not confirmed yet when this was written."""
    state_texts: dict[str, str] = field(default_factory=dict)
    is_final: bool = False
    trigger_wall_ms: int = 0
    duration_ms: int = 0
    is_draining: bool = False
    """It began after the sources were asked to end, so some may have ended before their input did (E9)."""
    follows: int | None = None
    """Sequence of the manifest that this checkpoint descends from, 0 if none. None: the entry right before this one."""
    log_start: int = 0
    """Sequence of the oldest manifest that is retained with this one: what lies before it counts for nothing."""
    mode: Guarantee = Guarantee.EXACTLY_ONCE
    """Of the run that took it."""
    hooks: tuple[HookState, ...] = ()
    """Of every hook that the pipeline had then, by name."""
    origin: RestoredFrom | None = None
    """What this checkpoint, or the newest one before it that was restored by name, was restored from (SV24)."""
    place: Place | None = None
    """Where the files of its parts are, if not in the pipeline's directory: then they have another owner."""
    life: int = 0
    """As in the claim of its generation."""
    left: tuple[Left, ...] = ()
    """The older checkpoints of this life that this one does not descend from."""
    totals: Totals = field(default_factory=dict)
    """Metrics from the beginning of the pipeline to this checkpoint (OM1). Empty: none were counted."""
    lineages: dict[str, Lineage] = field(default_factory=dict)
    """What tells nodes of the program apart when it is edited, by node (EV13). Empty: it is not known."""

    def state_of_hook(self, hook: str) -> HookState:
        """Return what ``hook`` returned, and for which checkpoint; for this one if it was not there then."""
        found = next((state for state in self.hooks if state.hook == hook), HookState(hook))
        return replace(found, checkpoint=self.checkpoint) if found.checkpoint is None else found

    def hooks_as_called(self) -> tuple[HookState, ...]:
        """Return ``hooks``, each with the checkpoint that it was called for: for a manifest with another id."""
        return tuple(self.state_of_hook(state.hook) for state in self.hooks)

    @property
    def committables(self) -> tuple[Committable, ...]:
        """Everything this checkpoint promises to commit, in order of checkpoint, sink and subtask (K2)."""
        found = {*self.carried, *(c for entry in self.entries for c in entry.committables)}
        return tuple(sorted(found, key=lambda c: (c.checkpoint, c.sink, c.subtask_index, c.generation)))

    @property
    def size_bytes(self) -> int:
        """Total size of the snapshots."""
        return sum(entry.size_bytes for entry in self.entries)

    @property
    def parts(self) -> tuple[SnapshotPart, ...]:
        """All bytes that this checkpoint needs: the snapshots, and large output that is to be committed."""
        output = tuple(part for committable in self.committables for part in committable.parts)
        return tuple(part for entry in self.entries for part in entry.parts) + output

    @property
    def files(self) -> frozenset[str]:
        """Paths of all files of the pipeline that this checkpoint needs, of any writer (SF4)."""
        if self.place is not None:
            return frozenset()
        return frozenset(part.path for part in self.parts if part.path)


LogEntry: TypeAlias = Claim | Manifest


SAVEPOINT_VERSION = 1


@dataclass(frozen=True, slots=True)
class Copied:
    """What a subtask wrote to a savepoint: all parts of its snapshot, or why it could not."""

    parts: tuple[SnapshotPart, ...] = ()
    problem: str = ""


@dataclass(frozen=True, slots=True)
class Savepoint:
    """The state of a pipeline at one of its completed checkpoints, owned by the user.

    Attributes:
        id: random.
        pipeline: the name of the pipeline that the state belongs to.
        taken_ms: when it was complete, in milliseconds since 1970.
        files: the directory beside it in which the files of ``manifest`` are.
        manifest: of that checkpoint, but with the parts in ``files``, and without output: that is committed (SV2).
        life: of that pipeline; "" if unknown, as in a savepoint made without one.
        is_same_cut: whether a start from it processes the same records as a start from its checkpoint. False at most
            once while the pipeline went on: its positions are before the held records, those of the checkpoint after
            them (SV9).
    """

    id: str
    pipeline: str
    taken_ms: int
    files: str
    manifest: Manifest
    life: str = ""
    is_same_cut: bool = False
