"""``Evolution``: what a program says about state that older versions of it wrote (docs/spec/evolution.md).

Counterparts: ``model.evolution`` decides what becomes of it, ``state.evolving`` converts it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

from headgate.codec.exact_values import MisfitError, exact_array
from headgate.errors import UsageError
from headgate.model.schema_evolution import StateRules
from headgate.model.state_schema import ListOf, Plain, StructOf, ValueType, inner_paths, path_of


@dataclass(frozen=True, slots=True)
class Evolution:
    """Describes how to convert state that an older version of the program wrote: ``evolution=hg.Evolution(...)``.

    Wider number types and removed fields need no description. Name a field by its path: ``"address.zip"`` is the field
    ``zip`` of the struct ``address``. Elements of lists add nothing to the path. State that already has the declared
    type stays as it is, so you can leave an evolution in the program.

    Attributes:
        defaults: the values that added fields get in old state: ``{"address.zip": None}``.
        renamed: fields that have another name now: ``{"old": "new"}``.
        renamed_from: the former name of the state itself.
        starts_empty: whether older checkpoints may lack this state. It is then empty for every key.
    """

    defaults: Mapping[str, Any] = field(default_factory=dict)
    renamed: Mapping[str, str] = field(default_factory=dict)
    renamed_from: str | None = None
    starts_empty: bool = False

    def __post_init__(self) -> None:
        for name, found in (("defaults", self.defaults), ("renamed", self.renamed)):
            if not isinstance(found, Mapping) or any(not isinstance(path, str) for path in found):
                raise UsageError(f"{name} of an Evolution is a dict by paths of fields, not {found!r}")
        if any(not isinstance(path, str) for path in self.renamed.values()):
            raise UsageError(f"renamed of an Evolution is {{'old': 'new'}}, not {self.renamed!r}")
        if self.renamed_from is not None and not (isinstance(self.renamed_from, str) and self.renamed_from):
            raise UsageError(f"renamed_from of an Evolution is the name of a state, not {self.renamed_from!r}")

    def rules(self) -> StateRules:
        """Return what decides; for Headgate only."""
        renamed = tuple(sorted(self.renamed.items()))
        return StateRules(self.renamed_from or "", renamed, frozenset(self.defaults), self.starts_empty)

    def check(self, where: str, dtype: pa.DataType) -> None:  # EV8
        """Make sure that it fits a declaration; for Headgate only. ``where``: begins messages.

        Raises:
            UsageError: it names fields that there are not, or a default does not fit.
        """
        fields = dict(inner_paths(value_type(dtype)))
        there = f"the fields are {', '.join(fields)}" if fields else "it has no fields"
        for path in (*self.defaults, *self.renamed.values()):
            if path not in fields:
                raise UsageError(f"{where}: its Evolution names the field '{path}', but {there}")
        for old, new in self.renamed.items():
            if old in fields:
                raise UsageError(
                    f"{where}: its Evolution has '{new}' renamed from '{old}', which is still a field of it; a "
                    "field is one or the other"
                )
            if list(self.renamed.values()).count(new) > 1:
                raise UsageError(
                    f"{where}: its Evolution must name one old field for '{new}', not {dict(self.renamed)}"
                )
            if old.rpartition(".")[0] != self._former_path(new.rpartition(".")[0]):
                raise UsageError(f"{where}: its Evolution has '{new}' renamed from '{old}', a field of another struct")
        for path, value in self.defaults.items():
            found = field_type(dtype, path)
            try:
                exact_array([value], found)
            except MisfitError as error:
                raise UsageError(
                    f"{where}: the default {value!r} of field '{path}' does not fit {found} ({error})"
                ) from None

    def _former_path(self, path: str) -> str:
        """Return the path that a field had, whose structs may have had other names too."""
        former = next((old for old, new in self.renamed.items() if new == path), None)
        if former is not None or not path:
            return former or ""
        parent, _, name = path.rpartition(".")
        return path_of(self._former_path(parent), name)


NO_EVOLUTION = Evolution()


def checked_evolution(where: str, given: object, dtype: pa.DataType) -> Evolution:
    """Return what was given as ``evolution=`` of something of ``dtype``.

    Raises:
        UsageError: it is none, or does not fit.
    """
    if not isinstance(given, Evolution):
        raise UsageError(f"{where}: its evolution is an Evolution(defaults={{'field': value}}), not {given!r}")
    given.check(where, dtype)
    return given


def check_names(where: str, declared: Mapping[str, Evolution], forgotten: Collection[str] = ()) -> None:
    """Make sure that no name that is declared is said to be an old one (EV8).

    Raises:
        UsageError
    """
    for name, evolution in declared.items():
        former = evolution.renamed_from
        if former is not None and former in declared:
            raise UsageError(f"{where}: '{name}' is said to be renamed from '{former}', which is declared as well")
        if [one.renamed_from for one in declared.values()].count(former) > 1 and former is not None:
            raise UsageError(f"{where}: two are said to be renamed from '{former}'")
        if name in forgotten:
            raise UsageError(f"{where}: '{name}' is declared, and forget('{name}') leaves it behind; do one of both")
        if former is not None and former in forgotten:
            raise UsageError(f"{where}: '{name}' is renamed from '{former}', and forget('{former}') leaves that behind")


def value_type(dtype: pa.DataType) -> ValueType:
    """Return a type in canonical form without Arrow."""
    if pa.types.is_large_list(dtype):
        return ListOf(value_type(dtype.value_type))
    if pa.types.is_struct(dtype):
        return StructOf(tuple((one.name, value_type(one.type)) for one in dtype))
    return Plain(str(dtype))


def field_type(dtype: pa.DataType, wanted: str, path: str = "") -> pa.DataType | None:
    """Return the type of the field ``wanted``; None if there is none."""
    if pa.types.is_large_list(dtype):
        return field_type(dtype.value_type, wanted, path)
    if pa.types.is_struct(dtype):
        for one in dtype:
            here = path_of(path, one.name)
            found = one.type if here == wanted else field_type(one.type, wanted, here)
            if found is not None:
                return found
    return None
