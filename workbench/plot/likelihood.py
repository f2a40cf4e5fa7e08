"""NLL figures: per source with perplexity and bits per byte, and against position.

Drawn from frames. Per document: doc_id, source, nll (mean nats per scored token), n_tokens (scored tokens) and n_bytes
(UTF-8 bytes of the scored text; null when unknown). Per token: doc_id, source, position, nll (nats).
"""

from __future__ import annotations

from math import exp, log
from typing import TYPE_CHECKING

import numpy as np

from workbench.core.bootstrap import bootstrap_by, group_sums
from workbench.core.errors import check_int
from workbench.core.frames import require
from workbench.plot import style

if TYPE_CHECKING:
    import polars as pl
    from matplotlib.axes import Axes

POINTS = 160  # places at which a rolling mean is drawn


def nll(frame: pl.DataFrame, *, ax: Axes | None = None, by: str | None = "source", seed: int = 0) -> Axes:
    """Mean NLL per source with intervals by document, and its perplexity and bits per byte beside it.

    Args:
        frame: Per-document frame: doc_id, source, nll, n_tokens, n_bytes.
        ax: Axes to draw on; None for a new figure.
        by: "source" (default), or None to pool everything.
        seed: Seed of the bootstrap.

    Returns:
        The axes; the upper scale is perplexity, exp(NLL).

    Raises:
        UserError: A column is missing or ``by`` is unknown.
    """
    require(frame, ("doc_id", "nll", "n_tokens", "n_bytes"), "a per-document NLL frame")
    rows = style.series(frame, by)
    ax = style.axes(ax, height=1.6 + 0.42 * max(len(rows), 2))
    if not rows:
        return style.empty(ax, "documents")
    notes = []
    for y, (_, part) in enumerate(rows):
        tokens = part["n_tokens"].to_numpy().astype(float)
        nats = part["nll"].to_numpy() * tokens
        found = bootstrap_by(part["doc_id"].to_numpy(), nats, tokens, seed=seed)[0]
        if found.value is None:
            notes.append("no scored token")
            continue
        if found.low is not None and found.high is not None:
            ax.hlines(y, found.low, found.high, color=style.colour(y), linewidth=2.2, alpha=0.7)
        ax.plot(found.value, y, color=style.colour(y), marker=style.marker(y), markersize=7)
        known = part["n_bytes"].null_count() == 0 and part["n_bytes"].sum() > 0
        bits = f"{nats.sum() / log(2) / part['n_bytes'].sum():.3f} bits/byte" if known else "bytes unknown"
        notes.append(
            f"{found.value:.3f} nats · ppl {exp(found.value):,.2f} · {bits} · {style.counted(len(part), 'doc')}"
        )
    ax.set_yticks(range(len(rows)), [name for name, _ in rows])
    ax.set_ylim(len(rows) - 0.4, -0.6)
    for y, note in enumerate(notes):
        ax.text(
            1.02, y, note, transform=ax.get_yaxis_transform(), va="center", fontsize=style.SMALL, color=style.tone(ax)
        )
    ax.margins(x=0.12)
    top = ax.secondary_xaxis("top", functions=(np.exp, lambda x: np.log(np.maximum(x, 1e-9))))
    top.set_xlabel("perplexity (exp of nats per token)", fontsize=style.SMALL, color=style.tone(ax, style.MUTED))
    top.tick_params(labelsize=style.SMALL, colors=style.tone(ax, style.MUTED))
    top.spines["top"].set_visible(False)
    style.titles(ax, "Negative log-likelihood", x="NLL (nats per token)")
    counts = f"n = {style.counted(int(frame['n_tokens'].sum()), 'token')} of {style.counted(len(frame), 'document')}"
    style.caption(ax, f"{counts}; token-weighted{style.intervals(frame, True, 'bars')}")
    return ax


def nll_by_position(
    frame: pl.DataFrame,
    *,
    ax: Axes | None = None,
    by: str | None = "source",
    window: int = 128,
    ci: bool = True,
    seed: int = 0,
) -> Axes:
    """Rolling mean of the NLL of tokens against their position in the document.

    Args:
        frame: Per-token frame: doc_id, source, position, nll in nats.
        ax: Axes to draw on; None for a new figure.
        by: "source" for a line per source (default), None to pool them.
        window: Positions averaged over, ending at the position drawn; default 128.
        ci: Shade 95 % bootstrap intervals by document; default True.
        seed: Seed of the bootstrap.

    Returns:
        The axes.

    Raises:
        UserError: A column is missing or an option is not valid.
    """
    check_int("window", window, low=1)
    require(frame, ("doc_id", "position", "nll"), "a per-token NLL frame")
    lines, ax = style.series(frame, by), style.axes(ax)
    if not lines:
        return style.empty(ax, "tokens")
    ends = []
    for i, (name, part) in enumerate(lines):
        at_P, num_GP, den_GP = _windows(part, window)
        found = bootstrap_by(np.arange(len(num_GP)), num_GP, den_GP, seed=seed)
        kept = [(int(x), one.value, one.low, one.high) for x, one in zip(at_P, found) if one.value is not None]
        x, value, low, high = zip(*kept)
        ax.plot(x, value, color=style.colour(i), linewidth=1.4, label=name)
        if ci and len(num_GP) > 1:
            lower, upper = ([np.nan if end is None else end for end in side] for side in (low, high))
            ax.fill_between(x, lower, upper, color=style.colour(i), alpha=0.15, linewidth=0)
        ends.append((float(x[-1]), float(value[-1]), name, style.colour(i)))
    ax.margins(x=0.01)
    if len(lines) > 1:
        style.end_labels(ax, ends)
    style.titles(ax, "NLL by position", x="position in the document (tokens)", y="NLL (nats per token)")
    documents = style.counted(frame["doc_id"].n_unique(), "document")
    note = f"mean over the {window} positions up to the one drawn"
    style.caption(
        ax, f"n = {style.counted(len(frame), 'token')} of {documents}; {note}{style.intervals(frame, ci, 'shading')}"
    )
    return ax


def _windows(part: pl.DataFrame, window: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Places drawn [P], and per document the sum and count of NLL in the window up to each [G, P]."""
    position = part["position"].to_numpy().astype(np.int64)
    first, last = int(position.min()), int(position.max())
    at_P = np.unique(np.linspace(min(first + window - 1, last), last, POINTS).astype(np.int64))
    ids, values = part["doc_id"].to_numpy(), part["nll"].to_numpy()
    # A prefix sum per document would be [G, positions]; windows at the places drawn need [G, P] only.
    names, index = np.unique(ids, return_inverse=True)
    num, den = np.zeros((2, len(names), len(at_P)))
    for p, at in enumerate(at_P):
        inside = (position <= at) & (position > at - window)
        if inside.any():
            sums, counts, hit = group_sums(index[inside], values[inside])
            num[hit, p], den[hit, p] = sums[:, 0], counts[:, 0]
    return at_P, num, den
