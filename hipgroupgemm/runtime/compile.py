"""Device source to machine code with NVRTC or hipRTC, whose calls differ in their prefix. Needs no device.

cuda.core's Program is not used: it takes no headers from memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hipgroupgemm.runtime.errors import CompileError, DeviceError

__all__ = ["Compiler"]


class Compiler:
    """One compiler library through its bindings.

    Args:
        bindings: the module.
        prefix: of its calls, "nvrtc" or "hiprtc".
        version: (major, minor).
    """

    def __init__(self, bindings: Any, prefix: str, version: tuple[int, int]) -> None:
        self._bindings, self._prefix = bindings, prefix
        self.version = f"{prefix} {version[0]}.{version[1]}"

    def check(self, call: str, *arguments: Any) -> Any:
        """Make a call; its value."""
        result = getattr(self._bindings, self._prefix + call)(*arguments)
        if int(result[0]):
            raise DeviceError(self._prefix + call, int(result[0]), self._status_name(int(result[0])))
        return result[1] if len(result) > 1 else None

    def _status_name(self, status: int) -> str:
        try:
            return str(getattr(self._bindings, self._prefix + "Result")(status).name)
        except ValueError:
            return "unknown"

    def compile(self, source: str, name: str, flags: Sequence[str], headers: Mapping[str, str] | None, code: str, target: str) -> bytes:
        """Compile one source.

        Args:
            source: the text. name: what messages call it. flags: the compiler's options, the target included.
            headers: text of each header that the source may include, by the name in its ``#include``.
            code: what to get: "CUBIN", "PTX" or "Code". target: for messages.

        Raises:
            CompileError: with the compiler's log.
        """
        texts, names = [text.encode() for text in (headers or {}).values()], [key.encode() for key in headers or {}]
        program = self.check("CreateProgram", source.encode(), name.encode(), len(names), texts or None, names or None)
        try:
            call = self._prefix + "CompileProgram"
            status = int(getattr(self._bindings, call)(program, len(flags), [flag.encode() for flag in flags])[0])
            if status:
                log = bytearray(self.check("GetProgramLogSize", program) or 1)
                self.check("GetProgramLog", program, log)
                text = bytes(log).rstrip(b"\0\n").decode(errors="replace")
                raise CompileError(call, status, self._status_name(status), f"{name} for {target}, {list(flags)}", text)
            found = bytearray(self.check(f"Get{code}Size", program))
            self.check(f"Get{code}", program, found)
            return bytes(found)
        finally:
            # hipRTC's binding wants a pointer to the program, NVRTC's the program
            getattr(self._bindings, self._prefix + "DestroyProgram")(program.createRef() if hasattr(program, "createRef") else program)
