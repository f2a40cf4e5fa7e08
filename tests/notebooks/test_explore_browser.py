"""Sliders in a real JupyterLab: run the notebook, move each by keyboard, see another figure and other numbers."""

from __future__ import annotations

import nbformat
import pytest

from tests.notebooks.browser import BROWSER, QUIET, TOKEN, lab, opened

SMALL = dict(DOCUMENTS=3, MAX_TOKENS=64, PROMPT_TOKENS=24, K_MAX=3)
# Slider, key, how often, and what the card says after it.
MOVES = ((0, "ArrowLeft", 1, "K = 2"), (1, "ArrowRight", 10, "p_min = 0.50"), (2, "ArrowRight", 1, "K from 1 to 2"))
# What the figure shows, wherever the browser keeps its bytes.
PIXELS = """image => { const c = document.createElement("canvas"); c.width = image.naturalWidth;
  c.height = image.naturalHeight; c.getContext("2d").drawImage(image, 0, 0); return c.toDataURL(); }"""


@pytest.mark.skipif(BROWSER is None, reason="no Chromium or Chrome is installed here, so no browser can move a slider")
def test_sliders_redraw_the_figure_in_jupyterlab(tmp_path, folder, runner):
    from playwright.sync_api import expect, sync_playwright

    notebook = nbformat.read(folder / "12_explore.ipynb", as_version=4)
    values = {**SMALL, "OUT": str(tmp_path / "out")}
    notebook = runner.with_parameters(notebook, values)
    last = next(i for i, cell in enumerate(notebook.cells) if cell.source.endswith("\nexplorer"))
    notebook.cells = notebook.cells[: last + 1]
    root, home = tmp_path / "notebooks", tmp_path / "home"
    root.mkdir()
    home.mkdir()
    nbformat.write(notebook, root / "explore.ipynb")
    complaints: list[str] = []
    with lab(root, home) as address, sync_playwright() as play:
        browser = play.chromium.launch(executable_path=BROWSER, args=QUIET)
        page = browser.new_page(viewport={"width": 1400, "height": 1600})
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.goto(f"{address}/lab/tree/explore.ipynb?token={TOKEN}&reset")
        opened(page)
        # From here on the console belongs to the notebook and its widgets.
        page.on("console", lambda message: complaints.append(message.text) if message.type == "error" else None)
        page.click("text=Run >> nth=0")
        page.click("text=Run All Cells >> nth=0")
        figure, numbers = page.locator("img.widget-image, .widget-image img").first, page.locator(".wb-card").last
        expect(figure).to_be_visible(timeout=40_000)
        expect(numbers).to_contain_text("K = 3")
        assert page.locator("[data-mime-type='application/vnd.jupyter.error']").count() == 0
        handles = page.locator(".widget-slider [role=slider]")
        assert handles.count() == 3
        for slider, key, times, shown in MOVES:
            before = figure.evaluate(PIXELS)
            handles.nth(slider).focus()
            for _ in range(times):
                page.keyboard.press(key)
            expect(numbers).to_contain_text(shown, timeout=30_000)
            page.wait_for_function(
                f"([image, before]) => ({PIXELS})(image) !== before", arg=[figure.element_handle(), before]
            )
        assert page.locator(".widget-slider .widget-label").all_inner_texts() == ["K (at most)", "p_min", "floor"]
        page.locator(".widget-image").first.screenshot(path=tmp_path / "explorer.png")
        page.screenshot(path=tmp_path / "page.png")
        browser.close()
    assert not complaints, complaints
