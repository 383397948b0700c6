"""Codes with which servers of objects refuse a request for good, and the attribute by which a writer knows its object.

Used by ``object_store`` and ``multipart``, which ask through different libraries.
"""

from __future__ import annotations

NO_SUCH_STORE = ("NoSuchBucket", "ContainerNotFound", "InvalidBucketName", "XAdminUserNotFound", "AccountNotFound")
REFUSALS = (
    *NO_SUCH_STORE,
    "AccessDenied",
    "AllAccessDisabled",
    "AuthorizationHeaderMalformed",
    "EntityTooLarge",
    "ExpiredToken",
    "InvalidAccessKeyId",
    "InvalidRequest",
    "InvalidToken",
    "KeyTooLongError",
    "MethodNotAllowed",
    "NotImplemented",
    "PermanentRedirect",
    "RequestTimeTooSkewed",
    "SignatureDoesNotMatch",
)
"""Codes of answers that repeating the request does not change."""

WRITER = "headgate"
"""Attribute of an object that was put if absent or uploaded in parts: a text drawn at random for that."""
