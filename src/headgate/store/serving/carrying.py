"""Carries out the verbs that clients ask for, on the server's own catalogue and chunks.

Counterparts: ``served.served_catalogue`` and ``served.served_storage``. Source: SS6, SS16, SS17 and SS18 of
docs/spec/served-store.md. Never calls anything that is no verb.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from headgate.errors import ProtocolViolation
from headgate.model.life import Mine, Owner
from headgate.storage.base import Storage
from headgate.store.catalogue.base import Catalogue
from headgate.store.served.failures import UnjudgedError
from headgate.store.served.values import decode, encode
from headgate.store.served.verbs import (
    CATALOGUE_SIGNATURES,
    OF_THE_CATALOGUE,
    OF_THE_STORAGE,
    STORAGE_SIGNATURES,
    Judged,
    Reset,
    Signature,
)
from headgate.store.streams import StreamReset


class Carrying:
    """The verbs of one store."""

    def __init__(self, catalogue: Catalogue, storage: Storage) -> None:
        self._verbs: dict[tuple[str, str], tuple[Signature, Callable[..., Any]]] = {}
        for of, signatures, owner in (
            (OF_THE_CATALOGUE, CATALOGUE_SIGNATURES, catalogue),
            (OF_THE_STORAGE, STORAGE_SIGNATURES, storage),
        ):
            self._verbs |= {(of, name): (x, getattr(owner, name)) for name, x in signatures.items()}

    def carry_out(self, of: str, name: str, data: bytes) -> bytes:
        """Carry out the verb ``name`` with the arguments in ``data``; return its answer.

        Raises:
            ProtocolViolation: there is no such verb, or these are none of its arguments.
            Exception: what the verb raises.
        """
        if (of, name) not in self._verbs:
            raise ProtocolViolation("store server", f"a verb that there is not: {of}/{name}")
        signature, verb = self._verbs[of, name]
        return encode(verb(**_arguments(signature, data)))


def _arguments(signature: Signature, data: bytes) -> dict[str, Any]:
    told = decode(data, signature.takes)
    found = {name: getattr(told, name) for name in signature.takes.__struct_fields__}
    for name, kinds in signature.kinds.items():
        found[name] = _of_its_kind(kinds, found[name])
    if signature.name == "contents":
        found["mine"] = _mine(found["mine"])
    if signature.name == "start_over":
        found["reset"] = _reset(found["reset"])
    return found


def _of_its_kind(kinds: Mapping[str, type], told: tuple[str, Any]) -> object:
    kind = kinds.get(told[0])
    if kind is None:
        raise ProtocolViolation("store server", f"a value of the unknown kind {told[0]!r}")
    try:
        return msgspec.convert(told[1], kind)
    except (msgspec.ValidationError, ValueError) as error:
        raise ProtocolViolation("store server", f"no {told[0]}: {error}") from error


def _reset(told: Reset) -> StreamReset:
    return StreamReset(told.streams, told.owner, told.epoch, told.life, told.of, _mine(told.judged))


def _mine(judged: Judged) -> Mine:
    known = dict(judged)

    def is_mine(owner: Owner) -> bool:
        if owner not in known:
            raise UnjudgedError(owner)
        return known[owner]

    return is_mine
