"""What a user says about the protection of a pipeline's files and connections."""

from __future__ import annotations

from dataclasses import dataclass

from headgate.model.security import Access, SecurityConfig
from headgate.store.roots import checked_access


@dataclass(frozen=True, slots=True)
class Security:
    """Who may read what a pipeline writes.

    Attributes:
        access: of the checkpoint directory, when it is made: "owner", only the user that runs the pipeline; "group",
            also the directory's group, for drivers and executors that run as different users. A directory that
            exists decides by itself: it is shared if its group may write to it and its setgid bit is set.
    """

    access: str = Access.OWNER.value

    def __post_init__(self) -> None:
        self.to_config()

    def to_config(self) -> SecurityConfig:
        """Return it as plain data.

        Raises:
            UsageError: a value is wrong.
        """
        return SecurityConfig(checked_access(self.access, "security access", Access.OWNER, Access.GROUP))
