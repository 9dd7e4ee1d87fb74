"""A vendor's driver through its Python bindings: calls by name, and their errors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from hipgroupgemm.runtime.errors import DeviceError, DeviceMemoryError, ForkedProcessError

__all__ = ["NOTES", "Driver"]

_OUT_OF_MEMORY = 2
# both vendors number these alike
NOTES = {
    98: "the code object holds no such kernel for this device",
    201: "no context is current in this thread: wrap the call in runtime.use_device(i)",
    209: "the code object holds no code for this device: compile for its architecture",
    400: "a handle (stream, event, function) is not valid, was destroyed, or belongs to another device",
    700: "a kernel accessed memory out of bounds; the device is lost to this process, restart it",
    716: "a kernel used a misaligned address; the device is lost to this process, restart it",
    719: "a kernel failed; the device is lost to this process, restart it",
    900: "not allowed while a stream is being captured: do it before the capture",
    901: "an earlier call invalidated the capture: end it, and prepare everything before the next one",
    906: "the default stream can't be used while another stream of the device is being captured: pass the stream that is captured, or end"
    " the capture first",
}


class Driver:
    """Calls of one driver, each named without the vendor's prefix: "StreamSynchronize" is cuStreamSynchronize or hipStreamSynchronize."""

    kind: str  # "cuda" or "rocm"
    version: int  # the driver's or HIP runtime's, as the vendor encodes it
    library: str  # path of the driver library, where it is known

    _prefix: ClassVar[str] = ""
    _renamed: ClassVar[Mapping[str, str]] = {}  # the vendor's names of calls that are not the prefix and our name
    _bindings: Any
    _statuses: Any  # the vendor's enumeration

    def __init__(self) -> None:
        self._functions: dict[str, Callable[..., Any]] = {}
        self._forked = False

    def _call(self, call: str, *arguments: Any) -> Any:
        """Make a call; what the bindings return, the status first."""
        if self._forked:
            raise ForkedProcessError(self.kind)
        function = self._functions.get(call)
        if function is None:
            function = self._functions[call] = getattr(self._bindings, self._name(call))
        return function(*arguments)

    def _check(self, call: str, *arguments: Any) -> Any:
        """Make a call; the value, or the tuple of values, or None."""
        result = self._call(call, *arguments)
        if result[0]:
            raise self._fail(self._name(call), int(result[0]))
        if len(result) == 2:
            return result[1]
        return result[1:] if len(result) > 2 else None

    def _name(self, call: str) -> str:
        return self._renamed.get(call) or self._prefix + call

    def _status_name(self, status: int) -> str:
        try:
            return str(self._statuses(status).name)
        except ValueError:
            return "unknown"

    def _fail(self, call: str, status: int, note: str = "") -> DeviceError:
        self._forget_error()
        kind = DeviceMemoryError if status == _OUT_OF_MEMORY else DeviceError
        return kind(call, status, self._status_name(status), note or NOTES.get(status, ""))

    def _forget_error(self) -> None:
        """Take back the error that the vendor keeps for whoever asks next."""

    def _stream(self, stream: int) -> Any:
        """What the bindings take for a stream without converting it."""
        return stream

    def check_process(self) -> None:
        """Raise ForkedProcessError in a process forked after this runtime was made."""
        if self._forked:
            raise ForkedProcessError(self.kind)

    def disable_after_fork(self) -> None:
        """Called in a forked child: from now on every call raises ForkedProcessError."""
        self._forked = True
