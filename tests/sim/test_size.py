"""What runs ordinary pipelines through faults stays small: a reader must be able to check it (docs/decisions/0011)."""

from __future__ import annotations

from pathlib import Path

import headgate.sim

SIM = Path(headgate.sim.__file__).parent
MACHINE = ("world", "tasks", "storage", "surroundings")
"""The machine room, without what only some kinds of runs have in it."""

ORDINARY = (
    *("run", "fault_injection", "settings", "source", "spark", "workloads", "steps"),
    *("verdict", "history"),
)
TOP = ("coverage_table", "__main__")


def lines_of(room: str, names: tuple[str, ...]) -> int:
    return sum(len((SIM / room / f"{name}.py").read_text(encoding="utf-8").splitlines()) for name in names)


def test_the_machine_room_and_the_ordinary_run_are_small() -> None:
    machine = lines_of("machine", MACHINE)
    assert machine < 1_500
    others = lines_of("streams", ("streams",)) + lines_of(".", TOP)
    assert machine + lines_of("product", ORDINARY) + others < 5_800
