"""The two acceptance rules side by side: empirical laws of one place, and the chance of acceptance over many.

Legend: N draws, R places.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from workbench.core.bootstrap import bootstrap_by
from workbench.core.errors import check_choice, check_int
from workbench.core.progress import progress
from workbench.core.tape import Corpus, Tape
from workbench.datasets.provenance import as_corpus
from workbench.model.hybrid import HybridModel
from workbench.sampling.draw import draw, inverse_cdf
from workbench.sampling.law import Law
from workbench.sampling.options import Shaping
from workbench.sampling.philox import DRAFT, RESIDUAL, TARGET, Noise
from workbench.sampling.residual import overlap
from workbench.sampling.shaping import law
from workbench.spec.choose import ACCEPT_RULES, Chooser

if TYPE_CHECKING:
    import polars as pl


def draw_by(rule: str, p: Law, q: Law, noise: Noise, position: int, *, redraw: Law | None = None) -> tuple[int, bool]:
    """One token drafted from q and judged by p: what is emitted, and whether the draft was accepted.

    Args:
        rule: "coupled" or "ratio".
        p: The target's law.
        q: The drafter's.
        noise: The random stream.
        position: Absolute position of the token.
        redraw: Law that replaces a draft rejected by "ratio"; None for the residual max(p - q, 0), the only right one.

    Returns:
        (token, accepted).
    """
    check_choice("rule", rule, ACCEPT_RULES)
    if rule == "coupled":
        token = draw(p, noise, position, TARGET)
        return token, draw(q, noise, position, TARGET) == token
    token = draw(q, noise, position, DRAFT)
    chooser = Chooser(noise=noise)
    if chooser.accepts(p, q, token, position, 0):
        return token, True
    if redraw is None:
        return chooser.redraw(p, q, position, 0), False
    return inverse_cdf(redraw, noise.uniform(position, RESIDUAL)), False


def empirical_law(
    rule: str, p: Law, q: Law, *, draws: int = 20_000, position: int = 0, redraw: Law | None = None
) -> tuple[dict[int, float], float]:
    """Shares of the tokens a rule emits over many random streams, and how often it accepts.

    Args:
        rule: "coupled" or "ratio".
        p: The target's law.
        q: The drafter's.
        draws: Streams, seeds 0 to draws - 1.
        position: Absolute position of the token.
        redraw: As for ``draw_by``.

    Returns:
        ({token: share}, share accepted).
    """
    check_int("draws", draws, low=1)
    seeds = progress(range(draws), desc=rule, unit="draw")
    made = np.array([draw_by(rule, p, q, Noise(seed), position, redraw=redraw) for seed in seeds])
    tokens, counts = np.unique(made[:, 0], return_counts=True)
    return dict(zip(tokens.tolist(), (counts / draws).tolist(), strict=True)), float(made[:, 1].mean())


def distance(shares: Mapping[int, float], p: Law) -> float:
    """Total variation between shares of tokens and a law."""
    outside = sum(share for token, share in shares.items() if p.prob(token) == 0)
    inside = sum(abs(shares.get(int(i), 0.0) - float(x)) for i, x in zip(p.ids, p.probs, strict=True))
    return 0.5 * (inside + outside)


def honest_distance(p: Law, draws: int, *, quantile: float = 0.999, repeats: int = 4000, seed: int = 0) -> float:
    """The total variation that this share of honest samples of p stays below.

    Args:
        p: The law.
        draws: Size of a sample.
        quantile: The share.
        repeats: Samples simulated.
        seed: Of the simulation.

    Returns:
        The quantile.
    """
    probs = p.probs.cpu().numpy()
    samples = np.random.default_rng(seed).multinomial(draws, probs / probs.sum(), size=repeats) / draws
    return float(np.quantile(0.5 * np.abs(samples - probs).sum(1), quantile))


def rules_by_setting(
    model: HybridModel,
    tapes: Corpus | Sequence[Tape] | Tape,
    settings: Mapping[str, Mapping[str, Any]],
    *,
    first: int = 8,
    repeats: int = 20,
) -> pl.DataFrame:
    """Chance that the first draft is accepted under each rule and shaping, at every place of some texts.

    Under "ratio" it is the overlap of the two laws; under "coupled" the chance that two draws with shared noise agree,
    estimated from repeated noise. Both are taken at the same places, so that their gap is a paired one.

    Args:
        model: The target with its head.
        tapes: Documents.
        settings: Name to the fields of a ``Shaping``.
        first: First position of a document that counts.
        repeats: Random streams per place.

    Returns:
        One row per setting and rule ("ratio", "coupled", and "gap", the first minus the second): setting, the shaping's
        temperature and top_p, name, value, and low and high of its 95 % interval by document.
    """
    import polars as pl

    check_int("first", first, low=1)
    check_int("repeats", repeats, low=1)
    documents: list[str] = []
    places: list[tuple[int, torch.Tensor, torch.Tensor]] = []
    for tape in as_corpus(tapes):
        ids = torch.from_numpy(tape.tokens.astype(np.int64))[None].to(model.device)
        rows = model.forward(ids, model.new_cache())
        assert rows.logits_BTV is not None
        hidden = model.draft(ids[:, 1:], model.carrier(rows)[:, :-1], model.new_draft_cache())
        drafter_TV = model.unembed_draft(hidden)[0]
        at = range(first, ids.shape[1])
        documents += [tape.doc_id] * len(at)
        places += [(p, rows.logits_BTV[0, p], drafter_TV[p - 1]) for p in at]
    made = []
    noises = [Noise(seed) for seed in range(repeats)]
    for name, fields in progress(settings.items(), desc="settings", unit="setting"):
        shaping = Shaping(**fields)
        chances = np.zeros((len(places), 3))
        for row, (position, target_V, drafter_V) in zip(chances, places, strict=True):
            p, q = law(target_V, shaping), law(drafter_V, shaping)
            same = [draw(p, n, position) == draw(q, n, position) for n in noises]
            row[:] = overlap(p, q), np.mean(same), overlap(p, q) - np.mean(same)
        found = bootstrap_by(np.array(documents), chances)
        for rule, one in zip(("ratio", "coupled", "gap"), found, strict=True):
            made.append((name, shaping.temperature, shaping.top_p, rule, one.value, one.low, one.high))
    columns = ["setting", "temperature", "top_p", "name", "value", "low", "high"]
    return pl.DataFrame(made, schema=columns, orient="row")
