"""Dataclasses that take little to import do what those of the standard library do."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import math
import pickle  # noqa: TID251 - what Spark does with what a pipeline holds
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import FrozenInstanceError, field
from typing import Any, ClassVar

import pytest
from pyspark import cloudpickle

import headgate as hg
from headgate.dataclass import dataclass

NAN = math.nan


def shapes(make: Callable[..., Any]) -> dict[str, Any]:
    """Return classes of every form that the code has, made by ``make``."""

    @make(frozen=True, slots=True, order=True)
    class Two:
        """Two."""

        one: int
        two: str = "two"
        shared: ClassVar[int] = 7

    @make(frozen=True, slots=True)
    class One:
        value: object = None

    @make(frozen=True, slots=True)
    class Nothing:
        pass

    @make(slots=True)
    class Changing:
        names: list[str] = field(default_factory=list)
        secret: int = field(default=3, repr=False, compare=False)
        made: int = field(default=5, init=False)
        length: int = field(init=False)

        def __post_init__(self) -> None:
            self.length = len(self.names)

    @make
    class Plain:
        a: int
        b: int = field(default=2, kw_only=True)

    @make(frozen=True, kw_only=True)
    class Base:
        first: int
        second: dict[str, int] = field(default_factory=dict, hash=False)

    @make(frozen=True, kw_only=True)
    class Derived(Base):
        third: int = 3

        def __repr__(self) -> str:
            return "derived"

    @make(frozen=True, eq=False)
    class Itself:
        value: int

    @make(frozen=True)
    class OwnEquality:
        value: int

        def __eq__(self, other: object) -> bool:
            return True

    @make(frozen=True)
    class OwnHash:
        value: int

        def __hash__(self) -> int:
            return 1

    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Standard(Base):
        fourth: int = 4

    @make(frozen=True, slots=True, kw_only=True)
    class DerivedAgain(Standard):
        fifth: int = 5

    class Child(Base):
        def note(self) -> Child:
            self.noted = 1
            return self

    return {name: kind for name, kind in locals().items() if name != "make"}


OURS, STANDARD = shapes(dataclass), shapes(dataclasses.dataclass)


def outcome(kinds: dict[str, Any], use: Callable[[dict[str, Any]], object]) -> object:
    try:
        return use(kinds)
    except (TypeError, AttributeError) as error:
        return type(error), str(error)


USES: list[Callable[[dict[str, Any]], object]] = [
    lambda k: repr(k["Two"](1)),
    lambda k: repr(k["Changing"](["a"])),
    lambda k: repr(k["Derived"](first=1)),
    lambda k: repr(k["Nothing"]()),
    lambda k: repr([k["Plain"](1, b=3), k["Child"](first=1)]),
    lambda k: k["Two"](1),
    lambda k: k["Two"](),
    lambda k: k["Two"](1, "a", 3),
    lambda k: k["Two"](1, three=3),
    lambda k: k["Plain"](1, 2),
    lambda k: k["Base"](1),
    lambda k: k["Two"](1) == k["Two"](1, "two"),
    lambda k: k["Two"](1) == k["Two"](2),
    lambda k: k["Two"](1) == k["One"](1),
    lambda k: k["Two"](1) != 1,
    lambda k: k["One"](NAN) == k["One"](NAN),
    lambda k: k["Nothing"]() == k["Nothing"](),
    lambda k: k["Itself"](1) == k["Itself"](1),
    lambda k: k["Changing"](secret=1) == k["Changing"](secret=2),
    lambda k: k["OwnEquality"](1) == 3,
    lambda k: hash(k["Two"](1)),
    lambda k: hash(k["One"]("a")),
    lambda k: hash(k["Nothing"]()),
    lambda k: hash(k["Base"](first=1)),
    lambda k: hash(k["OwnHash"](5)),
    lambda k: hash(k["OwnEquality"](5)),
    lambda k: hash(k["Changing"]()),
    lambda k: hash(k["One"]([])),
    lambda k: sorted([k["Two"](2), k["Two"](1, "b"), k["Two"](1, "a")])[0].two,
    lambda k: [k["Two"](1) < k["Two"](1), k["Two"](1) <= k["Two"](1), k["Two"](2) > k["Two"](1)],
    lambda k: k["Two"](1) < 3,
    lambda k: k["One"](1) < k["One"](2),
    lambda k: setattr(k["Two"](1), "one", 2),
    lambda k: setattr(k["Base"](first=1), "other", 2),
    lambda k: setattr(k["Child"](first=1), "first", 2),
    lambda k: k["Child"](first=1).note().noted,
    lambda k: delattr(k["Base"](first=1), "first"),
    lambda k: setattr(k["Changing"](), "none", 1),
    lambda k: k["Plain"].__match_args__,
    lambda k: [one.name for one in dataclasses.fields(k["Changing"])],
    lambda k: dataclasses.asdict(k["Changing"](["a"])),
    lambda k: repr(dataclasses.replace(k["Two"](1), two="b")),
    lambda k: repr(copy.deepcopy(k["Two"](1))),
    lambda k: k["Changing"]().names is k["Changing"]().names,
    lambda k: hasattr(k["Two"](1), "__dict__"),
    lambda k: repr(k["DerivedAgain"](first=1)),
    lambda k: setattr(k["DerivedAgain"](first=1), "fifth", 2),
    lambda k: k["Two"].shared,
    lambda k: k["Two"].__doc__,
]


@pytest.mark.parametrize("use", USES)
def test_a_use_has_the_outcome_that_it_has_with_the_standard_one(use: Callable[[dict[str, Any]], object]) -> None:
    ours, standard = shapes(dataclass), shapes(dataclasses.dataclass)
    wanted = outcome(standard, use)
    assert str(outcome(ours, use)) == str(wanted)
    assert str(outcome(ours, use)) == str(wanted), "the same again, now that a constructor is there"


@dataclass(frozen=True, slots=True)
class Sent:
    """Travels to other processes."""

    one: int
    two: tuple[str, ...] = ()


@dataclass
class Ring:
    """May hold itself."""

    inner: object = None


def test_an_object_travels() -> None:
    for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1):
        assert pickle.loads(pickle.dumps(Sent(1, ("a",)), protocol)) == Sent(1, ("a",))
    assert copy.copy(Sent(1)) == Sent(1)


def test_one_that_holds_itself_can_be_shown() -> None:
    ring = Ring()
    ring.inner = ring
    assert repr(ring) == "Ring(inner=...)"


def test_threads_make_the_first_objects_at_the_same_time() -> None:
    @dataclass(frozen=True)
    class Shared:
        number: int

    made: list[Any] = []
    begin = threading.Barrier(8)

    def run(number: int) -> None:
        begin.wait()
        made.append(Shared(number))

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=run, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert sorted(one.number for one in made) == list(range(8))


def test_a_frozen_class_and_one_that_is_not_do_not_derive_from_each_other() -> None:
    for make in (dataclass, dataclasses.dataclass):
        with pytest.raises(TypeError, match="cannot inherit"):
            make(type("Derived", (Sent,), {"__annotations__": {}}))
        with pytest.raises(TypeError, match="cannot inherit"):
            make(frozen=True)(type("Derived", (Ring,), {"__annotations__": {}}))


def test_a_refused_change_is_an_error_of_the_standard_library() -> None:
    with pytest.raises(FrozenInstanceError):
        Sent(1).one = 2  # type: ignore[misc]


def test_a_class_that_users_call_has_the_signature_of_its_fields() -> None:
    for name in hg.__all__:
        kind = getattr(hg, name)
        if dataclasses.is_dataclass(kind):
            parameters = inspect.signature(kind.__init__).parameters
            assert [one.name for one in dataclasses.fields(kind) if one.init and one.name not in parameters] == [], name


@pytest.mark.parametrize("name", ["Two", "Nothing", "Plain", "DerivedAgain"])
def test_a_class_has_the_signature_of_its_fields_before_its_first_use(name: str) -> None:
    def parameters(kind: Any) -> list[tuple[str, object, bool, object]]:
        found = inspect.signature(kind).parameters.values()
        return [(one.name, one.kind, one.default is one.empty, one.annotation) for one in found]

    fresh = shapes(dataclass)
    assert parameters(fresh[name]) == parameters(STANDARD[name])


def test_objects_and_classes_with_a_constructor_of_their_own_have_their_own_signature() -> None:
    @dataclass
    class Called:
        one: int

        def __call__(self, other: str) -> None: ...

    class Child(Called):
        def __init__(self, two: int) -> None:
            super().__init__(two)

    assert list(inspect.signature(Called(1)).parameters) == ["other"]
    assert list(inspect.signature(Child).parameters) == ["two"]


def test_a_class_that_is_pickled_by_value_makes_its_defaults() -> None:
    @dataclass
    class Local:
        number: int
        names: list[str] = field(default_factory=list)
        last: int = 3

    program = (
        "import inspect, pickle, sys; found = pickle.load(sys.stdin.buffer); "
        "print(found(1) == found(1, [], 3), *inspect.signature(found).parameters)"
    )
    command = [sys.executable, "-c", program]  # a process of its own: this one knows the class
    done = subprocess.run(command, input=cloudpickle.dumps(Local), capture_output=True, check=True)
    assert done.stdout.decode().split() == ["True", "number", "names", "last"]
