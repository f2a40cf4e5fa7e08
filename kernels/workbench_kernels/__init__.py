"""Triton kernels for hybrid recurrent targets, each beside the plain PyTorch function that specifies it.

One folder per op: ``__init__`` holds the signature, the docstring and the dispatch; ``ref.py`` is the specification;
``kernel.py`` is the Triton code. The package knows nothing of ``workbench``: it imports only torch and triton, and
importing it imports neither.
"""
