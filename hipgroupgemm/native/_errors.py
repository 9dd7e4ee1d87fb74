"""What the native part raises, and which status becomes which error."""

from __future__ import annotations

from typing import NoReturn


class NativeError(RuntimeError):
    """A call into the native part failed.

    Attributes:
        call: the C function.
        status: name of its status ("HGG_CLOSED").
        library_status: hipblasStatus_t or hipError_t behind it; -1 if none.
        text: what it said.
    """

    def __init__(self, call: str, status: str, library_status: int, text: str) -> None:
        super().__init__(f"{text} [{status}]" if text.startswith(call) else f"{call}: {text} [{status}]")
        self.call, self.status, self.library_status, self.text = call, status, library_status, text

    def __reduce__(self) -> tuple[type[NativeError], tuple[str, str, int, str]]:
        return type(self), (self.call, self.status, self.library_status, self.text)


class NativeValueError(NativeError, ValueError):
    """A value that the call does not take: a size, a stride, a workspace, an unknown algorithm."""


class NativeUnsupportedError(NativeError, NotImplementedError):
    """hipBLASLt has no kernels for it, or the algorithm refuses the problem or is wrong with device records."""


class NativeUnavailableError(NativeError):
    """The native part, hipBLASLt or the HIP runtime is missing, of the wrong version, or there twice."""

    def __init__(self, text: str) -> None:
        super().__init__("hipgroupgemm.native", "unavailable", -1, text)

    def __reduce__(self) -> tuple[type[NativeError], tuple[str]]:  # type: ignore[override]
        return type(self), (self.text,)


_KINDS: dict[str, type[NativeError]] = {
    "HGG_INVALID_ARGUMENT": NativeValueError,
    "HGG_WORKSPACE": NativeValueError,
    "HGG_NOT_FOUND": NativeValueError,
    "HGG_UNSUPPORTED": NativeUnsupportedError,
    "HGG_UNVERIFIED": NativeUnsupportedError,
}


def raise_status(call: str, status: str, library_status: int, text: str) -> NoReturn:
    """Raises what a status stands for."""
    raise _KINDS.get(status, NativeError)(call, status, library_status, text)
