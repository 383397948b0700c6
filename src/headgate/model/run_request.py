"""What another process of the machine asks a running pipeline for; ``runtime.driver.asking`` carries it."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class RunRequest:
    """What somebody asks for: a checkpoint, or a savepoint at ``savepoint``. ``ends``, ``drains``: and the end.

    ``cancels``: nothing but the end. ``run``: the nonce of the run that is asked, "" if who asks does not say.
    """

    savepoint: str = ""
    ends: bool = False
    drains: bool = False
    cancels: bool = False
    run: str = field(default="", repr=False, compare=False)

    def is_for(self, run: str) -> bool:
        """Whether ``run`` is asked. Who cancels always says whom: that may cost all checkpoints (C76)."""
        return self.run == run or not (self.run or self.cancels)
