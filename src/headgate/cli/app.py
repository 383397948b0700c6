"""The command line with all commands."""

from __future__ import annotations

from headgate.cli.command_line import call, command_line

app = command_line()


def main() -> None:
    """Run the command line."""
    call(app)


if __name__ == "__main__":
    main()
