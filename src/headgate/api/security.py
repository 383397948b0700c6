"""What a user says about the protection of a pipeline's files and connections."""

from __future__ import annotations

import os
from dataclasses import dataclass

from headgate.errors import UsageError
from headgate.model.security import Access, SecurityConfig
from headgate.storage.roots import checked_access

PathText = str | os.PathLike[str]


@dataclass(frozen=True, slots=True)
class Security:
    """Who may read what a pipeline writes, and how its processes talk to each other.

    Attributes:
        access: who may read a checkpoint directory that the pipeline creates. "owner": only the user that runs the
            pipeline. "group": also the directory's group, for drivers and executors that run as different users. For an
            existing directory, its permissions decide: it is shared if its group may write to it and its setgid bit is
            set.
        tls: which connections are encrypted. None (default): all that do not go to a loopback address; True: all;
            False: none. Every connection is authenticated, encrypted or not.
        certificate_file, key_file, ca_file: the certificate of every process, its key, and the authority that signed
            it, as PEM files under the same path on every machine. By default each process makes its own certificate,
            and the job's secret proves that it is the right one.
    """

    access: str = Access.OWNER.value
    tls: bool | None = None
    certificate_file: PathText | None = None
    key_file: PathText | None = None
    ca_file: PathText | None = None

    def __post_init__(self) -> None:
        self.to_config()

    def to_config(self) -> SecurityConfig:
        """Return it as plain data.

        Raises:
            UsageError: a value is wrong.
        """
        access = checked_access(self.access, "security access", Access.OWNER, Access.GROUP)
        if self.tls is not None and not isinstance(self.tls, bool):
            raise UsageError(f"security tls must be True, False or None (all but loopback), not {self.tls!r}")
        files = [self.certificate_file, self.key_file, self.ca_file]
        given = [file for file in files if file is not None]
        if given and len(given) < len(files):
            raise UsageError("security certificate_file, key_file and ca_file belong together: give all three or none")
        if given and self.tls is False:
            raise UsageError("security certificate_file has no use with tls=False; leave one of them out")
        certificate, key, ca = ("" if file is None else os.path.abspath(file) for file in files)
        return SecurityConfig(access, self.tls, certificate, key, ca)
