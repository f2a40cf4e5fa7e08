"""Checkpoint formats: names, loading and saving of safetensors directories."""
