"""Which storage a URL means.

Source: docs/spec/storage.md. Never opens two kinds for one URL.
"""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote, unquote_plus, urlsplit

from headgate.distribution import install_command
from headgate.errors import StorageError, UsageError
from headgate.model.config import Access
from headgate.plain_text import encodable, printable
from headgate.storage.base import ReadableStorage, Storage
from headgate.storage.local import LocalStorage
from headgate.storage.memory import memory_storage

if TYPE_CHECKING:
    from headgate.storage.hdfs import HdfsStorage
    from headgate.storage.object_store import ObjectStorage

OBJECT_SCHEMES = ("s3", "s3a", "gs", "az", "adl", "azure", "abfs", "abfss", "http", "https")
HDFS_SCHEMES = ("hdfs", "viewfs")
READABLE_SCHEMES = tuple(f"{name}://" for name in (*HDFS_SCHEMES, *OBJECT_SCHEMES) if not name.startswith("http"))
"""What sources of files read besides local paths."""

OBSTORE_PREFIX = "obstore+"
OPENERS: dict[str, Callable[[str], Storage]] = {}
"""Storages of other surroundings, by scheme: the simulator's."""
_SCHEME = re.compile(r"^([a-zA-Z][a-zA-Z0-9+.-]*)://")
_WITHOUT_HOST = re.compile(r"^(file|hdfs|viewfs):/(?!/)", re.IGNORECASE)
"""As Hadoop writes a path of the local machine, or of its default file system."""
_SECRET = re.compile(r"secret|passw|token|credential|signature|key|^sig\Z", re.IGNORECASE)
"""Of the names of settings in a URL: those with values that open something."""


def open_storage(url: str, access: Access | None = None) -> Storage:
    """Return the storage at ``url``: a path, ``file://…``, ``memory://name``, ``s3://…``, ``hdfs://…`` and the like.

    ``obstore+file:///dir`` and ``obstore+memory:///`` take obstore's own stores instead of ours. ``access`` says who
    may read what is written to a local directory (default: see ``local.LocalStorage``).

    Raises:
        UsageError: the scheme is unknown, ``check_url`` refuses the URL, or the directory cannot be created.
    """
    check_url(url)
    url = _WITHOUT_HOST.sub(r"\1:///", url)
    match = _SCHEME.match(url)
    if match is None:
        if not url:
            raise UsageError("storage location is empty; give a directory or a URL such as s3://bucket/path")
        return LocalStorage(url, access)
    scheme = match.group(1).lower()
    if scheme.startswith(OBSTORE_PREFIX):
        return _object_storage(url, url[len(OBSTORE_PREFIX) :])
    if scheme in OPENERS:
        return OPENERS[scheme](url.removeprefix(f"{scheme}://"))
    if scheme == "file":
        return LocalStorage(file_path(url), access)
    if scheme == "memory":
        return memory_storage(url[len("memory://") :])
    if scheme in OBJECT_SCHEMES:
        return _object_storage(url, url)
    if scheme in HDFS_SCHEMES:
        return _hdfs_storage(url)
    known = ", ".join(f"{name}://" for name in ("file", "memory", *HDFS_SCHEMES, *OBJECT_SCHEMES))
    raise UsageError(f"storage URL {url} has the unknown scheme '{scheme}'; use a directory or one of {known}")


def is_remote(url: str) -> bool:
    """Whether machines share what is at ``url``: it is in an object store or HDFS."""
    match = _SCHEME.match(_WITHOUT_HOST.sub(r"\1:///", url))
    return match is not None and match.group(1).lower() in (*OBJECT_SCHEMES, *HDFS_SCHEMES)


def split_object_url(url: str) -> tuple[str, str] | None:
    """Return the root of the storage of a URL, such as ``s3://bucket``, and the path in it as it is written.

    None: it is a local path, or a URL of one.
    """
    match = _SCHEME.match(url)
    if match is None or match.group(1).lower() == "file":
        return None
    root, _, path = url[match.end() :].partition("/")
    return match.group(0) + root, path


def open_readable(root: str) -> ReadableStorage:
    """Return the storage that files are read from, by its root.

    Raises:
        UsageError: the scheme is none that can be listed, or what it needs is not installed.
    """
    # the settings are part of the key: a client that was made with others must not be used
    scheme = root.partition(":")[0].lower()
    if f"{scheme}://" in READABLE_SCHEMES:
        settings = {name: value for name, value in os.environ.items() if name.startswith(_SETTINGS)}
        return _shared_storage(root, tuple(sorted(settings.items())))
    raise UsageError(f"files cannot be read from {root}; give a local path, or a URL of {', '.join(READABLE_SCHEMES)}")


_SETTINGS = ("AWS_", "AZURE_", "GOOGLE_", "HADOOP_", "KRB5")
"""What the names of settings that clients take from the environment begin with."""


