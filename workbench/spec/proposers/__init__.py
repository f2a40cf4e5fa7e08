"""Proposers: what chains draft tokens. A wrong one may only cost acceptance, never change output."""
