"""The exceptions of the device runtimes; all of them are RuntimeErrors, and all can be pickled."""

from __future__ import annotations


class RuntimeUnavailable(RuntimeError):
    """No usable CUDA or HIP runtime on this machine.

    Args:
        kind: "cuda", "rocm", or "cuda or rocm".
        looked_for: what was looked for, and what was found instead.
        install: what the user can install to get it.
    """

    def __init__(self, kind: str, looked_for: str, install: str) -> None:
        super().__init__(f"no usable {kind} runtime: {looked_for}. {install}")
        self.kind, self.looked_for, self.install = kind, looked_for, install

    def __reduce__(self) -> tuple[type, tuple[object, ...]]:
        return type(self), (self.kind, self.looked_for, self.install)


class ForkedProcessError(RuntimeError):
    """The driver was initialised before this process was forked; it can't be used here."""

    def __init__(self, kind: str) -> None:
        name = {"cuda": "CUDA", "rocm": "HIP"}.get(kind, kind)
        super().__init__(
            f"{name} was initialised in the parent before this process was forked, and a {name} driver does not survive a fork: start"
            " workers with the 'spawn' or 'forkserver' method, or fork before the first use of the GPU"
        )
        self.kind = kind

    def __reduce__(self) -> tuple[type, tuple[object, ...]]:
        return type(self), (self.kind,)


class DeviceError(RuntimeError):
    """A driver or compiler call failed.

    Args:
        call: the function, as the vendor spells it ("cuLaunchKernel").
        status: its status number.
        name: the status' name ("CUDA_ERROR_ILLEGAL_ADDRESS").
        note: what it means here, or what to do.
    """

    def __init__(self, call: str, status: int, name: str, note: str = "") -> None:
        super().__init__(f"{call} failed with status {status} ({name})" + (f": {note}" if note else ""))
        self.call, self.status, self.name, self.note = call, status, name, note

    def __reduce__(self) -> tuple[type, tuple[object, ...]]:
        return type(self), (self.call, self.status, self.name, self.note)


class DeviceMemoryError(DeviceError, MemoryError):
    """The device has no memory left for an allocation. Also a MemoryError."""


class CompileError(DeviceError):
    """NVRTC, hipRTC or Triton refused a source; ``log`` is the compiler's own text."""

    def __init__(self, call: str, status: int, name: str, summary: str = "", log: str = "") -> None:
        super().__init__(call, status, name, summary + ("\n" + log if log else ""))
        self.summary, self.log = summary, log

    def __reduce__(self) -> tuple[type, tuple[object, ...]]:
        return type(self), (self.call, self.status, self.name, self.summary, self.log)
