"""CUDA, on the driver API through ``cuda.bindings``."""
