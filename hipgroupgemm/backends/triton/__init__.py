"""The Triton backend: CUDA and ROCm, every mode, Triton as the compiler only."""

from hipgroupgemm.backends.triton.backend import TritonBackend

__all__ = ["TritonBackend"]
