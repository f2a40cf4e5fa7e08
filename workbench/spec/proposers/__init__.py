"""Proposers: what chains draft tokens. A wrong one may only cost acceptance, never change output."""

from workbench.spec.proposers.base import DraftContext, Proposal, Proposer
from workbench.spec.proposers.mtp import MTPProposer
from workbench.spec.proposers.scripted import GivenProposer, ScriptedProposer
from workbench.spec.proposers.synthetic import SyntheticProposer, conditional, synthetic_drafts

__all__ = [
    "DraftContext",
    "GivenProposer",
    "MTPProposer",
    "Proposal",
    "Proposer",
    "ScriptedProposer",
    "SyntheticProposer",
    "conditional",
    "synthetic_drafts",
]
