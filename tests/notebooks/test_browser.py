"""A researcher's first minute: JupyterLab in a real browser opens the quickstart and runs it to its claim."""

from __future__ import annotations

import pytest

from tests.notebooks.browser import BROWSER, QUIET, TOKEN, lab, opened


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
        opened(page)
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
