"""Former names of options: a command still takes them, and its help no longer shows them (OM16).

``docs/upgrading.md`` lists them. A name is removed here when its minor release is over.
"""

from __future__ import annotations

import copy
from typing import Any

import typer
from typer.core import TyperCommand

OLD_NAMES = {
    "--dir": ("--checkpoint-dir", "--checkpoints"),
    "--restore": ("--from",),
    "--start": ("--from",),
    "--end": ("--until",),
    "--force": ("--anyway",),
    "--routing-key": ("--key",),
    "--retention-age": ("--max-age",),
    "--retention-size": ("--max-size",),
    "--min-segments": ("--min",),
    "--max-segments": ("--max",),
    "--checkpoints-kept": ("--keep",),
    "--program": ("--pipeline",),
}
"""By name: what the same option was called. A command that has another option of an old name keeps that one."""


class CommandWithOldNames(TyperCommand):
    """A command whose options can be called by their old names, too."""

    def make_parser(self, ctx: Any) -> Any:
        """Return the parser, which knows the old names."""
        parser = super().make_parser(ctx)
        taken = {name for option in self.params for name in option.opts}
        for option in self.params:
            for old in OLD_NAMES.get(option.opts[0], ()):
                if old not in taken:
                    former = copy.copy(option)
                    former.opts, former.secondary_opts = [old], []
                    former.add_to_parser(parser, ctx)
        return parser


def take_old_names(app: typer.Typer) -> None:
    """Have every command of ``app``, and of the groups in it, take the old names of its options."""
    for command in app.registered_commands:
        command.cls = CommandWithOldNames
    for group in app.registered_groups:
        if group.typer_instance is not None:
            take_old_names(group.typer_instance)
