"""Device functions that several kernels share, and how kernels are launched."""
