"""The end of a round on the device: which drafts stand, what the text gains, and where the next round begins.

One launch does for the integers of a round what ``accept``, ``ring_commit`` and ``rollback_lengths`` do apart, and
keeps the books that a stream of rounds needs when nobody reads between them: the budget, stops, faults and a log.
Legend: B sequences, T places of a verify (pending token and K drafts), K drafts, R cells of the text, M rounds of the
log, S stop ids.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from workbench_kernels.checks import check_dense, check_dtype, check_shape
from workbench_kernels.dispatch import by_triton
from workbench_kernels.settle import ref

__all__ = ["FAULTS", "LOGGED", "Books", "settle_round"]

LENGTH, SLOTS, QUEUED, LEFT, KEEP, ALIVE, ROUND, COUNTED = range(8)  # rows of ``ints_XB``
LOGGED = ("start", "allowed", "drafted", "accepted", "emitted", "bonus", "stopped", "alive")  # before the drafts
FAULTS = ("", "draft", "verify")


class Books(NamedTuple):
    """What is known of every sequence between rounds; written in place, so that addresses stay.

    Args:
        ints_XB: int32 [8, B]: rows of the target; final slots of the drafter; pairs queued for it; tokens that may
            still be emitted; rows that the round kept; 1 while the sequence goes on; rounds logged; tokens of the text.
        slots_KB: int32 [K, B]: drafter rows held before each further draft step of the next round.
        places_BT: int64 [B, T]: position of the token that follows each row of the next verify.
        seed_B: int64: row of the queued pairs, flattened, from which the next draft is read.
        pending_B: int64: the token that the next verify feeds first.
        queue_BT: int64: tokens of the queued pairs, the pending one last.
        text_BR: int64 [B, R]: the text so far.
        log_MBX: int64 [M, B, 8 + 2 K]: of every round the facts of ``LOGGED``, its drafts, and the float32 bits of
            their probabilities.
        fault_B2: int64: index into ``FAULTS``, and a position.
    """

    ints_XB: Tensor
    slots_KB: Tensor
    places_BT: Tensor
    seed_B: Tensor
    pending_B: Tensor
    queue_BT: Tensor
    text_BR: Tensor
    log_MBX: Tensor
    fault_B2: Tensor


def settle_round(
    books: Books,
    picks_BT: Tensor,
    sound_BT: Tensor,
    fed_BT: Tensor,
    counts_B2: Tensor,
    probs_BK: Tensor,
    *,
    stops_S: Tensor | None = None,
    impl: str | None = None,
) -> Books:
    """Judge a verify by equality and write everything that follows from it.

    A round of a sequence that has ended leaves its books as they are, but for a line of the log. One whose rows or
    drafts are not finite keeps nothing, ends the sequence and says where.

    Args:
        books: Written in place.
        picks_BT: The target's own token after every fed row, int32 or int64.
        sound_BT: Float32; NaN where the row's logits are not finite.
        fed_BT: Pending token and drafts, int64.
        counts_B2: Drafts and base (1), int32, from ``assemble_verify``.
        probs_BK: Probabilities of the chain's tokens, float32; NaN where the drafter's logits are not finite.
        stops_S: Tokens that end the text, int64; default None.
        impl: "ref" or "triton"; default by context and device.

    Returns:
        The books.

    Raises:
        KernelError: A tensor is strided or of another shape or type.

    Source: seed 002 (device acceptance, rollback of lengths, ring commit, round stream).
    """
    b, t = fed_BT.shape
    check_dense("settle_round", picks=picks_BT, sound=sound_BT, fed=fed_BT, counts=counts_B2, probs=probs_BK,
                stops=stops_S, **books._asdict())  # fmt: skip
    for name, x, shape in (
        ("picks", picks_BT, (b, t)), ("sound", sound_BT, (b, t)), ("counts", counts_B2, (b, 2)),
        ("probs", probs_BK, (b, t - 1)), ("ints", books.ints_XB, (8, b)), ("slots", books.slots_KB, (None, b)),
        ("places", books.places_BT, (b, t)), ("pending", books.pending_B, (b,)),
        ("queue", books.queue_BT, (b, t)), ("text", books.text_BR, (b, None)),
        ("log", books.log_MBX, (None, b, len(LOGGED) + 2 * (t - 1))), ("fault", books.fault_B2, (b, 2)),
    ):  # fmt: skip
        check_shape("settle_round", name, x, shape)
    check_dtype("settle_round", "ints", books.ints_XB, torch.int32)
    check_dtype("settle_round", "picks", picks_BT, torch.int32, torch.int64)
    args = (books, picks_BT, sound_BT, fed_BT, counts_B2, probs_BK, stops_S)
    if not by_triton("settle_round", impl, picks_BT):
        ref.settle(*args)
    else:
        from workbench_kernels.settle import kernel

        kernel.settle(*args)
    return books
