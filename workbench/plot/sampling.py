"""Figures of sampled decoding: laws side by side, and a measure along a setting."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from workbench.core.errors import UserError
from workbench.core.frames import require
from workbench.plot import style

if TYPE_CHECKING:
    import polars as pl
    from matplotlib.axes import Axes


def laws(frame: pl.DataFrame, *, ax: Axes | None = None, most: int = 12) -> Axes:
    """Shares of tokens under several laws, as bars side by side.

    Args:
        frame: One row per token and law: name, token (its text or id), share; tokens in the order of their first rows.
        ax: Axes to draw on; None for a new figure.
        most: Tokens drawn, the first ones; default 12.

    Returns:
        The axes.

    Raises:
        UserError: A column is missing, or two rows give one bar.
    """
    require(frame, ("name", "token", "share"), "a frame of laws")
    ax = style.axes(ax)
    if not len(frame):
        return style.empty(ax, "tokens")
    if frame.select("name", "token").is_duplicated().any():
        raise UserError("two rows of the frame give the same token of one law: aggregate it first")
    names = frame["name"].unique(maintain_order=True).to_list()
    tokens = frame["token"].unique(maintain_order=True).to_list()[:most]
    width = 0.84 / len(names)
    for i, name in enumerate(names):
        shares = dict(frame.filter(frame["name"] == name).select("token", "share").iter_rows())
        at = np.arange(len(tokens)) + (i - (len(names) - 1) / 2) * width
        heights = [shares.get(token, 0.0) for token in tokens]
        ax.bar(at, heights, 0.92 * width, color=style.colour(i), label=name)
    shown = [str(token) if isinstance(token, int) else repr(token)[1:-1] for token in tokens]
    ax.set_xticks(range(len(tokens)), shown, rotation=40 if max(map(len, shown)) > 4 else 0, ha="right")
    style.legend(ax)
    style.titles(ax, "Laws of the next token", x="token", y="share")
    return ax


def by_setting(
    frame: pl.DataFrame, x: str, *, value: str = "value", by: str = "name", ax: Axes | None = None, label: str = ""
) -> Axes:
    """A measure along a setting, one line per name, with intervals where the frame has them.

    Args:
        frame: One row per setting and name; columns low and high, if there, are the interval.
        x: Column of the setting, such as "temperature".
        value: Column of the measure; default "value".
        by: Column that tells lines apart; default "name".
        ax: Axes to draw on; None for a new figure.
        label: Name of the measure on the axis; default the column's.

    Returns:
        The axes.

    Raises:
        UserError: A column is missing.
    """
    require(frame, (x, value, by), "a frame of a measure along a setting")
    ax = style.axes(ax)
    if not len(frame):
        return style.empty(ax, "settings")
    names = frame[by].unique(maintain_order=True).to_list()
    for i, name in enumerate(names):
        part = frame.filter(frame[by] == name).sort(x)
        ink = style.colour(i)
        ax.plot(part[x], part[value], color=ink, marker=style.marker(i), markersize=5, linewidth=1.5, label=str(name))
        if {"low", "high"} <= set(part.columns):
            known = part.drop_nulls(["low", "high"])
            ax.fill_between(known[x], known["low"], known["high"], color=ink, alpha=0.15, linewidth=0)
    style.legend(ax)
    measure = label or value.replace("_", " ")
    style.titles(ax, f"{measure.capitalize()} by {x.replace('_', ' ')}", x=x.replace("_", " "), y=measure)
    return ax
