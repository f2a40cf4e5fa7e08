"""Training losses of the target and of its MTP head, unrolled as the head is used when drafting.

Legend: B sequences, S tokens, H hidden, P start slots, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, embedding, log_softmax

from workbench.model.attention import attend_causal, attend_chain
from workbench.model.hybrid import Block, HybridModel
from workbench.model.mtp import MTPHead
from workbench.model.ops import Numerics
from workbench.model.rotary import Rotary

FAST = Numerics(exact=False)


def soft_cross_entropy(logits: Tensor, target_logits: Tensor, hard: float = 0.0) -> Tensor:
    """Mean cross entropy of a drafter's rows against the target's own distribution, which gets no gradient.

    Args:
        logits: The drafter's rows [..., V].
        target_logits: The target's rows, same shape.
        hard: Share of the target that is its pick alone rather than its distribution; default 0.

    Returns:
        A scalar, nats.
    """
    logp, target = log_softmax(logits.float(), -1), target_logits.detach().float()
    soft = -(target.softmax(-1) * logp).sum(-1).mean()
    if not hard:
        return soft
    pick = -logp.gather(-1, target.argmax(-1, keepdim=True)).mean()
    return (1 - hard) * soft + hard * pick


def first_step(
    mtp: MTPHead, emb_BSH: Tensor, carrier_BSH: Tensor, rotary: Rotary, cos: Tensor, sin: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """All pairs through the head causally: next carriers, and the keys and values of the true rows."""
    x, h = mtp.enter(emb_BSH, carrier_BSH, FAST)
    q, k, v, gate = mtp.attention.project(h, rotary, cos, sin, FAST)
    mixed = mtp.attention.finish(attend_causal(q, k, v), gate, FAST)
    return mtp.after(x, mixed, FAST), k, v


def later_step(
    mtp: MTPHead,
    emb_BPH: Tensor,
    carrier_BPH: Tensor,
    true_rows: tuple[Tensor, Tensor],
    seen_PS: Tensor,
    private: list[tuple[Tensor, Tensor]],
    rotary: Rotary,
    cos: Tensor,
    sin: Tensor,
) -> Tensor:
    """One more chain step for every start: its own rows so far plus the true rows up to its start."""
    x, h = mtp.enter(emb_BPH, carrier_BPH, FAST)
    q, k, v, gate = mtp.attention.project(h, rotary, cos, sin, FAST)
    private.append((k, v))
    mixed = mtp.attention.finish(attend_chain(q, *true_rows, seen_PS, private), gate, FAST)
    return mtp.after(x, mixed, FAST)


@dataclass(frozen=True)
class Steps:
    """The functions a training step calls per layer; replaceable by compiled forms.

    Args:
        block: One trunk layer.
        first: The MTP head over all pairs.
        later: One more chain step from every start.
    """

    block: Callable[..., Tensor] = Block.forward_train
    first: Callable[..., tuple[Tensor, Tensor, Tensor]] = first_step
    later: Callable[..., Tensor] = later_step


def unrolled(
    model: HybridModel,
    tokens_BS: Tensor,
    normed_BSH: Tensor,
    *,
    steps: int,
    stride: int = 1,
    calls: Steps | None = None,
) -> list[tuple[Tensor, Tensor]]:
    """Chain the MTP head from many starts with true tokens in and its own carriers recycled.

    Args:
        model: The target with its head.
        tokens_BS: Token ids.
        normed_BSH: The target's final-normed rows.
        steps: Chain length.
        stride: Every how many slots a chain of two or more steps starts.
        calls: Compiled forms of the steps; None for the plain ones.

    Returns:
        Per step j, (carriers [B, P, H], token positions [P] whose target row the carrier is to match).
    """
    mtp, calls = model.mtp, calls or Steps()
    assert mtp is not None
    s = tokens_BS.shape[1]
    device = tokens_BS.device
    emb = embedding(tokens_BS, model.embed)
    cos, sin = model.rotary.table(s, device)
    hidden, k, v = calls.first(mtp, emb[:, 1:], normed_BSH[:, :-1], model.rotary, cos[: s - 1], sin[: s - 1])
    out = [(hidden, torch.arange(1, s, device=device))]
    slots = torch.arange(0, s - steps, stride, device=device)
    seen = torch.arange(s - 1, device=device) <= slots[:, None]
    carrier = hidden[:, slots]
    private: list[tuple[Tensor, Tensor]] = []
    for j in range(1, steps):
        at = slots + j
        carrier = calls.later(mtp, emb[:, at + 1], carrier, (k, v), seen, private, model.rotary, cos[at], sin[at])
        out.append((carrier, at + 1))
    return out


def next_token_loss(logits_BSV: Tensor, tokens_BS: Tensor) -> Tensor:
    """Mean cross entropy of every row but the last against the token after it, nats."""
    return cross_entropy(logits_BSV[:, :-1].reshape(-1, logits_BSV.shape[-1]), tokens_BS[:, 1:].reshape(-1))


def joint_loss(
    model: HybridModel,
    tokens_BS: Tensor,
    *,
    steps: int,
    stride: int,
    hard: float = 0.0,
    calls: Steps | None = None,
) -> tuple[Tensor, Tensor]:
    """Next-token loss of the target and mean soft loss of its MTP head over the unrolled steps.

    Args:
        model: The target with its head, in training.
        tokens_BS: Token ids.
        steps: Unrolled MTP steps.
        stride: Every how many slots a longer chain starts.
        hard: Share of the MTP target that is the target's pick alone; see ``soft_cross_entropy``.
        calls: Compiled forms of the steps; None for the plain ones.

    Returns:
        (language-model loss, MTP loss), both in nats per token.
    """
    calls = calls or Steps()
    normed = model.forward_train(tokens_BS, block=calls.block)
    logits = model.unembed(normed)
    lm = next_token_loss(logits, tokens_BS)
    parts = []
    for carrier, rows in unrolled(model, tokens_BS, normed, steps=steps, stride=stride, calls=calls):
        parts.append(soft_cross_entropy(model.unembed(carrier), logits[:, rows], hard))
    return lm, torch.stack(parts).mean()


@torch.no_grad()
def agreement(model: HybridModel, tokens_BS: Tensor, *, steps: int) -> tuple[Tensor, Tensor]:
    """Held-out loss and share of chain steps whose pick is the target's, with true tokens in, by the head that drafts.

    Args:
        model: The target with its head.
        tokens_BS: Token ids.
        steps: Chain length.

    Returns:
        (mean next-token loss in nats, agreement per step [steps]).
    """
    normed = model.forward_train(tokens_BS)
    logits = model.unembed(normed)
    lm = next_token_loss(logits, tokens_BS)
    picks = logits.argmax(-1)
    hits = [
        (model.unembed_draft(carrier).argmax(-1) == picks[:, rows]).float().mean()
        for carrier, rows in unrolled(model, tokens_BS, normed, steps=steps)
    ]
    return lm, torch.stack(hits)
