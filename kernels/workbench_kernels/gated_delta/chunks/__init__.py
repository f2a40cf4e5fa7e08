"""Chunks of 64 rows of the gated delta rule, and the norms and gates before them."""
