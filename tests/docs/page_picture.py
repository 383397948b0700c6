"""Takes the pictures of the web page, light and dark: ``python -m tests.docs.page_picture``.

A real pipeline on Spark that a real Chromium looks at. It takes about two minutes; look at what came of it.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.docs.documentation import ROOT
from tests.web.test_browser import FLAGS

LIGHT, DARK = ROOT / "docs" / "page.png", ROOT / "docs" / "page-dark.png"
WIDTH, HEIGHT = 1400, 1220
RUNS_S = 75
"""Long enough for curves."""

PATIENCE_S = 120

PROGRAM = """
import polars as pl

import headgate as hg

p = hg.Pipeline("shop", parallelism=2, checkpointing=hg.Checkpointing(interval="2s"))
columns = {
    "town": hg.Choice(("Bergen", "Lyon", "Porto", "Turin")),
    "cents": hg.Uniform(100, 20_000),
    "tries": hg.Uniform(0, 3),
}
orders = p.source(hg.Generator(columns, rows_per_second=20_000, splits=4), name="orders")


def pay(loop: hg.Stream) -> tuple[hg.Stream, hg.Stream]:
    again = loop.filter(pl.col("tries") > 0, name="declined").with_columns(tries=pl.col("tries") - 1)
    return again, loop.filter(pl.col("tries") == 0, name="accepted")


paid = orders.iterate(pay, name="payments").with_timestamps("ts", out_of_orderness="5s")
paid.filter(pl.col("cents") > 15_000, name="large").sink(hg.FileSink("large"), name="to-check")
takings = paid.key_by("town").window(hg.Tumbling("10s")).agg(orders=pl.len(), cents=pl.col("cents").sum())
takings.sink(hg.FileSink("takings"), name="takings")
"""


@contextlib.contextmanager
def running(directory: Path) -> Iterator[str]:
    """Run the program there; give the address of its page."""
    (directory / "shop.py").write_text(PROGRAM)
    kept = {name: value for name, value in os.environ.items() if not name.startswith("HEADGATE_")}
    command = [sys.executable, "-P", "-m", "headgate.cli.__main__", "run", "shop.py", "--json", "--ui", "0"]
    environment = {**kept, "HEADGATE_UI_TOKEN": "sesame", "XDG_STATE_HOME": str(directory / "state")}
    with (directory / "told").open("w") as told:
        process = subprocess.Popen(command, cwd=directory, stdout=told, env=environment)
    try:
        yield address_in(directory / "told")
    finally:
        process.terminate()
        process.wait(PATIENCE_S)


def address_in(told: Path) -> str:
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        notes = [json.loads(line).get("text", "") for line in told.read_text().splitlines()]
        for note in notes:
            if note.startswith("page: "):
                return next(word for word in note.split() if "://" in word)
        time.sleep(0.2)
    raise RuntimeError(f"there is no page; it told {told.read_text()}")


@contextlib.contextmanager
def browser(directory: Path) -> Iterator[Any]:
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium") or ""
    for flag in (*FLAGS, "--hide-scrollbars", f"--user-data-dir={directory}"):
        options.add_argument(flag)
    found = webdriver.Chrome(options, webdriver.ChromeService(shutil.which("chromedriver")))
    try:
        yield found
    finally:
        found.quit()


def take(looking: Any, file: Path, colours: str) -> None:
    """Write what the browser shows to ``file``."""
    scheme = [{"name": "prefers-color-scheme", "value": colours}]
    looking.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": scheme})
    shot = looking.execute_cdp_cmd("Page.captureScreenshot", {"format": "png"})
    file.write_bytes(base64.b64decode(shot["data"]))


def main() -> None:
    """Write both pictures."""
    with contextlib.ExitStack() as opened:
        place, profile = (Path(opened.enter_context(tempfile.TemporaryDirectory())) for _ in range(2))
        looking = opened.enter_context(browser(profile))
        address = opened.enter_context(running(place))
        size = {"width": WIDTH, "height": HEIGHT, "deviceScaleFactor": 1, "mobile": False}
        looking.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        looking.get(f"{address}#token=sesame")
        time.sleep(RUNS_S)  # not a wait for anything: curves need time
        take(looking, LIGHT, "light")
        take(looking, DARK, "dark")


if __name__ == "__main__":
    main()
