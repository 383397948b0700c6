"""One meaning has one class: no event or effect of one machine is a mirror of another's."""

from __future__ import annotations

import importlib
import pkgutil
from collections import defaultdict
from dataclasses import fields, is_dataclass
from typing import get_type_hints

import headgate.protocol


def test_no_two_classes_of_the_machines_have_one_name_and_the_same_fields() -> None:
    found: dict[tuple[str, tuple[tuple[str, str], ...]], set[str]] = defaultdict(set)
    for module in pkgutil.walk_packages(headgate.protocol.__path__, "headgate.protocol."):
        for one in vars(importlib.import_module(module.name)).values():
            if isinstance(one, type) and is_dataclass(one) and one.__module__.startswith("headgate.protocol"):
                hints = get_type_hints(one)
                shape = tuple((field.name, repr(hints[field.name])) for field in fields(one))
                found[one.__name__, shape].add(one.__module__)
    assert {name: where for (name, _), where in found.items() if len(where) > 1} == {}
