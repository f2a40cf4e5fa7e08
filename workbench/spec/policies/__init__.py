"""Policies: how long the next chain may be and whether it stops early."""
