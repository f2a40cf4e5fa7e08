"""The pieces of a shape's benchmark: each takes a setting, measures what it needs and yields rows."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median
from typing import Any

from workbench.bench.shape.setting import Run, Setting
from workbench.bench.shape.timing import figure, ratio
from workbench.core.metrics import acceptance
from workbench.model.traffic import draft_bytes, expected_emitted, forward_bytes, forward_products

Rows = Iterator[dict[str, Any]]
TARGET_PHASES = {"decode": "decode", "verify": "verify, all rows kept", "verify cut": "verify, one row kept"}


def copy_rows(setting: Setting) -> Rows:
    """Bandwidth of a large copy on the device: what floors are taken from."""
    yield figure("device copy, read and written", [rate / 1e12 for rate in setting.copy_rates], "TB/s", mode="op")


def product_rows(setting: Setting) -> Rows:
    """Rate of one large product: what forwards in chunks are held against."""
    rates = [rate / 1e12 for rate in setting.product_rates]
    yield figure(f"product of {setting.product_size}³", rates, "TFLOP/s", mode="op")


def plain_rows(setting: Setting) -> Rows:
    """Plain greedy decode of one sequence, by every arm of the device."""
    moved = step_bytes(setting, "decode")
    for arm in setting.arms:
        with setting.optional(f"plain decode, {arm}"):
            run = setting.plain(arm)
            yield figure(
                f"plain decode, {arm}",
                [setting.burst / t for t in run.seconds],
                "tok/s",
                arm=arm,
                mode=setting.mode,
                tokens=setting.burst,
                **against(setting, moved, median(run.seconds) / setting.burst),
            )


def verify_rows(setting: Setting) -> Rows:
    """A decode step and a verify of K + 1 rows as the device runs them, and their ratio."""
    for kind, graph in kinds(setting):
        for name in TARGET_PHASES:
            with setting.optional(f"{name}, {kind}"):
                yield phase_row(setting, name, kind, graph)
                if name != "decode":
                    yield over_decode(setting, name, kind, graph)


def draft_rows(setting: Setting) -> Rows:
    """A step of the MTP head with its pick, whole and trimmed head, against a decode step."""
    for kind, graph in kinds(setting):
        for name in ("draft",) if setting.trim is None else ("draft", "draft trimmed"):
            with setting.optional(f"{name}, {kind}"):
                yield phase_row(setting, name, kind, graph)
                yield over_decode(setting, name, kind, graph)


def speculative_rows(setting: Setting) -> Rows:
    """Speculative decode at the given acceptance over plain decode of the same text, arm by arm."""
    for arm in setting.arms:
        for trimmed in (False,) if setting.trim is None else (False, True):
            head = "trimmed head" if trimmed else "whole head"
            with setting.optional(f"speculative decode, {arm}, {head}"):
                run = setting.speculative(arm, trimmed=trimmed)
                yield from _compared(setting, arm, trimmed, setting.plain(arm), run)


def _compared(setting: Setting, arm: str, trimmed: bool, plain: Run, run: Run) -> Rows:
    facts: dict[str, Any] = {"arm": arm, "mode": setting.mode, "k": setting.k, "tokens": setting.burst}
    facts |= {"trim": setting.trim if trimmed else None, "same_text": run.text == plain.text}
    found = acceptance(run.whole)
    facts |= {"given": list(setting.acceptance), "given_cond": list(setting.cond), "joint": list(found.joint)}
    facts |= {"cond": list(found.cond), "tested": list(found.pos_tested), "tau": found.tau, "rounds": found.rounds}
    name = f"speculative decode, {arm}, {'trimmed' if trimmed else 'whole'} head"
    yield figure(name, [setting.burst / t for t in run.seconds], "tok/s", **facts)
    yield figure(
        f"{name} / plain decode, {arm}",
        [a / b for a, b in zip(plain.seconds, run.seconds, strict=True)],
        "ratio",
        **facts,
        emitted=expected_emitted(setting.acceptance),
        by_bytes=speedup_by_bytes(setting, trimmed=trimmed),
        by_phases=speedup_by_phases(setting, trimmed=trimmed),
    )


def chunk_rows(setting: Setting) -> Rows:
    """Forwards of many tokens from an empty cache, in tokens and in counted operations per second."""
    for length in setting.lengths:
        with setting.optional(f"forward of {length:,} tokens"):
            seconds, work = setting.chunk(length), forward_products(setting.model.config, rows=length)
            rate = work / median(seconds)
            yield figure(
                f"forward of {length:,} tokens",
                [length / t for t in seconds],
                "tok/s",
                mode=setting.mode,
                tokens=length,
                tflop_s=rate / 1e12,
                of_product=rate / median(setting.product_rates),
            )


def kinds(setting: Setting) -> list[tuple[str, bool]]:
    """How phases are run on this device: called one by one, and on a GPU as a replayed graph too."""
    return [("eager", False), ("graph", True)] if setting.on_gpu else [("eager", False)]


def step_bytes(setting: Setting, phase: str) -> int:
    """Least bytes of a phase of a round at the prompt's end."""
    config, itemsize = setting.model.config, setting.model.dtype.itemsize
    if phase in TARGET_PHASES:
        rows = 1 if phase == "decode" else 1 + setting.k
        return forward_bytes(config, rows=rows, context=setting.context, itemsize=itemsize)
    vocab = setting.trim if phase == "draft trimmed" else None
    return draft_bytes(config, context=setting.context, itemsize=itemsize, vocab=vocab)


