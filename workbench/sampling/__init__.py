"""The one place where logits become probabilities and picks."""