@functools.lru_cache(maxsize=16)
def _shared_storage(root: str, settings: tuple[tuple[str, str], ...]) -> ReadableStorage:
    """Return the same client for all that read with the same ``settings``: it has connections."""
    if root.partition(":")[0].lower() in HDFS_SCHEMES:
        return _hdfs_storage(root)
    return _object_storage(root, root)


def check_url(url: str) -> None:
    """Refuse a URL that has a secret, or that clients of object stores would take for another place. Paths are let by.

    Raises:
        UsageError
    """
    refuse_secrets(url)
    scheme, _, rest = url.removeprefix(OBSTORE_PREFIX).partition(":")
    if scheme.lower() not in OBJECT_SCHEMES or scheme.lower().startswith("http"):
        return
    bucket, _, path = rest.removeprefix("//").partition("/")
    parts = path.removesuffix("/").split("/") if path else []
    problem, shown = "", printable(url)
    if re.search("[\x00-\x1f\x7f]", url):
        problem, shown = "it has control characters", ascii(url)
    elif not rest.startswith("//") or not bucket:
        problem = f"write {scheme}://bucket/path"
    elif scheme.lower() in ("s3", "s3a", "gs") and re.search("[:@]", bucket):
        problem = f"'{bucket}' is no name of a bucket; the address of a server belongs into the environment"
    elif not {"", ".", ".."}.isdisjoint(parts):
        problem = "the parts of its path, between slashes, must not be empty, '.' or '..'"
    if problem:
        raise UsageError(f"storage URL {shown} is not usable: {problem}")


def refuse_secrets(url: str) -> None:
    """Refuse a URL with a password or key in it: it is shown, and written down, wherever the storage is.

    Raises:
        UsageError: it has one, which is not shown.
    """
    if _SCHEME.match(url) is None:
        return
    before, _, query = url.partition("://")[2].partition("#")[0].partition("?")
    user, _, host = before.partition("/")[0].rpartition("@")
    names = (unquote_plus(setting.partition("=")[0]) for setting in query.split("&"))
    secret = next((name for name in names if is_secret_name(name)), "")
    if ":" in unquote_plus(user) or secret:
        what = f", {printable(secret)}=" if secret else ""
        raise UsageError(
            f"the storage URL at {printable(host)} has a password or key in it{what}; leave it out, since the URL is "
            "shown wherever the storage is, and give it in the environment of the driver and of every worker"
        )


def is_secret_name(name: str) -> bool:
    """Whether a setting of that name holds what opens something."""
    return _SECRET.search(name) is not None


def absolute_location(location: str | os.PathLike[str]) -> str:
    """Return a URL unchanged and a path as absolute: workers may have another working directory.

    Raises:
        UsageError: it has characters that no file name, or no message, can hold, or ``check_url`` refuses it.
    """
    text = os.fspath(location)
    check_url(text)
    if "\0" in text or encodable(text) != text:
        raise UsageError(
            f"the location '{printable(text)}' has a NUL or bytes that are not UTF-8, which checkpoints cannot record; "
            "give the directory another name"
        )
    text = _WITHOUT_HOST.sub(r"\1:///", text)
    return text if _SCHEME.match(text) else os.path.abspath(os.path.expanduser(text))


def local_directory(url: str) -> Path | None:
    """Return the local directory that ``url`` means, whether it is there or not; None where it means other storage."""
    match = _SCHEME.match(url)
    if match is None:
        return Path(url).expanduser().absolute()
    return Path(file_path(url)) if match.group(1).lower() == "file" else None


def is_missing(url: str) -> bool:
    """Whether ``url`` is a local directory that is not there. A read-only caller asks first: opening makes it.

    Raises:
        StorageError: one may not even look.
    """
    local = local_directory(url)
    try:
        return local is not None and not local.is_dir()
    except OSError as error:
        raise StorageError("look at", str(local), error.strerror or str(error), is_transient=False) from error


def _object_storage(url: str, location: str) -> ObjectStorage:
    try:
        from headgate.storage.object_store import ObjectStorage
    except ModuleNotFoundError as error:
        if error.name != "obstore":
            raise
        raise UsageError(
            f"object stores such as {url} need the package obstore, in the driver and on every worker: "
            f"{install_command('s3')}"
        ) from None
    return ObjectStorage(location)


def _hdfs_storage(url: str) -> HdfsStorage:
    try:
        from headgate.storage.hdfs import HdfsStorage
    except ModuleNotFoundError as error:
        if error.name != "hdfs_native":
            raise
        raise UsageError(
            f"HDFS, as {url} names it, needs the package hdfs-native, in the driver and on every worker: "
            f"{install_command('hdfs')}"
        ) from None
    return HdfsStorage(url)


def file_path(url: str) -> str:
    """Return the absolute path that a ``file:`` URL means.

    Raises:
        UsageError: it names another machine.
    """
    parts = urlsplit(url)
    if parts.netloc not in ("", "localhost"):
        raise UsageError(f"storage URL {url} names the host '{parts.netloc}'; write file:///absolute/path")
    return unquote(parts.path)
