"""A file that is uploaded in parts while it is written, and that appears when its upload is completed.

Counterpart: ``file_committer`` completes it in the driver, by the id in the committable. Source: D17 of
docs/spec/connectors.md. A file belongs to one checkpoint and one generation: no process goes on with another's upload.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable

from headgate.connectors.files.publish_log import UPLOADED, OpenUpload
from headgate.dataclass import dataclass
from headgate.errors import StorageError
from headgate.storage.base import PART_BYTES_MIN, Bytes, Uploads

PART_BYTES = 8 << 20
PART_BYTES_MAX = 5 << 30
PARTS_OF_FILE = 200
"""Of ``file_bytes`` of Arrow. Text has more bytes than Arrow: 10,000 parts are enough for 50 times as many."""


def part_bytes(file_bytes: int) -> int:
    """Return the size of the parts of files with so many Arrow bytes."""
    return min(max(PART_BYTES, PART_BYTES_MIN, file_bytes // PARTS_OF_FILE), PART_BYTES_MAX)


@dataclass(frozen=True, slots=True)
class UploadedContent:
    """The content of a file whose upload is not completed. ``checksum``: see ``StagedFile``."""

    size_bytes: int
    checksum: str
    upload: OpenUpload


def upload_content(uploads: Uploads, name: str, content: Iterable[Bytes], size_of_part: int) -> UploadedContent:
    """Upload a file in parts as its content comes.

    An upload that fails is aborted, if the storage can be reached.

    Raises:
        StorageError
    """
    upload = uploads.begin(name)
    try:
        etags: list[str] = []
        size_bytes, waiting = 0, bytearray()
        for data in content:
            waiting += data
            size_bytes += len(data)
            whole = len(waiting) - len(waiting) % size_of_part
            for start in range(0, whole, size_of_part):
                part = bytes(memoryview(waiting)[start : start + size_of_part])
                etags.append(uploads.put_part(name, upload.id, len(etags) + 1, part))
            del waiting[:whole]
        if waiting or not etags:
            etags.append(uploads.put_part(name, upload.id, len(etags) + 1, waiting))
    except BaseException:
        with contextlib.suppress(StorageError):
            uploads.abort(name, upload.id)
        raise
    return UploadedContent(size_bytes, UPLOADED + upload.mark, OpenUpload(upload.id, tuple(etags)))
