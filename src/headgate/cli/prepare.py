"""``headgate prepare``: has Spark start sooner on this machine."""

from __future__ import annotations

from headgate.cli.text import say
from headgate.display.text import size_text
from headgate.spark.archiving import make_archive


def prepare() -> None:
    """Have Spark start sooner on this machine.

    Starts Spark once and keeps what it loads in one file, from which every 'headgate run' starts its JVM from then on.
    Run it again after an update of Java or Spark: until then, starts take as long as before.

    The file is in headgate in $XDG_CACHE_HOME, or in ~/.cache. It may be deleted at any time.
    """
    say("Spark starts once, which takes about half a minute.", err=True)
    file = make_archive()
    say(f"{file} ({size_text(file.stat().st_size)}): pipelines start sooner from now on.")
