"""``workbench sweep``: rows and recommendation, stores, costs, the page and its sliders, and what is refused."""

from __future__ import annotations

import json
import shutil
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

import workbench as wb
from workbench.replay.cost import CostModel
from workbench.replay.synthetic import synthetic_table

GRID = ("--k", "1:3", "--p-min", "0,.3,.5", "--floor", "none,1,2,default")
DRAWS = ("--draws", "100", "--seed", "3")
BROWSER = shutil.which("chromium") or shutil.which("chromium-browser")


@pytest.fixture(scope="session")
def table(tmp_path_factory) -> Path:
    with wb.quiet():
        out = tmp_path_factory.mktemp("cli") / "table"
        return synthetic_table(out, documents=8, tokens=(20, 80), sources=("code", "prose"), k_max=4).path


@pytest.fixture(scope="session")
def warm(tmp_path_factory) -> Path:
    with wb.quiet():
        out = tmp_path_factory.mktemp("cli") / "warm"
        return synthetic_table(out, documents=5, tokens=(20, 50), k_max=3, temperature=0.7).path


@pytest.fixture(scope="session")
def cost(tmp_path_factory) -> Path:
    model = CostModel.from_ratios({1: 1.0, 2: 1.1, 3: 1.25, 4: 1.5, 5: 1.9}, draft=0.06, name="a machine")
    return model.save(tmp_path_factory.mktemp("cli") / "cost.json")


