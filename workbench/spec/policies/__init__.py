"""Policies: how long the next chain may be and whether it stops early."""

from workbench.spec.policies.base import Policy, PolicyRun, RoundView
from workbench.spec.policies.standard import AdaptiveFloor, FixedK

__all__ = ["AdaptiveFloor", "FixedK", "Policy", "PolicyRun", "RoundView"]
