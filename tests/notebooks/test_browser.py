"""A researcher's first minute: JupyterLab in a real browser opens the quickstart and runs it to its claim."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

BROWSER = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
)
QUIET = ("--no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
         "--disable-component-update --disable-sync").split()  # fmt: skip
TOKEN = "workbench"


@contextmanager
def lab(folder: Path, home: Path) -> Iterator[str]:
    """JupyterLab on a folder, with a home directory of its own; yields its address."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "jupyterlab", "--no-browser", "--ip=127.0.0.1", f"--port={port}", "--allow-root"]
    command += [f"--IdentityProvider.token={TOKEN}", f"--ServerApp.root_dir={folder}", "--expose-app-in-browser"]
    command += ["--LabApp.news_url=None"]
    with open(home / "lab.log", "wb") as log:
        server = subprocess.Popen(command, env={**os.environ, "HOME": str(home)}, stdout=log, stderr=log)
        try:
            address = f"http://127.0.0.1:{port}"
            for _ in range(120):
                assert server.poll() is None, (home / "lab.log").read_text()
                try:
                    urllib.request.urlopen(f"{address}/api", timeout=5).close()
                    break
                except OSError:
                    time.sleep(0.5)
            else:
                raise AssertionError(f"JupyterLab did not come up:\n{(home / 'lab.log').read_text()}")
            yield address
        finally:
            server.terminate()
            server.wait(timeout=30)


@pytest.mark.full
@pytest.mark.skipif(
    BROWSER is None, reason="no Chromium or Chrome is installed here, so no browser can open JupyterLab"
)
def test_the_quickstart_runs_in_jupyterlab(tmp_path, folder, runner):
    import nbformat
    from playwright.sync_api import expect, sync_playwright

    notebook = runner.with_parameters(
        nbformat.read(folder / "01_quickstart.ipynb", as_version=4), {"MAX_NEW_TOKENS": 24, "DOCUMENTS": 2}
    )
    root, home = tmp_path / "notebooks", tmp_path / "home"
    root.mkdir()
    home.mkdir()
    nbformat.write(notebook, root / "quickstart.ipynb")
    complaints: list[str] = []
    with lab(root, home) as address, sync_playwright() as play:
        browser = play.chromium.launch(executable_path=BROWSER, args=QUIET)
        page = browser.new_page(viewport={"width": 1280, "height": 1600})
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.goto(f"{address}/lab/tree/quickstart.ipynb?token={TOKEN}&reset")
        page.wait_for_selector(".jp-Notebook .jp-Cell", timeout=60_000)
        page.wait_for_selector(".jp-Notebook-ExecutionIndicator[data-status='idle']", timeout=60_000)
        # As committed, before anything has run, JupyterLab takes style sheets out; the colours must still be there.
        shown = "element => getComputedStyle(element).backgroundColor"
        accepted, struck = (page.locator(f".wb-text .{kind}").first for kind in ("accepted", "rejected"))
        assert accepted.evaluate(shown) != struck.evaluate(shown) != "rgba(0, 0, 0, 0)" != accepted.evaluate(shown)
        page.click("text=Run >> nth=0")
        page.click("text=Run All Cells >> nth=0")
        last = page.locator(".jp-CodeCell").last
        expect(last).to_contain_text("24 tokens, equal to plain decode's", timeout=180_000)
        assert page.locator("[data-mime-type='application/vnd.jupyter.error']").count() == 0
        assert page.locator(".wb-text .accepted").count() > 0, "the token strip is shown with its colours"
        assert page.locator(".jp-OutputArea img").count() >= 1
        browser.close()
    assert not complaints, complaints
