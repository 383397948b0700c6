"""Who may read what a pipeline writes, and how its connections are protected: plain values.

Counterparts: ``storage.access`` (modes of files), ``tls`` (connections), ``api.security`` (the user's
form).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Access(Enum):
    """Who may read and write what is created in a local directory."""

    OWNER = "owner"
    """The user whose process creates it, nobody else."""
    GROUP = "group"
    """Also the group of the directory: for drivers and executors that run as different users."""
    UMASK = "umask"
    """Whoever the process's umask leaves: for output that others consume."""


@dataclass(frozen=True, slots=True)
class SecurityConfig:
    """What the user chose (``headgate.Security``).

    Attributes:
        access: of a checkpoint directory that does not exist yet; one that exists decides by itself.
        tls: True and False for all connections; None: all but those over loopback.
        certificate_file, key_file, ca_file: the user's own certificate, PEM, on every machine; "" makes one per job.
    """

    access: Access = Access.OWNER
    tls: bool | None = None
    certificate_file: str = ""
    key_file: str = ""
    ca_file: str = ""
