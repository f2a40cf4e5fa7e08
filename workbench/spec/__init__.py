"""Speculative decoding: proposers, policies, verification, acceptance and the round. Read ``round.py`` first."""