def against(setting: Setting, moved: int, seconds: float) -> dict[str, Any]:
    """Bytes of a step, the time that a copy of as many takes, and the share of the step's time which that is."""
    floor = moved / median(setting.copy_rates)
    return {"bytes": moved, "floor_ms": 1e3 * floor, "of_floor": floor / seconds}


def phase_row(setting: Setting, name: str, kind: str, graph: bool) -> dict[str, Any]:
    """Milliseconds of a phase, with its floor."""
    seconds = setting.phase(name, graph=graph)
    rows = 1 + setting.k if name.startswith("verify") else 1
    facts = {"phase": name, "kind": kind, "mode": setting.mode, "rows": rows}
    label = f"{TARGET_PHASES.get(name, name)}, {kind}"
    floor = against(setting, step_bytes(setting, name), median(seconds))
    return figure(label, [1e3 * t for t in seconds], "ms", **facts, **floor)


def over_decode(setting: Setting, name: str, kind: str, graph: bool) -> dict[str, Any]:
    """Time of a phase in decode steps of the same kind, with what bytes alone would give."""
    pairs = zip(setting.phase(name, graph=graph), setting.phase("decode", graph=graph), strict=True)
    ideal = step_bytes(setting, name) / step_bytes(setting, "decode")
    label = f"{TARGET_PHASES.get(name, name)} / decode, {kind}"
    return figure(label, [a / b for a, b in pairs], "ratio", phase=name, kind=kind, mode=setting.mode, by_bytes=ideal)


def speedup_by_bytes(setting: Setting, *, trimmed: bool) -> float:
    """Speculative over plain at the given acceptance if every step took the time of its least bytes."""
    decode = step_bytes(setting, "decode")
    draft = step_bytes(setting, "draft trimmed" if trimmed else "draft")
    cost = (step_bytes(setting, "verify") + setting.k * draft) / decode
    return expected_emitted(setting.acceptance) / cost


def speedup_by_phases(setting: Setting, *, trimmed: bool) -> dict[str, float]:
    """Speculative over plain at the given acceptance if a round took its measured phases and nothing besides.

    A verify counts as one whose rows are all kept. Kinds that this device or version cannot run are left out.
    """
    found = {}
    for kind, graph in kinds(setting):
        with setting.optional(f"the speed-up that {kind} phases allow"):
            decode, verify = (setting.phase(name, graph=graph) for name in ("decode", "verify"))
            draft = setting.phase("draft trimmed" if trimmed else "draft", graph=graph)
            cost = ratio(verify, decode) + setting.k * ratio(draft, decode)
            found[kind] = expected_emitted(setting.acceptance) / cost
    return found
