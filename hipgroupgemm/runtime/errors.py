"""The exceptions of the device runtimes; all of them are RuntimeErrors, and all can be pickled."""

from __future__ import annotations


class RuntimeUnavailable(RuntimeError):
    """No usable runtime of a ``kind`` on this machine: what was ``looked_for``, and what to ``install`` to get it."""

    def __init__(self, kind: str, looked_for: str, install: str) -> None:
        super().__init__(kind, looked_for, install)
        self.kind, self.looked_for, self.install = kind, looked_for, install

    def __str__(self) -> str:
        return f"no usable {self.kind} runtime: {self.looked_for}. {self.install}"


class ForkedProcessError(RuntimeError):
    """The driver was initialised before this process was forked; it can't be used here."""

    def __init__(self, kind: str) -> None:
        super().__init__(kind)
        self.kind = kind

    def __str__(self) -> str:
        name = {"cuda": "CUDA", "rocm": "HIP"}.get(self.kind, self.kind)
        return (
            f"{name} was initialised in the parent before this process was forked, and a {name} driver does not survive a fork: start"
            " workers with the 'spawn' or 'forkserver' method, or fork before the first use of the GPU"
        )


class DeviceError(RuntimeError):
    """A ``call`` of a driver or compiler, as the vendor spells it, failed with a ``status`` of this ``name``; ``note``: what to do."""

    def __init__(self, call: str, status: int, name: str, note: str = "") -> None:
        super().__init__(call, status, name, note)
        self.call, self.status, self.name, self.note = call, status, name, note

    def __str__(self) -> str:
        return f"{self.call} failed with status {self.status} ({self.name})" + (f": {self.note}" if self.note else "")


class DeviceMemoryError(DeviceError, MemoryError):
    """The device has no memory left for an allocation. Also a MemoryError."""


class CompileError(DeviceError):
    """NVRTC, hipRTC or Triton refused a source; ``log`` is the compiler's own text."""

    def __init__(self, call: str, status: int, name: str, summary: str = "", log: str = "") -> None:
        super().__init__(call, status, name, summary + ("\n" + log if log else ""))
        self.summary, self.log = summary, log
        self.args = (call, status, name, summary, log)  # what it is unpickled from