class Page(HTMLParser):
    """Tags with attributes and, per script, its text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[tuple[dict[str, str | None], str]] = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag == "script":
            self.scripts.append((dict(attrs), ""))

    def handle_data(self, data):
        if self.tags and self.tags[-1][0] == "script":
            attrs, text = self.scripts[-1]
            self.scripts[-1] = (attrs, text + data)

    def named(self, name: str) -> dict[str, str | None]:
        return next(attrs for _, attrs in self.tags if attrs.get("id") == name)

    @property
    def data(self) -> dict[str, Any]:
        return json.loads(next(text for attrs, text in self.scripts if attrs.get("id") == "sweep-data"))


def test_rows_and_recommendation(run, table, cost):
    data = run("sweep", table, *GRID, *DRAWS, "--cost", cost, "--json").data
    given: dict[str, Any] = dict(k=[1, 2, 3], p_min=[0, 0.3, 0.5], floor=[None, 1, 2, "default"], draws=100, seed=3)
    with wb.quiet():
        frame = wb.sweep(wb.load_table(table), cost=CostModel.load(cost), **given)
    assert data["rows"] == frame.to_dicts() and data["cells"] == 36 == frame["cell"].n_unique()
    best = wb.recommend(frame)
    (said,) = data["recommended"]
    assert said["policy"] == best.label and said["sentence"] == best.sentence and said["value"] == best.value
    assert data["objective"] == "speedup" and data["cost"]["name"] == "a machine"
    text = run("sweep", table, *GRID, *DRAWS, "--cost", cost).out
    assert best.sentence in text and "36 cells in" in text and "own walk, pooled" in text


def test_tables_are_named_and_stores_go_on(run, table, warm, tmp_path):
    argv = ("sweep", table, f"hot={warm}", "--k", "2,3", "--statistic", "top", *DRAWS, "--out", tmp_path / "s")
    data = run(*argv, "--json", "--policy", "ema k=3 alpha=0.5", "--policy", "cumulative k=3 threshold=0.4").data
    assert {row["table"] for row in data["rows"]} == {"table", "hot"} and data["cells"] == 8
    assert {row["temperature"] for row in data["rows"]} == {0.0, 0.7} and data["objective"] == "emitted_per_round"
    again = run(*argv, "--json").data
    assert again["cells"] == 4 and [one["table"] for one in again["recommended"]] == ["table", "hot"]
    assert wb.load_sweep(tmp_path / "s")["cell"].n_unique() == 8
    assert "open it with workbench.load_sweep" in run(*argv).out


def test_published_costs_are_known_by_name(run, refused, table):
    from workbench.replay.published import published_costs

    name = next(iter(published_costs()))
    argv = ("sweep", table, "--k", "1:3", *DRAWS)
    assert run(*argv, "--cost", f"published:{name}", "--json").data["cost"]["name"] == name
    assert f"published:{name}" in refused(*argv, "--cost", "published:mine")


def test_measured_costs_are_of_the_tables_model(run, refused, table, tmp_path, monkeypatch, tiny_checkpoint, ids):
    from workbench.cli import sweep as verb

    model = tiny_checkpoint()
    documents = ids(list(range(1, 40)), list(range(2, 50)))
    assert run("replay", "--model", model, "--corpus", documents, "--k-max", "2", "--out", tmp_path / "t").code == 0
    said = refused("sweep", tmp_path / "t", "--k", "1", "--cost", "measure")
    assert "'t' was made by model" in said and "measure the table's own model" in said
    assert "would be measured as model" in refused(
        "sweep", tmp_path / "t", "--k", "1", "--cost", "measure", "--model", model, "--fast"
    )
    seen: list[Any] = []
    monkeypatch.setattr(
        verb, "measured", lambda args, tables: seen.append(args.cost) or CostModel.from_ratios({1: 1.0, 3: 1.2})
    )
    data = run(
        "sweep", tmp_path / "t", "--k", "1:2", "--cost", "measure", "--out", tmp_path / "s", *DRAWS, "--json"
    ).data
    assert seen == ["measure"] and data["rows"][0]["speedup"] > 0
    monkeypatch.undo()
    assert f"--cost {tmp_path / 's' / 'cost.json'}" in refused(
        "sweep", tmp_path / "t", "--cost", "measure", "--out", tmp_path / "s"
    )
    more = run("sweep", tmp_path / "t", "--k", "0:2", "--cost", tmp_path / "s" / "cost.json", "--out", tmp_path / "s")
    assert more.code == 0, more.err


def test_the_page_holds_sliders_and_the_frame(run, table, warm, cost, tmp_path):
    page = tmp_path / "p.html"
    argv = ("sweep", table, f"a <b> table={warm}", *GRID, "--statistic", "top", *DRAWS, "--cost", cost, "--html", page)
    data = run(*argv, "--policy", "ema k=3", "--json").data
    text = page.read_text("utf-8")
    found = Page(text)
    for name in ("k", "p_min", "floor"):
        assert found.named(name)["type"] == "range" and found.named(f"{name}-text") == {"id": f"{name}-text"}
    columns = found.data["columns"]
    rows = [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
    assert rows == data["rows"]
    assert found.data["objective"] == "speedup" and "tokens_per_second" in found.data["measures"]
    assert not [attrs for _, attrs in found.tags if str(attrs.get("src", "data:")).partition(":")[0] != "data"]
    assert not [attrs for _, attrs in found.tags if "href" in attrs] and "@import" not in text
    assert "a <b> table" not in text and "a &lt;b&gt; table" in text
    assert sum(tag == "img" for tag, _ in found.tags) == 5
    assert data["recommended"][0]["sentence"] in text.replace("&lt;", "<")


def test_a_page_without_a_grid_says_so(run, table, tmp_path):
    page = tmp_path / "p.html"
    assert run("sweep", table, "--policy", "ema k=3", *DRAWS, "--html", page).code == 0
    found = Page(page.read_text("utf-8"))
    assert "which the sliders speak of" in page.read_text("utf-8") and len(found.data["columns"]["cell"]) == 3
    assert not [attrs for tag, attrs in found.tags if tag == "input"]


@pytest.mark.skipif(BROWSER is None, reason="no Chromium on this machine")
def test_sliders_redraw_in_a_browser(run, table, warm, cost, tmp_path):
    playwright = pytest.importorskip("playwright.sync_api")
    page_file = tmp_path / "p.html"
    argv = ("sweep", table, f"warm={warm}", *GRID, "--pmin0", "no,yes", "--statistic", "top", *DRAWS, "--cost", cost)
    rows = run(*argv, "--html", page_file, "--json").data["rows"]
    with playwright.sync_playwright() as p:
        browser = p.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        page, problems = browser.new_page(), []
        page.on("console", lambda message: problems.append(message.text) if message.type == "error" else None)
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on(
            "request", lambda request: problems.append(request.url) if request.url[:4] not in ("file", "data") else None
        )
        page.goto(page_file.as_uri())
        best = max((r for r in rows if r["source"] == "all"), key=lambda r: r["speedup"])
        assert page.locator("#readout").text_content().startswith(best["policy"] + ": speed-up")

        def move(**places: int) -> str:
            for name, place in places.items():
                slider = page.locator(f"#{name}")
                slider.fill(str(place))
            return page.locator("#by-k").inner_html() + page.locator("#by-slot").inner_html()

        page.locator("#table").select_option("warm")
        page.locator("#source").select_option("synthetic")
        page.locator("#measure").select_option("tau")
        page.locator("#pmin0").select_option("false")
        seen = set()
        for k in range(3):
            for p_min, floor in ((0, 0), (2, 0), (2, 2)):  # floors: fixed K, default, 1, 2
                seen.add(move(k=k, p_min=p_min, floor=floor))
                wanted = (
                    "warm",
                    "synthetic",
                    k + 1,
                    (0, 0.3, 0.5)[p_min],
                    *{0: ("fixed", None), 2: ("floor", 1)}[floor],
                )
                names = ("table", "source", "k", "p_min", "family", "floor")
                (expected,) = (r for r in rows if not r["pmin0"] and tuple(r[name] for name in names) == wanted)
                shown = page.locator("#readout").text_content()
                assert f"accepted per round {expected['tau']:.3f} (" in shown and shown.startswith(
                    expected["policy"] + ":"
                )
        assert len(seen) > 6 and page.locator("#by-k .ring").count() == 1
        page.locator("#pmin0").select_option("true")
        assert "pmin0=True" in page.locator("#readout").text_content()
        assert page.locator("#by-k .dot").count() == 3 and page.locator("#by-slot rect").count() > 0
        assert not problems
        browser.close()


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (("--k", "3:1"), "'3:1' is not valid"),
        (("--k", "a"), "'a' is not valid"),
        (("--k", "9"), "replay with"),
        (("--p-min", "2"), "--p-min 2.0 is not valid"),
        (("--p-min", "x"), "--p-min 'x' is not valid: it must be a number"),
        (("--floor", "low"), "none or default"),
        (("--pmin0", "maybe"), "choose one of 'no', 'yes'"),
        (("--statistic", "best"), "--statistic best is not valid"),
        (("--policy", "ema q=3"), "has no field 'q'"),
        (("--cost", "nowhere.json"), "there is no such file"),
        (("--objective", "joy"), "choose one of"),
        (("--objective", "speedup"), "needs a cost model"),
        (("--html", "nowhere/p.html"), "there is no directory"),
        (("--width", "0"), "--width 0 is not valid"),
        (("--estimator", "best"), "choose one of"),
    ],
)
def test_what_is_wrong_is_said_in_a_sentence(refused, table, argv, says):
    assert says in refused("sweep", table, *argv, *DRAWS)


def test_tables_that_cannot_be_opened_are_refused(refused, table, tmp_path):
    assert "is not a directory" in refused("sweep", tmp_path / "none")
    assert "are needed" in refused("sweep") or "is needed" in refused("sweep")
    assert "write NAME=DIRECTORY" in refused("sweep", table, table)
    assert "is a directory: give a file" in refused("sweep", table, "--html", tmp_path)
