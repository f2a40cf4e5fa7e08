"""The demo's figures and its summary page; every sentence is made from the numbers it speaks of."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from workbench.cli.page import facts, figure, folded, page, paragraph, png_of, table
from workbench.cli.replay import likelihoods
from workbench.core.manifest import write_atomic
from workbench.core.metrics import acceptance
from workbench.core.progress import progress

if TYPE_CHECKING:
    import polars as pl

    from workbench.cli.demo_run import Demo

DEPTHS = (0, 64, 128, 192, 256)


@dataclass(frozen=True)
class Figure:
    """A figure of the page.

    Args:
        name: File name, without suffix.
        title: What it shows.
        says: What can be read from it, in this run.
        png: The picture.
    """

    name: str
    title: str
    says: str
    png: bytes


def write_figures(job: Demo, folder: Path) -> list[Figure]:
    """Draw every figure, and write each as a PNG.

    Args:
        job: The finished steps.
        folder: Directory to make.

    Returns:
        The figures, in the order of the page.
    """
    import matplotlib

    matplotlib.use("Agg")
    from workbench import plot

    wide = job.table.rounds(k=job.options.k_max, estimator="forced")
    narrow = job.table.rounds(k=job.options.k, estimator="forced")
    own = job.own_table.rounds(k=job.options.k_max, estimator="own")
    drawings: list[tuple[str, str, Callable[[], Any], Callable[[], str]]] = [
        ("acceptance_by_position", "Acceptance by draft position",
         lambda: plot.acceptance_by_position(wide), lambda: _says_position(wide)),
        ("acceptance_own_texts", "Acceptance by draft position, on the target's own texts",
         lambda: plot.acceptance_by_position(own, by=None), lambda: _says_position(own)),
        ("accepted_histogram", "Accepted tokens per round",
         lambda: plot.accepted_histogram(narrow), lambda: _says_histogram(narrow, job.options.k)),
        ("acceptance_by_depth", "Acceptance by context depth",
         lambda: plot.depth(narrow, edges=DEPTHS, by=None), lambda: _says_depth(narrow)),
        ("phase_anatomy", "Where the time goes",
         lambda: plot.phase_anatomy(job.phases), lambda: _says_phases(job.phases)),
        ("nll", "Likelihood of the held-out texts",
         lambda: plot.nll(job.table.nll), lambda: _says_nll(job.table.nll)),
    ]  # fmt: skip
    folder.mkdir()
    out = []
    for name, title, draw, says in progress(drawings, desc="figures", unit="figure"):
        png = png_of(draw())
        write_atomic(folder / f"{name}.png", png)
        out.append(Figure(name, title, says(), png))
    return out


def write_page(job: Demo, figures: list[Figure], path: Path, *, seconds: float) -> Path:
    """Write the summary page, which refers to nothing outside itself."""
    o, live = job.options, acceptance(job.rounds)
    name = list(job.speeds)[-1]
    tiles = [(f"faster than {mode}", f"{ratio:.2f}×") for mode, ratio in job.speedups.items()]
    tiles += [
        ("same text as plain decode", f"{job.same} of {len(job.live)}"),
        ("accepted a round, without bonus", f"{live.tau or 0:.2f}"),
        ("live rounds the walk reproduced", f"{job.agreed[0]} of {job.agreed[1]}"),
        ("anchor records", f"{job.records:,}"),
        ("positions replayed", f"{len(job.table.frame):,}"),
    ]
    by_name = {one.name: figure(one.png, one.title, one.says) for one in figures}
    speeds = [[mode, f"{speed:.1f}", f"{job.speeds[name] / speed:.2f}×"] for mode, speed in job.speeds.items()]
    least = min(job.live, key=lambda g: g.summary["repeated_8grams"] or 0.0)
    body = [
        "<h1>Speculative decoding, end to end</h1>",
        paragraph(f"{_model(job)}; {seconds:.0f} s with {job.manifest.machine['threads']} thread(s).", soft=True),
        facts(tiles),
        "<h2>Decode: the same text, sooner</h2>",
        paragraph(
            f"{len(job.live)} prompts, {o.max_new_tokens} tokens each, greedy. Drafting changes the speed, never the "
            f"text: {job.same} of {len(job.live)} texts equal plain decode's, token for token. "
            f"{100 * job.repeated():.0f} % of their 8-grams repeat earlier ones, and a loop is easy to draft: "
            "acceptance on texts that do not loop is in the tables below."
            + ("" if job.model.exact else " In fast numerics a near tie may fall the other way.")
        ),
        table(["mode", "tokens/s", "speculative is"], speeds),
        by_name["phase_anatomy"],
        paragraph("The text that repeats itself least, coloured by where each token came from:"),
        least.strip()._repr_html_(),
        "<h2>Replay: where drafts are accepted</h2>",
        paragraph(
            f"One recording of {len(job.tapes)} held-out documents, up to {o.max_tokens} tokens each, holds the chain "
            f"the drafter proposes at every position. The rounds below are walks over it (estimator: forced, pooled): "
            f"a round also ends where the text leaves the target's own pick, as {_forced(job):.0%} do. "
            "On the target's own texts the walk and the live engine agree in "
            f" {job.agreed[0]} of {job.agreed[1]} rounds: start, drafted, accepted, stop."
        ),
        by_name["acceptance_by_position"],
        paragraph("On the target's own texts a round ends as in live decoding, at the first rejected draft:"),
        by_name["acceptance_own_texts"],
        by_name["accepted_histogram"],
        by_name["acceptance_by_depth"],
        _registers(job),
        "<h2>Sweep: what another policy would give</h2>",
        paragraph(
            f"{len(job.grid)} policies walked over the same recording, nothing decoded again. Accepted tokens per "
            f"round, without bonus; then the share of drafts that were accepted. {_says_sweep(job.grid)}"
        ),
        _pivot(job.grid, "tau", "accepted a round", "{:.2f}"),
        _pivot(job.grid, "efficiency", "accepted / drafted", "{:.0%}"),
        "<h2>Likelihood</h2>",
        by_name["nll"],
        "<h2>Files and how to repeat this</h2>",
        paragraph(
            "anchors/, table/ and own-table/ open with datasets.load_from_disk; own.jsonl holds the generated texts as "
            "tapes; sweep.parquet and nll.parquet hold the tables; rounds.parquet and timings.json depend on the clock."
        ),
        f'<pre class="plain">{job.command()}</pre>',
        folded("manifest.json", json.dumps(job.manifest.to_dict(), indent=1, ensure_ascii=False)),
    ]
    return write_atomic(path, page("Speculative decoding, end to end", "\n".join(body)).encode())


def _model(job: Demo) -> str:
    """The model and its numerics in a phrase."""
    model = job.manifest.model
    return f"{model['name']} ({model['fingerprint']}), {'exact' if model['exact'] else 'fast'} numerics"


def _registers(job: Demo) -> str:
    """Acceptance and likelihood per register."""
    rounds = job.table.rounds(k=job.options.k, estimator="forced")
    scored = {row["source"]: row for row in likelihoods(job.table.nll)}
    rows = []
    for source in sorted(rounds["source"].unique()):
        found = acceptance(rounds.filter(rounds["source"] == source))
        joint = [f"{share or 0:.0%}" for share in found.joint]
        nll, bits = scored[source]["nll"], scored[source]["bits_per_byte"]
        tail = [f"{nll:.3f}", "–" if bits is None else f"{bits:.3f}"]
        rows.append(
            [source, f"{found.rounds:,}", f"{found.tau or 0:.2f}", f"{found.efficiency or 0:.0%}", *joint, *tail]
        )
    slots = [f"joint({j})" for j in range(1, job.options.k + 1)]
    head = ["register", "rounds", "accepted a round", "accepted / drafted", *slots, "nats/token", "bits/byte"]
    return paragraph(f"By register, at k = {job.options.k}:") + table(head, rows)


def _pivot(grid: pl.DataFrame, column: str, title: str, form: str) -> str:
    """One number of the sweep: a row per draft length, a column per p_min."""
    columns = sorted(grid["p_min"].unique())
    rows = []
    for k in sorted(grid["k"].unique()):
        part = {row["p_min"]: row[column] for row in grid.filter(grid["k"] == k).iter_rows(named=True)}
        rows.append([f"k = {k}", *("–" if part[p] is None else form.format(part[p]) for p in columns)])
    return table([title, *(f"p_min = {p:g}" if p else "no p_min" for p in columns)], rows)


def _says_position(rounds: pl.DataFrame) -> str:
    pooled = acceptance(rounds)
    first = {
        s: acceptance(rounds.filter(rounds["source"] == s)).joint[0] or 0.0 for s in rounds["source"].unique().to_list()
    }
    (at_least, low), (at_most, high) = min((v, s) for s, v in first.items()), max((v, s) for s, v in first.items())
    spread = f" By register, slot 1 goes from {low} ({at_least:.0%}) to {high} ({at_most:.0%})." if low != high else ""
    k = len(pooled.joint)
    last = f", and all {k} in {pooled.joint[-1] or 0:.0%}" if k > 1 else ""
    deep = [c for c in pooled.cond[1:] if c is not None]
    kept = (
        f" A draft whose predecessors were accepted is accepted itself in {min(deep):.0%} to {max(deep):.0%}."
        if deep
        else ""
    )
    return f"The first draft is accepted in {pooled.joint[0] or 0:.0%} of the rounds{last}.{spread}{kept}"


def _says_sweep(grid: pl.DataFrame) -> str:
    def point(k: int, p_min: float) -> dict[str, Any]:
        return grid.filter((grid["k"] == k) & (grid["p_min"] == p_min)).row(0, named=True)

    k, p = max(grid["k"]), max(grid["p_min"])
    one, full, picky = point(1, 0.0), point(k, 0.0), point(k, p)
    if k == 1 or not full["tau"]:
        return ""
    return (
        f"From k = 1 to {k}, accepted tokens go from {one['tau']:.2f} to {full['tau']:.2f} a round while the accepted "
        f"share falls from {one['efficiency']:.0%} to {full['efficiency']:.0%}; p_min = {p:g} at k = {k} keeps "
        f"{picky['tau'] / full['tau']:.0%} of the accepted tokens a round for "
        f"{picky['drafted'] / picky['rounds'] / (full['drafted'] / full['rounds']):.0%} of the drafts."
    )


def _forced(job: Demo) -> float:
    """Share of rounds over the documents that the text ended."""
    rounds = job.table.rounds(k=job.options.k, estimator="forced")
    return int((rounds["round_stop"] == "forced").sum()) / len(rounds)


def _says_histogram(rounds: pl.DataFrame, k: int) -> str:
    found = acceptance(rounds)
    none, full = found.lengths[0] / found.rounds, found.full_accepts / found.rounds
    return (
        f"At k = {k}, {none:.0%} of the rounds accept nothing and {full:.0%} accept all that they drafted; the mean is "
        f"{found.tau or 0:.2f}."
    )


def _says_depth(rounds: pl.DataFrame) -> str:
    import polars as pl

    edges = [edge for edge in DEPTHS if edge <= int(rounds["start"].max())]  # type: ignore[arg-type]
    ends = [*edges[1:], 1 << 30]
    parts = [rounds.filter(pl.col("start").is_between(a, b - 1)) for a, b in zip(edges, ends)]
    means = [acceptance(part).tau or 0.0 for part in parts]
    return (
        f"Accepted tokens per round are {means[0]:.2f} in the first {DEPTHS[1]} positions and {means[-1]:.2f} from "
        f"position {edges[-1]:,} on; the bars say how much of that is the choice of documents."
    )


def _says_phases(phases: pl.DataFrame) -> str:
    import polars as pl

    out = []
    for group, name in (("round", "A round"), ("draft step", "A draft step")):
        part = phases.filter(pl.col("group") == group)
        total = float(part["ms"].sum())
        if total > 0:
            top = part.sort("ms", descending=True).row(0, named=True)
            out.append(f"{name} takes {total:.1f} ms, {top['ms'] / total:.0%} of it in {top['part']}.")
    return " ".join(out)


def _says_nll(frame: pl.DataFrame) -> str:
    rows = [row for row in likelihoods(frame) if row["source"] != "all"]
    low, high = min(rows, key=lambda r: r["nll"]), max(rows, key=lambda r: r["nll"])
    if low is high:
        return (
            f"{low['source'] or 'the text'} costs {low['nll']:.2f} nats per token (perplexity {low['perplexity']:.1f})."
        )
    return (
        f"{low['source']} is the easiest register at {low['nll']:.2f} nats per token (perplexity "
        f"{low['perplexity']:.1f}), {high['source']} the hardest at {high['nll']:.2f} ({high['perplexity']:.1f})."
    )
