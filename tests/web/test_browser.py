"""The page in a real browser. Skipped where there is no Chromium: ``apt-get install chromium chromium-driver``."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tests.web.shop import NOW_MS, Asked, definition, progress
from tests.web.test_app import Found

from headgate.api.pipeline_registry import KnownPipeline, KnownState
from headgate.model.ids import CheckpointId
from headgate.model.progress import SubtaskAlignment, WorkerProgress
from headgate.web.app import Overview, RunActions, make_app, make_overview_app, serve_page
from headgate.web.view_model import LogDirectory, RunView

PATIENCE_S = 60
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--window-size=1280,1600",
)

pytestmark = [pytest.mark.run, pytest.mark.xdist_group("browser")]


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    binary, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if binary is None or driver is None:
        pytest.skip("there is no Chromium here: apt-get install chromium chromium-driver")
    webdriver = pytest.importorskip("selenium.webdriver")
    options = webdriver.ChromeOptions()
    options.binary_location = binary
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    for flag in (*FLAGS, f"--user-data-dir={tmp_path_factory.mktemp('chromium')}"):
        options.add_argument(flag)
    found = webdriver.Chrome(options, webdriver.ChromeService(driver))
    yield found
    found.quit()


class Shown:
    """A run, the page that shows it, and a browser that looks."""

    def __init__(self, browser: Any, root: Path) -> None:
        self.browser, self.story, self.asking = browser, RunView(definition(root)), RunActions()
        self.logs = LogDirectory()
        self.story.set_progress(progress(), NOW_MS, 0)

    def text(self, css: str) -> str:
        return " | ".join(found.text for found in self.browser.find_elements("css selector", css))

    def until(self, css: str, words: str) -> None:
        """Wait until what ``css`` finds says ``words``."""
        from selenium.common.exceptions import StaleElementReferenceException
        from selenium.webdriver.support.ui import WebDriverWait

        changing = (StaleElementReferenceException,)  # the page has replaced what was just found
        WebDriverWait(self.browser, PATIENCE_S, ignored_exceptions=changing).until(
            lambda _: words in self.text(css), f"'{words}' in {css}"
        )

    def complaints(self) -> list[str]:
        """What the browser logged, such as an error in the page or something that was kept from loading."""
        return [entry["message"] for entry in self.browser.get_log("browser")]


def test_a_run_is_seen_as_it_goes(browser: Any, tmp_path: Path) -> None:
    shown = Shown(browser, tmp_path)
    with serve_page(partial(make_app, shown.story, shown.asking, shown.logs), 0, "127.0.0.1", None) as address:
        browser.get(address)
        shown.until("#state", "running")
        assert browser.title == "shop – Headgate"
        assert shown.text("#graph [data-operator='orders']") == "orders\n1.50 k records/s"
        assert "latest" in shown.text("#operators")
        assert "tries" in shown.text("#loops")
        assert "checkpoint 8 under way for 1.2 s, waiting for latest[1]" in shown.text("#pending")
        assert not browser.find_element("id", "wishes").is_displayed()
        shown.story.set_progress(progress(2_500.0), NOW_MS + 1_000, 1_000)
        shown.story.add_checkpoint(8, 30, 2_048, NOW_MS)
        shown.story.add_restart("worker 1 (pid 17 on here) was lost", 100, NOW_MS)
        shown.until("#happened", "worker 1 (pid 17 on here) was lost")
        assert "2.0 KiB" in shown.text("#checkpoints")
        assert "2.50 k/s" in shown.text("#tiles")
        lines = [path.get_attribute("d") for path in browser.find_elements("css selector", "#rates .curve")]
        assert all(line.count("L") == 1 and "NaN" not in line for line in lines)
        shown.story.set_end("failed", "worker 1 was lost <b>twice</b>", NOW_MS)
        shown.until("#message", "worker 1 was lost <b>twice</b>")
        assert shown.text("#state") == "failed"
        assert shown.complaints() == []


def test_sources_show_their_splits_the_most_lagging_first(browser: Any, tmp_path: Path) -> None:
    shown = Shown(browser, tmp_path)
    with serve_page(partial(make_app, shown.story, shown.asking, shown.logs), 0, "127.0.0.1", None) as address:
        browser.get(address)
        shown.until("#sources", "shop/3")
        assert browser.find_element("id", "sources-section").is_displayed()
        assert shown.text("#sources tr").split(" | ") == [
            "source split position end lag records/s watermark event time subtask",
            "orders 2,000 splits, 2 of them here 12,345 records and 1 not known 1 idle, 3 waiting for slower ones",
            "shop/3 1,000 13,345 12,345 records 150 2023-11-14 22:13:20 1",
            "shop/4 70 not known 0 idle 0",
            "logs 1 split 2.0 KiB",
            "a.log 10 2,058 2.0 KiB 0 0",
        ]
        shown.story.set_progress(progress(2_500.0, sources=()), NOW_MS, 0)
        shown.until("#graph [data-operator='orders']", "2.50 k records/s")
        assert not browser.find_element("id", "sources-section").is_displayed()
        assert shown.complaints() == []


def test_edges_say_who_waits_and_expressions_that_they_run_as_one(browser: Any, tmp_path: Path) -> None:
    shown = Shown(browser, tmp_path)
    with serve_page(partial(make_app, shown.story, shown.asking, shown.logs), 0, "127.0.0.1", None) as address:
        browser.get(address)
        shown.until("#graph [data-edge='orders → tries']", "1.50 k/s")
        assert shown.text("#graph [data-edge='orders → tries']") == "1.50 k/s\n25 %\n50 %"
        assert shown.text("#graph [data-edge='key-by → latest']") == "by shop\n1.20 k/s\n42 %\n0 %"
        assert shown.text("#graph [data-edge='again → with-columns']") == "one pass\n30/s"
        assert "one pass with with-columns" in shown.text("#graph [data-operator='again']")
        assert "again with with-columns" in shown.text("#operators")
        told = browser.find_element("css selector", "[data-edge='orders → tries'] title").get_attribute("textContent")
        assert "holds the sender back 50 %" in told
        assert "3 batches, 2.0 KiB wait, 75 % of what may" in told
        widths = {
            name: float(
                browser.find_element("css selector", f"[data-edge='{name}'] path").get_attribute("stroke-width")
            )
            for name in ("orders → tries", "key-by → latest")
        }
        assert widths["orders → tries"] > 2 * widths["key-by → latest"]
        shown.story.set_progress(progress(edges=(), nodes=()), NOW_MS, 0)  # between two generations nothing is known
        shown.until("#graph [data-operator='orders']", "source")
        assert shown.text("#graph [data-edge='orders → tries']") == ""
        assert shown.complaints() == []


def colours(browser: Any, scheme: str) -> tuple[str, str]:
    """Return the colours of the ground and of the text for somebody whose system has this scheme."""
    wanted = [{"name": "prefers-color-scheme", "value": scheme}]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": wanted})
    read = "const found = getComputedStyle(document.body); return [found.backgroundColor, found.color]"
    ground, text = browser.execute_script(read)
    return ground, text


def brightness(colour: str) -> int:
    return sum(map(int, re.findall(r"\d+", colour)[:3]))


def test_it_is_dark_for_whoever_likes_it_dark(browser: Any, tmp_path: Path) -> None:
    shown = Shown(browser, tmp_path)
    with serve_page(partial(make_app, shown.story, shown.asking, shown.logs), 0, "127.0.0.1", None) as address:
        browser.get(address)
        shown.until("#state", "running")
        try:
            dark_ground, light_text = map(brightness, colours(browser, "dark"))
            light_ground, dark_text = map(brightness, colours(browser, "light"))
        finally:
            browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})
    assert dark_ground < 150 < 600 < light_text
    assert dark_text < 150 < 600 < light_ground


def test_workers_their_logs_and_alignments_are_seen(browser: Any, tmp_path: Path) -> None:
    from selenium.webdriver.support.ui import Select

    shown = Shown(browser, tmp_path)
    for worker in (0, 1):
        (tmp_path / f"worker-{worker}.log").write_text(f"2026-11-24T16:08:31.512 INFO 17 map: <b>worker</b> {worker}\n")
    shown.logs.set_directory(str(tmp_path))
    workers = (WorkerProgress(0, "here", 17, 0.5), WorkerProgress(1, "there", 18, 0.25))
    shown.story.set_progress(progress(workers=workers), NOW_MS, 0)
    shown.story.add_checkpoint(7, 30, 2_048, NOW_MS)
    shown.story.add_checkpoint(8, 30, 2_048, NOW_MS)
    quick = SubtaskAlignment("latest[0]", 90, 7)
    shown.story.set_alignments(
        {
            CheckpointId(7): (quick, SubtaskAlignment("latest[1]", 4_321, 8)),
            CheckpointId(8): (quick, SubtaskAlignment("latest[1]", 120, 8)),
        }
    )
    with serve_page(partial(make_app, shown.story, shown.asking, shown.logs), 0, "127.0.0.1", "sesame") as address:
        browser.get("about:blank")
        browser.get(f"{address}#token=sesame")
        shown.until("#workers", "there 18 25 %")
        shown.until("#checkpoints", "4.32 ms, latest[1]")
        shown.until("#alignment-of", "8")
        assert shown.text("#alignment tr:nth-child(2)") == "latest[1] 120 µs 8 µs"
        browser.find_element("xpath", "//table[@id='checkpoints']//td[text()='7']").click()
        shown.until("#alignment", "latest[1] 4.32 ms 8 µs")
        shown.until("#log", "<b>worker</b> 0")
        Select(browser.find_element("id", "log-choice")).select_by_value("worker-1")
        shown.until("#log", "<b>worker</b> 1")
        with (tmp_path / "worker-1.log").open("a") as log:
            log.write("2026-11-24T16:08:32.000 WARNING 18 map: it is late\n")
        shown.until("#log .warning", "it is late")
        assert "worker</b> 0" not in shown.text("#log")
        assert str(tmp_path) in shown.text("#log-place")
        assert shown.complaints() == []


def test_no_operator_lies_on_another(browser: Any, tmp_path: Path) -> None:
    shown = Shown(browser, tmp_path)
    with serve_page(partial(make_app, shown.story, shown.asking, shown.logs), 0, "127.0.0.1", None) as address:
        browser.get(address)
        shown.until("#graph", "out")
        boxes = [found.rect for found in browser.find_elements("css selector", "#graph .box")]
    assert len(boxes) == len(shown.story.to_json()["graph"]["nodes"])
    for at, one in enumerate(boxes):
        for other in boxes[at + 1 :]:
            beside = one["x"] + one["width"] <= other["x"] or other["x"] + other["width"] <= one["x"]
            above = one["y"] + one["height"] <= other["y"] or other["y"] + other["height"] <= one["y"]
            assert beside or above


def test_whoever_has_the_token_stops_it(browser: Any, tmp_path: Path) -> None:
    shown, handle = Shown(browser, tmp_path), Asked()
    shown.asking.begin(handle)  # type: ignore[arg-type]
    with serve_page(partial(make_app, shown.story, shown.asking, shown.logs), 0, "127.0.0.1", "sesame") as address:
        browser.get(f"{address}#token=sesame")
        shown.until("#wishes", "Stop")
        browser.find_element("css selector", "[data-wish=checkpoint]").click()
        shown.until("#message", "checkpoint 9 is complete")
        browser.find_element("css selector", "[data-wish=stop]").click()
        browser.switch_to.alert.dismiss()
        browser.find_element("css selector", "[data-wish=drain]").click()
        browser.switch_to.alert.accept()
        shown.until("#message", "everything in flight is processed")
        browser.find_element("css selector", "[data-wish=savepoint]").click()
        browser.switch_to.alert.send_keys("/elsewhere")
        browser.switch_to.alert.accept()
        shown.until("#message", "checkpoint 9 is complete")
    assert [call for call, _ in handle.calls] == ["checkpoint", "drain", "savepoint"]


def test_a_page_without_its_driver_says_so(browser: Any, tmp_path: Path) -> None:
    shown = Shown(browser, tmp_path)
    with serve_page(partial(make_app, shown.story, shown.asking, shown.logs), 0, "127.0.0.1", None) as address:
        browser.get(address)
        shown.until("#state", "running")
    shown.until("#state", "lost")
    assert "orders" in shown.text("#operators"), "the last numbers stay"


def test_all_pipelines_are_seen_as_they_go(browser: Any) -> None:
    looker = Found(
        [KnownPipeline("shop", "/data/shop", KnownState.RUNNING, "process 7 on here", page="http://127.0.0.1:1/")]
    )
    page = Shown.__new__(Shown)
    page.browser = browser
    with serve_page(partial(make_overview_app, Overview(looker)), 0, "127.0.0.1", "sesame") as address:
        browser.get(f"{address}#token=sesame")
        page.until("#state", "1 of 1 running")
        assert browser.find_element("css selector", "h3 a").get_attribute("href") == "http://127.0.0.1:1/"
        browser.find_element("css selector", "[data-wish=checkpoint]").click()
        page.until("#message", "no pipeline 'shop' runs")
        looker.found = [
            KnownPipeline(
                "shop", "/data/shop", KnownState.FAILED, "process 7 on here", "<b>full</b>", 8, NOW_MS, 42, 2_048
            )
        ]
        page.until("[data-pipeline=shop]", "<b>full</b>")
        assert "8 at 2023-11-14 22:13:20 UTC" in page.text("[data-pipeline=shop]")
        assert browser.find_elements("css selector", "[data-wish]") == []
        looker.found = []
        page.until("#pipelines", "No pipeline is known yet")
    page.until("#state", "lost")
    assert [line for line in page.complaints() if "409" not in line and "ERR_CONNECTION" not in line] == []
