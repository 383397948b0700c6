"""Lets a test make local storage fail in every process of a pipeline, for as long as a control file exists.

Python imports this module by itself at start, because tests put its directory on PYTHONPATH. The control file holds
``{"errno": 28, "part": "/chk-", "operations": ["put"]}``; without it nothing is different. With ``"told": PATH`` each
process fails the first try for each object only, and appends a line to that file.
"""

import json
import os

CONTROL = os.environ.get("HEADGATE_TEST_STORAGE_FAULT")


_failed = set()


def _is_spared(fault, name, path):
    """Whether the fault is over for this object; tells that it was not."""
    if "told" not in fault:
        return False
    if (name, path) in _failed:
        return True
    _failed.add((name, path))
    with open(fault["told"], "a", encoding="utf-8") as file:
        file.write(f"{os.getpid()} {name} {path}\n")
    return False


def _install(control: str) -> None:
    from headgate.storage import local

    def failing(name, original):
        def call(self, path, *args, **kwargs):
            try:
                with open(control, encoding="utf-8") as file:
                    fault = json.load(file)
            except (FileNotFoundError, ValueError):
                return original(self, path, *args, **kwargs)
            is_meant = name in fault["operations"] and fault["part"] in f"{self.url}/{path}"
            if is_meant and not _is_spared(fault, name, path):
                raise local.storage_error(name, path, OSError(fault["errno"], os.strerror(fault["errno"])))
            return original(self, path, *args, **kwargs)

        return call

    for name in ("put", "put_if_absent", "get", "list", "rename_if_absent"):
        setattr(local.LocalStorage, name, failing(name, getattr(local.LocalStorage, name)))


if CONTROL:
    _install(CONTROL)
