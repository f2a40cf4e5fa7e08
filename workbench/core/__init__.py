"""Torch-free foundations: errors, checks, records, metrics, schemas, manifests, seeds and progress."""
