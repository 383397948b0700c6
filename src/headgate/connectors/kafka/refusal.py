"""Why brokers do not do something with which waiting does not help: one sentence, with what to change."""

from __future__ import annotations

from headgate.codec.kafka.error_codes import ErrorCode
from headgate.codec.kafka.messages import GROUP_COORDINATOR
from headgate.errors import FencedError, StorageError, UsageError

_RIGHTS = {
    ErrorCode.TOPIC_AUTHORIZATION_FAILED,
    ErrorCode.GROUP_AUTHORIZATION_FAILED,
    ErrorCode.CLUSTER_AUTHORIZATION_FAILED,
    ErrorCode.TRANSACTIONAL_ID_AUTHORIZATION_FAILED,
}
_FENCED = {ErrorCode.PRODUCER_FENCED, ErrorCode.INVALID_PRODUCER_EPOCH, ErrorCode.TRANSACTION_COORDINATOR_FENCED}
_REMEDIES = {
    ErrorCode.INVALID_RECORD: "in a compacted topic each record needs a key",
    ErrorCode.INVALID_TIMESTAMP: (
        "see message.timestamp.before.max.ms and message.timestamp.after.max.ms of the topic, or write records without "
        "their times"
    ),
}
"""What helps with records that a topic does not take."""


def right_to(kind: int, key: str) -> str:
    """Return the right that the user of a coordinator needs."""
    if kind == GROUP_COORDINATOR:
        return f"Read on group '{key}'"
    return f"Write on transactional id '{key}'"


def refusal(what: str, brokers: str, code: ErrorCode, message: str | None = None, right: str = "") -> Exception:
    """Return the error that says why brokers do not do ``what``, for codes with which waiting does not help.

    ``right``: the one that the user needs for it, if ``what`` does not say so.
    """
    reason = f"{code.name}: {message}" if message else code.name
    if code in _RIGHTS:
        acl = f"an ACL for {right}" if right else "an ACL"
        return UsageError(f"cannot {what}: the user has no right to it in Kafka at {brokers} ({reason}); add {acl}")
    if code in _FENCED:
        return FencedError(f"cannot {what}: a newer producer took it over ({reason})")
    if code is ErrorCode.INVALID_PRODUCER_ID_MAPPING:
        why = f"the brokers have forgotten its transactional id, see transactional.id.expiration.ms ({reason})"
        return StorageError(what, f"in Kafka at {brokers}", why, False)
    if code in (ErrorCode.UNKNOWN_TOPIC_ID, ErrorCode.INCONSISTENT_TOPIC_ID):
        return UsageError(f"cannot {what}: the topic was deleted, and perhaps created again ({reason})")
    if code is ErrorCode.INVALID_TOPIC_EXCEPTION:
        return UsageError(f"cannot {what}: that is no name of a topic ({reason})")
    if code is ErrorCode.UNKNOWN_TOPIC_OR_PARTITION:
        return UsageError(f"cannot {what}: Kafka at {brokers} has no such topic or partition; create it first")
    if code in _REMEDIES:
        return UsageError(f"cannot {what}: Kafka at {brokers} does not take a record ({reason}); {_REMEDIES[code]}")
    return StorageError(what, f"in Kafka at {brokers}", reason, False)
