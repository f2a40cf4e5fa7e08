"""The draw in place of a rejected draft."""
