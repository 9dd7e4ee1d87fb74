"""Grouped GEMM (ragged dot) for mixture-of-experts layers."""

__version__ = "0.1.0"
