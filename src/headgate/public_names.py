"""Public names of a package, imported when they are first used.

A package has one table of its names by module. ``__all__`` and the lazy imports come from it; the imports for type
checkers are checked against it (tests/test_public_names.py). Never imports a module before one of its names is used.
"""

from __future__ import annotations

import gc
import importlib
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

CALLED_PER_RECORD = "headgate.operators."
"""Classes here are called by users' functions for each record: they get no wrappers, which would cost time."""


@contextmanager
def garbage_kept() -> Iterator[None]:
    """Collect no garbage within this block, in which modules are imported.

    They make many objects that stay, and Python would look through all of them again and again: a fifth of the time.
    """
    is_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if is_enabled:
            gc.enable()


class PublicNames:
    """The public names of one package."""

    def __init__(self, package: str, table: Mapping[str, str], hint: Callable[[str], str] = lambda name: "") -> None:
        """Make it; nothing is imported yet.

        Args:
            package: the name of the package.
            table: the public names of each module, separated by spaces.
            hint: returns what the error about an unknown name says to use instead, or "".
        """
        self._package, self._hint = package, hint
        self._names = {module: tuple(names.split()) for module, names in table.items()}
        self._modules = {name: module for module, names in self._names.items() for name in names}
        assert len(self._modules) == sum(map(len, self._names.values())), f"{package}: a public name occurs twice"
        self._checked: set[str] = set()
        self._checking = threading.Lock()

    @property
    def all(self) -> list[str]:
        """All names, sorted."""
        return sorted(self._modules)

    def load(self, name: str) -> Any:
        """Import ``name``, for the package's ``__getattr__``.

        Raises:
            AttributeError: there is no such name.
        """
        module = self._modules.get(name)
        if module is None:
            raise AttributeError(f"{self._package} has no name '{name}'{self._hint(name)}")
        with garbage_kept():
            importlib.import_module(module)
            self._check_calls()
        value = getattr(sys.modules[module], name)
        setattr(sys.modules[self._package], name, value)
        return value

    def _check_calls(self) -> None:
        """Have the names of all imported modules explain wrong calls in a sentence."""
        from headgate.call_errors import checked_call, checked_calls, hide_internals

        with self._checking:
            for module in [module for module in self._names if self._is_imported(module)]:
                self._checked.add(module)
                for name in self._names[module]:
                    value = getattr(sys.modules[module], name)
                    if not isinstance(value, type):
                        if callable(value):
                            setattr(sys.modules[module], name, checked_call(value))
                    elif module.startswith(CALLED_PER_RECORD):
                        hide_internals(value)
                    elif not issubclass(value, BaseException):
                        checked_calls(value)

    def _is_imported(self, module: str) -> bool:
        """Whether a module has its names, which are not checked yet; another thread may be importing it."""
        found = None if module in self._checked else sys.modules.get(module)
        return found is not None and all(hasattr(found, name) for name in self._names[module])
