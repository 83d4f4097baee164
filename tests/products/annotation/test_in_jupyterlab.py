"""The notebooks for people in JupyterLab, in headless Chromium:
run all cells, press keys, find the decisions on disk.
"""

import json
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not CHROMIUM, reason="needs Chromium"),
]
PICTURES = os.environ.get("MEMCALIB_PICTURES")  # a folder, to look at what was tried


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    """JupyterLab as `make lab` starts it, on copies of the notebooks: (folder, address)."""
    home = tmp_path_factory.mktemp("lab")
    shutil.copytree(ROOT / "nbs" / "lab", home / "nbs" / "lab")
    shutil.copytree(ROOT / "nbs" / "images", home / "nbs" / "images")
    shutil.copy(ROOT / "nbs" / "start.ipynb", home / "nbs")
    verb = next(
        line for line in (ROOT / "Makefile").read_text().splitlines() if "/jupyter lab" in line
    )
    options = verb.split("jupyter lab ")[1].split()
    port = free_port()
    server_options = [
        "--no-browser",
        f"--ServerApp.port={port}",
        "--IdentityProvider.token=",
        "--allow-root",
    ]
    command = [sys.executable, "-m", "jupyter", "lab", *options, *server_options]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "JUPYTER_CONFIG_DIR": str(home / "config")}
    with (home / "log.txt").open("w") as log:
        server = subprocess.Popen(command, cwd=home, env=environment, stdout=log, stderr=log)
        try:
            for _ in range(120):
                try:
                    urllib.request.urlopen(f"http://127.0.0.1:{port}/api/status", timeout=2).close()
                    break
                except OSError:
                    assert server.poll() is None, (home / "log.txt").read_text()[-2000:]
                    time.sleep(0.5)
            yield home, f"http://127.0.0.1:{port}"
        finally:
            server.terminate()
            server.wait(20)


@pytest.fixture(scope="module")
def browser():
    playwright = pytest.importorskip("playwright.sync_api")
    with playwright.sync_playwright() as player:
        opened = player.chromium.launch(executable_path=CHROMIUM)
        yield opened
        opened.close()


def run_all(browser, address: str, notebook: str, ready: str):
    """A notebook opened and run from its menu; returns the tab once `ready` is to be seen."""
    tab = browser.new_page(viewport={"width": 1400, "height": 1500})
    tab.goto(f"{address}/lab/tree/nbs/{notebook}?reset")
    tab.locator(".jp-Notebook").wait_for(timeout=60_000)
    tab.get_by_text("Python 3 (ipykernel) | Idle").first.wait_for(
        timeout=90_000
    )  # before it, JupyterLab asks which kernel
    news = tab.get_by_role(
        "button", name="No", exact=True
    )  # JupyterLab asks once whether it may tell news
    if news.count():
        news.first.click()
    tab.get_by_role("menuitem", name="Run", exact=True).click()
    tab.get_by_role("menuitem", name="Run All Cells", exact=True).click()
    try:
        tab.locator(ready).last.wait_for(timeout=90_000)
    except Exception:
        if PICTURES:
            tab.screenshot(path=f"{PICTURES}/failed.png")
        raise
    return tab


def picture(tab, name: str) -> None:
    if PICTURES:
        tab.locator(".jp-OutputArea-output:has(.widget-vbox)").last.screenshot(
            path=f"{PICTURES}/{name}.png"
        )


def rows(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def wait_for(path: Path, count: int) -> list[dict]:
    for _ in range(100):
        if len(rows(path)) >= count:
            break
        time.sleep(0.1)
    return rows(path)


def test_the_start_page_opens_and_runs(lab, browser):
    _, address = lab
    tab = browser.new_page(viewport={"width": 1400, "height": 1000})
    tab.goto(f"{address}/")
    tab.get_by_role("heading", name="Start here").first.wait_for(timeout=60_000)
    assert "/lab/tree/nbs/start.ipynb" in tab.url
    if PICTURES:
        tab.screenshot(path=f"{PICTURES}/start.png")
    tab.close()


@pytest.mark.parametrize(
    ("notebook", "file", "field", "decided", "third"),
    [
        ("lab/label_answers.ipynb", "labels.jsonl", "level", ["C", "A", None], "Item 3 of"),
        (
            "lab/label_sentences.ipynb",
            "roles/labels.jsonl",
            "role",
            ["irrelevant", "key", None],
            "sentence 3",
        ),
    ],
)
def test_keys_decide_one_thing_after_another(lab, browser, notebook, file, field, decided, third):
    home, address = lab
    tab = run_all(browser, address, notebook, ".widget-textarea textarea")
    picture(tab, notebook.split("/")[1].removesuffix(".ipynb"))
    tab.locator(".widget-textarea textarea").last.click()
    path = home / "runs" / "lab" / file
    for count, key in enumerate("310", 1):
        tab.keyboard.press(key)
        wait_for(path, count)
    labels = wait_for(path, 3)
    assert [row.get(field) for row in labels] == decided and {
        row["labeller"] for row in labels
    } == {"me"}
    tab.keyboard.press("p")
    tab.get_by_text(third, exact=False).last.wait_for(timeout=10_000)
    tab.close()


def test_a_row_of_a_pilot_passes_and_another_fails_with_a_reason(lab, browser):
    home, address = lab
    tab = run_all(browser, address, "lab/review_pilot.ipynb", ".widget-vbox button")
    picture(tab, "review_pilot")
    (batch,) = (home / "runs" / "lab" / "pilots").glob("batch-*")
    path = batch / "reviews.jsonl"
    tab.get_by_role("button", name="pass", exact=True).last.click()
    (first,) = wait_for(path, 1)
    tab.locator(".widget-dropdown select").first.select_option(index=1)
    tab.locator(".widget-textarea textarea").last.fill("the query gives it away")
    tab.get_by_role("button", name="fail: add issue").last.click()
    second = wait_for(path, 2)[-1]
    assert (
        first["passed"]
        and not second["passed"]
        and second["issues"][0]["text"] == "the query gives it away"
    )
    assert first["item"] != second["item"] and {first["reviewer"], second["reviewer"]} == {"me"}
    tab.close()
