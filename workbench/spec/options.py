"""Options of a generation, checked once, shared by the Python API and the CLI."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace

from workbench.cache.formats import FORMATS
from workbench.cache.hybrid import STRATEGIES
from workbench.core.errors import UserError, check_choice, check_flag, check_int
from workbench.model.hybrid import CARRIERS
from workbench.sampling.options import ORDERS, Shaping, shaping_of
from workbench.sampling.philox import Noise
from workbench.spec.choose import ACCEPT_RULES, Chooser
from workbench.spec.policies import AdaptiveFloor, FixedK, Policy
from workbench.spec.policies.arrays import STATISTICS

# what a round on the device cannot honour
HOST_ONLY = (
    "adaptive", "carry", "refresh", "shift", "k_format", "v_format", "window", "rowwise", "stop", "logprobs", "anatomy",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class GenerateOptions:
    """How to decode.

    Args:
        max_new_tokens: Tokens to generate, unless a stop token comes first.
        k: Draft length per round; 0 is plain decode.
        p_min: Drop a drafted token below this probability and end its chain; 0 never drops.
        pmin0: Apply p_min to the first draft of a round too.
        adaptive: Draft one more than was last accepted, up to k, instead of k every round.
        floor: Smallest adaptive draft length; None goes by the model's width.
        cap: Largest adaptive draft length.
        floor_context: Committed length past which a default floor of 4 or more becomes 1.
        carry: Feed the pending token as row 0 of the verify; False feeds it alone first.
        carrier: Hidden rows the MTP head is fed: "normed" or "pre_norm".
        refresh: Rewrite drafter rows of committed tokens from true rows.
        primed: Fill the drafter's cache over the prompt.
        shift: Pair tokens with carriers this many positions too early; a control, 0 is right.
        strategy: How a partly accepted verify is cut: "tape", "columns", "snapshot"; None takes "columns" on a CPU,
            where keeping the state of every row is free, and "tape" elsewhere.
        k_format: How keys are kept: "dense" (the model's type), "q8_0", "q5_1" or "fp8". Target and drafter alike keep
            a row once and attend to what was kept, so drafting still never changes the text of that format.
        v_format: How values are kept, likewise.
        window: The target's attention sees this many rows, its own included, and drops older ones; None for all. The
            drafter keeps every row.
        rowwise: Verify one row at a time, as an oracle.
        temperature: 0 picks the most likely token; above, tokens are drawn from the softmax at this temperature.
        top_k: Keep the k most likely tokens, ties at the boundary included; 0 keeps all.
        top_p: Keep the most likely tokens that hold this share of the mass; 1 keeps all.
        min_p: Keep tokens at least this likely, relative to the most likely; 0 keeps all.
        filter_order: In which order the filters act: "chain" (temperature, top-k, top-p on the rest, min-p), "joint"
            (their intersection, each on the whole law) or "temperature_last" (filters at T = 1, temperature after).
        repetition_penalty: Divides positive and multiplies negative logits of tokens in the text; 1 is none.
        frequency_penalty: Taken off a token's logit per occurrence in the text; 0 is none.
        presence_penalty: Taken off the logit of every token in the text; 0 is none.
        penalty_last_n: Tokens at the end of the text that penalties see; None for all, the prompt included.
        logit_bias: Added to the logits of token ids; -inf forbids one.
        seed: Of every draw; the same seed gives the same text.
        sequence: Number of the random stream under that seed, for texts that must differ.
        accept: How sampled drafts are judged: "coupled" (target and drafter share their noise; the text is plain
            sampling's, token for token) or "ratio" (rejection sampling; the text follows the same law).
        p_min_reads: What p_min tests: "drawn", the probability of the drafted token, or "top", the largest of its row;
            "ratio" needs the latter, since a policy must not read the draw it decides about.
        stop: Strings that end the text; it is cut before them.
        stop_token_ids: Tokens that end the text, besides the model's own.
        logprobs: Note the target's log-probability of every token.
        ignore_eos: Go on after an end-of-text token.
        chunk: Prompt tokens per prefill forward.
        anatomy: Time the parts of every draft step.
        graphs: Run rounds on the GPU as CUDA graphs, with the verdict, lengths and text kept there.
        stream_rounds: Rounds that the GPU runs, with ``graphs`` or without, before the host reads what they did.
    """

    max_new_tokens: int = 128
    k: int = 3
    p_min: float = 0.0
    pmin0: bool = False
    adaptive: bool = False
    floor: int | None = None
    cap: int = 7
    floor_context: int = 1024
    carry: bool = True
    carrier: str = "normed"
    refresh: bool = True
    primed: bool = True
    shift: int = 0
    strategy: str | None = None
    k_format: str = "dense"
    v_format: str = "dense"
    window: int | None = None
    rowwise: bool = False
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    filter_order: str = "chain"
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    penalty_last_n: int | None = None
    logit_bias: Mapping[int, float] | tuple[tuple[int, float], ...] = ()
    seed: int = 0
    sequence: int = 0
    accept: str = "coupled"
    p_min_reads: str = "drawn"
    stop: str | tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    logprobs: bool = False
    ignore_eos: bool = False
    chunk: int = 512
    anatomy: bool = False
    graphs: bool = False
    stream_rounds: int = 1

    def __post_init__(self) -> None:
        check_int("max_new_tokens", self.max_new_tokens, low=1)
        check_int("k", self.k, low=0, high=64, hint="k=0 is plain decode")
        check_int("chunk", self.chunk, low=1)
        check_int("shift", self.shift, low=0, high=4)
        check_int("stream_rounds", self.stream_rounds, low=1, high=4096)
        self._check_device_rounds()
        check_choice("carrier", self.carrier, CARRIERS)
        if self.strategy is not None:
            check_choice("strategy", self.strategy, STRATEGIES)
        check_choice("k_format", self.k_format, FORMATS)
        check_choice("v_format", self.v_format, FORMATS)
        if self.window is not None:
            check_int("window", self.window, low=1)
        if self.adaptive and self.k == 0:
            raise UserError("adaptive=True with k=0 is not valid: give k of at least 1, the longest draft")
        if self.floor is not None and not self.adaptive:
            raise UserError(f"floor={self.floor!r} needs adaptive=True: a fixed k has no floor")
        for name in (
            "pmin0",
            "adaptive",
            "carry",
            "refresh",
            "primed",
            "rowwise",
            "ignore_eos",
            "anatomy",
            "logprobs",
            "graphs",
        ):
            check_flag(name, getattr(self, name))
        check_choice("accept", self.accept, ACCEPT_RULES)
        check_choice("filter_order", self.filter_order, ORDERS)
        check_choice("p_min_reads", self.p_min_reads, STATISTICS)
        check_int("seed", self.seed, low=0)
        check_int("sequence", self.sequence, low=0)
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)
        if bad := [s for s in stop if not isinstance(s, str) or not s]:
            raise UserError(f"stop holds {bad[0]!r}: stop strings are texts of at least one character")
        object.__setattr__(self, "stop", stop)
        ids = tuple(self.stop_token_ids)
        if bad_ids := [i for i in ids if not isinstance(i, int) or isinstance(i, bool) or i < 0]:
            raise UserError(f"stop_token_ids holds {bad_ids[0]!r}: token ids are integers of at least 0")
        object.__setattr__(self, "stop_token_ids", ids)
        shaping = self.shaping()
        object.__setattr__(self, "logit_bias", shaping.logit_bias)
        policy = self.policy()
        if self.accept == "ratio" and self.temperature > 0:
            refuse_anticipating(policy)

    def shaping(self) -> Shaping:
        """How logits become a law."""
        return shaping_of(self)

    def chooser(self) -> Chooser:
        """How rows become tokens."""
        return Chooser(self.shaping(), Noise(self.seed, self.sequence), self.accept)

    @property
    def on_device(self) -> bool:
        """Rounds run on the device, and the host reads them afterwards."""
        return self.graphs or self.stream_rounds > 1

    def _check_device_rounds(self) -> None:
        if not self.on_device:
            return
        asked = "graphs=True" if self.graphs else f"stream_rounds={self.stream_rounds}"
        plain = {f.name: f.default for f in fields(self)}
        for name in HOST_ONLY:
            if getattr(self, name) != plain[name]:
                raise UserError(
                    f"{name}={getattr(self, name)!r} needs the host in every round, and {asked} keeps rounds on the "
                    f"device: leave one of them out"
                )
        if self.accept == "ratio" and self.temperature > 0:
            raise UserError(f"accept='ratio' draws on the host, and {asked} keeps rounds on the device: use 'coupled'")

    def policy(self) -> Policy:
        """The policy these options describe."""
        if self.adaptive:
            return AdaptiveFloor(
                k=self.k,
                floor=self.floor,
                cap=self.cap,
                floor_context=self.floor_context,
                p_min=self.p_min,
                pmin0=self.pmin0,
                statistic=self.p_min_reads,
            )
        return FixedK(k=self.k, p_min=self.p_min, pmin0=self.pmin0, statistic=self.p_min_reads)


def named_options(options: GenerateOptions | None, given: Mapping[str, object]) -> GenerateOptions:
    """Options, some of them replaced by name.

    Raises:
        UserError: A name is unknown, or a value is not valid.
    """
    valid = GenerateOptions.__dataclass_fields__
    if unknown := sorted(set(given) - set(valid)):
        raise UserError(f"unknown option {', '.join(map(repr, unknown))}: valid options are {', '.join(valid)}")
    return replace(options, **given) if options is not None else GenerateOptions(**given)  # type: ignore[arg-type]


def refuse_anticipating(policy: Policy) -> None:
    """Refuse a policy that reads the draws it decides about, under the ratio rule.

    Raises:
        UserError: The policy says that it does.
    """
    if policy.anticipating:
        raise UserError(
            f"accept='ratio' with this {type(policy).__name__} policy would bend the target's law, since it reads a "
            "token already drawn to decide whether it is drafted: use accept='coupled', p_min_reads='top' (of a policy "
            "that decides slot by slot, statistic='top'), or p_min=0"
        )
