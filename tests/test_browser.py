"""What people look at, in a real Chromium: the report of an evaluation, and examples/gradio_demo.py.

`make test-browser` sets up what is needed; elsewhere these tests are left out, with the reason.
"""

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import urlopen

import pytest
from conftest import REPO, make_draft, save_tiny_target

import transformers_dflash.cli as cli

MISSING = [name for name in ("gradio", "selenium") if find_spec(name) is None]
MISSING += [name for name in ("chromium", "chromedriver") if shutil.which(name) is None]
pytestmark = [
    pytest.mark.browser,
    pytest.mark.slow,
    pytest.mark.skipif(bool(MISSING), reason=f"{', '.join(MISSING)} not found: make test-browser"),
]
SHOTS = os.environ.get("SCREENSHOTS")  # a folder, to look at the pages oneself


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> list[str]:
    """The options that name a tiny target and two drafts."""
    folder = tmp_path_factory.mktemp("models")
    target = save_tiny_target(folder / "target")
    for name, seed in (("first", 2), ("second", 1)):
        make_draft(target, seed).save_pretrained(folder / name)
    return [f"--target={folder / 'target'}", f"--draft={folder / 'first'}", f"--draft={folder / 'second'}"]


@pytest.fixture
def browser(tmp_path):
    """Chromium, which asks for nothing by itself and writes down what pages ask for."""
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium")
    for switch in ("headless=new", "no-sandbox", "disable-gpu", "disable-dev-shm-usage", "hide-scrollbars"):
        options.add_argument(f"--{switch}")
    for switch in ("disable-background-networking", "disable-component-update", f"user-data-dir={tmp_path / 'user'}"):
        options.add_argument(f"--{switch}")
    options.set_capability("goog:loggingPrefs", {"performance": "ALL", "browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(shutil.which("chromedriver")))
    driver.set_window_size(1200, 900)
    yield driver
    driver.quit()


def requested(browser) -> list[str]:
    """The addresses that pages have asked for, Chromium's own aside."""
    events = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    sent = [event["params"] for event in events if event["method"] == "Network.requestWillBeSent"]
    return [one["request"]["url"] for one in sent if not one["documentURL"].startswith("chrome")]


def errors(browser) -> list[str]:
    return [entry["message"] for entry in browser.get_log("browser") if entry["level"] == "SEVERE"]


def shoot(browser, name: str) -> None:
    if SHOTS:
        height = browser.execute_script("return document.documentElement.scrollHeight")
        browser.set_window_size(1200, height + 150)
        time.sleep(0.5)
        browser.save_screenshot(str(Path(SHOTS) / f"{name}.png"))


def test_the_report_of_an_evaluation_is_drawn(models, browser, tmp_path):
    arguments = ["evaluate", *models, "--data", "builtin", "--limit", "2", "--max-new-tokens", "24"]
    assert cli.main([*arguments, "--dtype", "float32", "--device", "cpu", "--output", str(tmp_path / "report")]) == 0
    address = (tmp_path / "report" / "report.html").as_uri()
    browser.get(address)
    assert errors(browser) == []
    assert requested(browser) == [address]

    charts = browser.find_elements("css selector", "svg")
    assert len(charts) == 4
    for chart in charts:
        assert chart.size["width"] > 500
        assert chart.size["height"] > 40
        sizes = [shape.size for shape in chart.find_elements("css selector", "rect, polyline")]
        assert max(size["width"] for size in sizes) > 100
        right = chart.rect["x"] + chart.rect["width"]
        for text in chart.find_elements("css selector", "text"):
            assert text.size["width"] > 0
            assert chart.rect["x"] - 1 <= text.rect["x"] <= text.rect["x"] + text.rect["width"] <= right + 1, text.text

    tables = browser.find_elements("css selector", "table")
    assert len(tables) == 4
    for table in tables:
        head = table.find_elements("css selector", "th")
        cells = table.find_elements("css selector", "td")
        assert len(cells) >= len(head)
        assert len(cells) % len(head) == 0
        assert all(cell.size["width"] > 0 and cell.size["height"] > 0 for cell in cells)
    row = [cell.text for cell in tables[0].find_elements("css selector", "tbody tr:first-child td")]
    assert row[:3] == ["builtin", "first", "2"]
    assert float(row[5]) >= 1  # τ
    shoot(browser, "report")

    browser.set_window_size(500, 900)  # the narrowest that it takes
    overflow = "return document.documentElement.scrollWidth - document.documentElement.clientWidth"
    assert browser.execute_script(overflow) <= 0
    colour = "return getComputedStyle(document.body).backgroundColor"
    light = browser.execute_script(colour)
    media = [{"name": "prefers-color-scheme", "value": "dark"}]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": media})
    assert browser.execute_script(colour) != light
    shoot(browser, "report-dark")


@pytest.fixture
def demo(models):
    """The address of examples/gradio_demo.py, running."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "GRADIO_SERVER_PORT": str(port)}
    command = [sys.executable, str(REPO / "examples" / "gradio_demo.py"), models[0], models[2]]
    command += ["--max-new-tokens", "60"]
    with subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as process:
        address = f"http://127.0.0.1:{port}/"
        for _ in range(240):
            assert process.poll() is None, process.stderr.read().decode()
            try:
                urlopen(address).close()
                break
            except OSError:
                time.sleep(0.5)
        yield address
        process.terminate()


def test_the_demo_shows_both_ways_side_by_side(demo, browser):
    from selenium.webdriver.support.ui import WebDriverWait

    browser.get(demo)
    wait = WebDriverWait(browser, 60)
    box, button = (
        wait.until(lambda page, tag=tag: page.find_element("css selector", tag))
        for tag in ("textarea", "button.primary")
    )
    box.clear()
    box.send_keys("what is a bee & <b>")
    button.click()
    wait.until(lambda page: page.find_element("css selector", "body").text.count("tokens/s") == 2)
    panels = browser.find_elements("css selector", ".answer")
    assert len(panels) == 2
    plain, dflash = (panel.get_property("textContent") for panel in panels)
    assert len(plain) > 30
    assert dflash == plain
    assert panels[0].find_elements("css selector", "mark") == []
    marks = panels[1].find_elements("css selector", "mark")
    assert len(marks) > 2
    assert len({mark.value_of_css_property("background-color") for mark in marks}) == 2
    assert all("accepted in round" in mark.get_attribute("title") for mark in marks)
    left, right = (panel.rect for panel in panels)
    assert left["x"] + left["width"] <= right["x"]  # side by side
    text = browser.find_element("css selector", "body").text
    accepted, drafted = map(int, re.search(r"(\d+) of (\d+) candidates accepted", text).groups())
    coloured = sum(len(mark.get_property("textContent").replace(" ", "")) for mark in marks)
    assert 0 < coloured <= accepted < drafted  # letters are tokens; some do not show
    assert "the same answer" in text
    assert errors(browser) == []
    addresses = requested(browser)
    assert addresses
    assert {urlsplit(one).hostname for one in addresses if one.startswith("http")} == {"127.0.0.1"}
    shoot(browser, "demo")
