"""A gate between drafting and plain decode, by measured throughput.

Source: the serial/speculative gate of the engine of seed 001 (windows of 16 rounds, exponential means and deviations,
two confirming windows, probes after 256 and 1,024 tokens).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from workbench.core.errors import check_int, check_real
from workbench.spec.policies.arrays import K_LIMIT, Threshold


@dataclass(frozen=True, kw_only=True)
class Gate(Threshold):
    """Draft k tokens or none, whichever has been faster; it begins with drafts.

    Rounds are measured in windows: tokens committed per second. Each mode has an exponential mean of its windows and
    of their deviation from it. The other mode takes over after ``confirm`` windows in a row with its mean above the
    present one by more than max(margin x present, deviations x sum of both deviations). A probe is one window in the
    other mode, whose value replaces that mode's mean and halves its deviation. When the committed length has doubled,
    both means are stale and a probe is due at once; a stale mean neither wins nor loses.

    It reads time: live that of the session's clock, in a walk that of its cost model.

    Args:
        k: Draft length.
        window: Rounds of a window.
        alpha: Weight of the newest window, in (0, 1].
        margin: See above.
        deviations: See above.
        confirm: See above.
        reprobe_tokens: Tokens without drafts after which drafting is probed.
        refresh_tokens: Tokens with drafts after which plain decode is probed.
        context_floor: Committed lengths below this count as this where doubling is judged.
    """

    k: int = 3
    window: int = 16
    alpha: float = 0.3
    margin: float = 0.05
    deviations: float = 0.5
    confirm: int = 2
    reprobe_tokens: int = 256
    refresh_tokens: int = 1024
    context_floor: int = 512
    family: ClassVar[str] = "gate"
    word: ClassVar[str] = "gate"
    timed: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check_int("k", self.k, low=1, high=K_LIMIT)
        check_real("alpha", self.alpha, low=0.0, high=1.0, open_low=True)
        check_real("margin", self.margin, low=0.0)
        check_real("deviations", self.deviations, low=0.0)
        for name in ("window", "confirm", "reprobe_tokens", "refresh_tokens", "context_floor"):
            check_int(name, getattr(self, name), low=1)

    def own(self, width: int) -> Sequence[float]:
        """All fields from ``window`` on, in order."""
        return (
            self.window,
            self.alpha,
            self.margin,
            self.deviations,
            self.confirm,
            self.reprobe_tokens,
            self.refresh_tokens,
            self.context_floor,
        )
