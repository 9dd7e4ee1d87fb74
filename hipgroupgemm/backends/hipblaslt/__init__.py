"""The hipBLASLt backend (ROCm): `hipblaslt_ext::GroupedGemm`, run from records that a kernel of ours writes on the device."""

from hipgroupgemm.backends.hipblaslt.backend import HipblasltBackend

__all__ = ["HipblasltBackend"]
