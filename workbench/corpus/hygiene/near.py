"""Near duplicates: MinHash signatures find candidates, their token n-grams decide.

A document goes when its set of n-grams has a Jaccard similarity of at least the threshold with that of a document kept
before it, so that everything dropped is close to something kept, and a chain of small changes is not one cluster.
Similarities that decide are counted, not estimated; the estimates are reported beside them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from workbench.core.errors import CapabilityError, UserError, check_choice, check_int, check_real
from workbench.core.progress import progress
from workbench.core.tape import Corpus, Tape
from workbench.corpus.hygiene.grams import PARTS, counted, gram_hashes, gram_ids, listed, padded
from workbench.corpus.hygiene.outcome import Cleaned, Drop, cleaned

if TYPE_CHECKING:
    import datasketch
    import polars as pl

STEP = "near"
RECALL = 0.999  # least probability with which a pair at the threshold becomes a candidate
BLOCK = 4096  # n-grams hashed at a time
SCHEME = "affine32"  # permutations of 32-bit hashes, named so that estimates do not change with a default
_LOW = np.uint64(0xFFFFFFFF)


def near_dedup(
    tapes: Corpus | Sequence[Tape] | Tape,
    *,
    threshold: float = 0.8,
    n: int = 5,
    permutations: int = 128,
    part: str = "all",
    seed: int = 0,
) -> Cleaned:
    """Keep the first of the documents that are nearly the same.

    Documents are taken in their order. Each is compared with those kept so far that share a band of its MinHash
    signature; it is dropped for the most similar one (the earliest of equals) when the Jaccard similarity of their sets
    of token n-grams reaches the threshold. A document of fewer than n tokens is one n-gram of its own.

    Args:
        tapes: The documents; run ``dedup`` first, which is far cheaper per document.
        threshold: Jaccard similarity from which a document goes, above 0 up to 1; default 0.8.
        n: Tokens per n-gram; default 5.
        permutations: Length of a signature; default 128. More find candidates more surely at low thresholds.
        part: Which tokens are compared: "all" (default), "prompt", "output" or "supervised".
        seed: Seed of the permutations; default 0.

    Returns:
        The outcome, with the reports "pairs" (kept, doc_id, estimate, jaccard, dropped: every candidate pair) and
        "clusters" (doc_id of the kept document, size, least_jaccard, members).

    Raises:
        UserError: These are no tapes, or an option is out of range.
        CapabilityError: datasketch is not installed.

    Source: Broder 1997 (resemblance of documents); Leskovec, Rajaraman and Ullman, Mining of Massive Datasets, ch. 3
        (bands); the signatures and the index are those of datasketch.
    """
    corpus = listed(tapes)
    check_real("threshold", threshold, low=0.0, high=1.0, open_low=True)
    check_int("n", n, low=1)
    check_int("permutations", permutations, low=2)
    check_choice("part", part, PARTS)
    check_int("seed", seed, low=0, high=2**32 - 1)
    bands, rows = band_shape(threshold, permutations)
    sketches = _datasketch()
    texts = [padded(tape.tokens[counted(tape, part)], n) for tape in corpus]
    grams = [np.unique(ids) for ids in gram_ids(texts, n)]
    index = sketches.MinHashLSH(num_perm=permutations, params=(bands, rows))
    signatures: dict[int, Any] = {}
    blank = sketches.MinHash(num_perm=permutations, seed=seed, hashfunc=int, scheme=SCHEME)
    drops: dict[int, Drop] = {}
    pairs: list[tuple[int, int, float, float]] = []
    with progress(len(corpus), desc="near dedup", unit="doc") as bar:
        for i, tape in enumerate(corpus):
            if len(texts[i]):
                signature = _signature(blank, texts[i], n)
                near = [
                    (k, i, signature.jaccard(signatures[k]), jaccard(grams[k], grams[i]))
                    for k in sorted(index.query(signature))
                ]
                pairs += near
                most = max(near, key=lambda found: (found[3], -found[0]), default=None)
                if most is not None and most[3] >= threshold:
                    drops[i] = _drop(tape, corpus[most[0]], most[3], n)
                else:
                    index.insert(i, signature)
                    signatures[i] = signature
            bar.update()
    parameters = {
        "threshold": threshold,
        "n": n,
        "permutations": permutations,
        "part": part,
        "seed": seed,
        "bands": bands,
        "rows": rows,
        "recall_at_threshold": recall(threshold, bands, rows),
    }
    reports = {"pairs": _pairs(corpus, pairs, drops), "clusters": _clusters(corpus, drops)}
    return cleaned(corpus, drops, step=STEP, parameters=parameters, reports=reports)


def jaccard(a: np.ndarray, b: np.ndarray) -> float:
    """Shared members of two sets over members of either.

    Args:
        a: Unique values, not empty.
        b: Likewise.

    Returns:
        From 0 to 1.
    """
    shared = len(np.intersect1d(a, b, assume_unique=True))
    return shared / (len(a) + len(b) - shared)


def recall(similarity: float, bands: int, rows: int) -> float:
    """Probability that two sets of this similarity share a band of their signatures."""
    return 1 - (1 - similarity**rows) ** bands


def band_shape(threshold: float, permutations: int) -> tuple[int, int]:
    """Bands and rows per band, the tallest with which a pair at the threshold is found with a probability of 0.999.

    Args:
        threshold: Jaccard similarity.
        permutations: Length of a signature.

    Returns:
        Bands, at least two, and rows.

    Raises:
        UserError: No shape finds such pairs so surely.
    """
    for rows in range(permutations // 2, 0, -1):
        if recall(threshold, permutations // rows, rows) >= RECALL:
            return permutations // rows, rows
    raise UserError(
        f"threshold={threshold!r} is too low for permutations={permutations!r}: such a pair would be missed with a "
        f"probability above {1 - RECALL:.3f}; raise the threshold or the permutations"
    )


def _datasketch() -> Any:
    try:
        import datasketch
    except ModuleNotFoundError as error:
        if error.name != "datasketch":
            raise
        raise CapabilityError(
            "near duplicates are found by datasketch, which is not installed: pip install 'specdec-workbench[clean]', "
            "or leave this step out"
        ) from None
    return datasketch


def _signature(blank: datasketch.MinHash, text: np.ndarray, n: int) -> datasketch.MinHash:
    signature = blank.copy()
    hashes = np.unique(gram_hashes(text, n) & _LOW)
    for at in range(0, len(hashes), BLOCK):
        signature.update_batch(hashes[at : at + BLOCK].tolist())
    return signature


def _drop(tape: Tape, kept: Tape, similarity: float, n: int) -> Drop:
    reason = f"{similarity:.3f} of the {n}-grams of this document and {kept.doc_id!r} are common to both"
    return Drop(tape, STEP, reason, kept.doc_id, similarity)


def _pairs(corpus: Corpus, pairs: Sequence[tuple[int, int, float, float]], drops: dict[int, Drop]) -> pl.DataFrame:
    import polars as pl

    rows = [
        (corpus[k].doc_id, corpus[i].doc_id, estimate, exact, i in drops and drops[i].of == corpus[k].doc_id)
        for k, i, estimate, exact in pairs
    ]
    schema = {
        "kept": pl.String(),
        "doc_id": pl.String(),
        "estimate": pl.Float64(),
        "jaccard": pl.Float64(),
        "dropped": pl.Boolean(),
    }
    return pl.DataFrame(rows, schema=schema, orient="row")


def _clusters(corpus: Corpus, drops: dict[int, Drop]) -> pl.DataFrame:
    """One row per kept document that others were dropped for, in the order of the corpus."""
    import polars as pl

    found: dict[str, list[Drop]] = {}
    for i in sorted(drops):
        found.setdefault(str(drops[i].of), []).append(drops[i])
    rows = [
        (t.doc_id, 1 + len(d), min(float(x.similarity or 0.0) for x in d), [x.tape.doc_id for x in d])
        for t in corpus
        if (d := found.get(t.doc_id))
    ]
    schema = {
        "doc_id": pl.String(),
        "size": pl.Int64(),
        "least_jaccard": pl.Float64(),
        "members": pl.List(pl.String()),
    }
    return pl.DataFrame(rows, schema=schema, orient="row")
