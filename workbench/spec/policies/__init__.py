"""Policies: how long the next chain may be, whether it stops early, and how much of it stays."""

from workbench.spec.policies.adaptive import Ema, Goodput, Suspend
from workbench.spec.policies.arrays import ArrayPolicy, ArrayRun
from workbench.spec.policies.base import Policy, PolicyRun, RoundView, trimmed
from workbench.spec.policies.confidence import Cumulative, MinConfidence
from workbench.spec.policies.gate import Gate
from workbench.spec.policies.oracle import Oracle, Scripted
from workbench.spec.policies.registry import policy_from
from workbench.spec.policies.standard import AdaptiveFloor, FixedK, Ladder, parse_ladder

__all__ = [
    "AdaptiveFloor",
    "ArrayPolicy",
    "ArrayRun",
    "Cumulative",
    "Ema",
    "FixedK",
    "Gate",
    "Goodput",
    "Ladder",
    "MinConfidence",
    "Oracle",
    "Policy",
    "PolicyRun",
    "RoundView",
    "Scripted",
    "Suspend",
    "parse_ladder",
    "policy_from",
    "trimmed",
]
