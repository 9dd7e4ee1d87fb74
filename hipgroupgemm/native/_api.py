"""Handles, grouped GEMMs and algorithms of hipBLASLt: a typed layer over the C ABI (`include/hipgroupgemm.h`).

Everything is in hipBLASLt's own terms. Device addresses and streams are ints. All objects may be used from several threads, in any order of
calls; one grouped GEMM does one thing at a time.
"""

from __future__ import annotations

import dataclasses
import weakref
from typing import Any, NoReturn, TypeVar

from hipgroupgemm.native._errors import raise_status
from hipgroupgemm.native._loader import Library, load
from hipgroupgemm.native._types import COMPUTE_TYPES, DATA_TYPES, RAGGED, RECORD_SIZE, GemmProblem, HandleInfo, NativeAlgorithm

_Self = TypeVar("_Self", bound="_Object")


def _fail(library: Library, call: str, status: int) -> NoReturn:
    ffi, lib = library.ffi, library.lib
    text = ffi.string(lib.hgg_last_error()).decode(errors="replace")
    raise_status(call, ffi.string(lib.hgg_status_name(status)).decode(), lib.hgg_last_library_status(), text)


class _Object:
    """What a handle and a grouped GEMM share: an id that the library knows, closed once."""

    def __init__(self, library: Library, kind: str, *arguments: object) -> None:
        create = f"hgg_{kind}_create"
        out = library.ffi.new("uint64_t *")
        status = getattr(library.lib, create)(*arguments, out)
        if status:
            _fail(library, create, status)
        self._library, self._id, self._destroy = library, out[0], f"hgg_{kind}_destroy"
        # Not at exit: by then the HIP runtime may be gone, and the process gives everything back anyway.
        self._finalizer = weakref.finalize(self, getattr(library.lib, self._destroy), self._id)
        self._finalizer.atexit = False

    def _call(self, name: str, *arguments: object) -> None:
        status = getattr(self._library.lib, name)(self._id, *arguments)
        if status:
            _fail(self._library, name, status)

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return not self._finalizer.alive

    def close(self) -> None:
        """Gives everything back to the library and the device. Closing again does nothing."""
        if self._finalizer.detach() is not None:
            lib = self._library.lib
            status = getattr(lib, self._destroy)(self._id)
            if status not in (lib.HGG_OK, lib.HGG_CLOSED, lib.HGG_FORKED):  # closed: with its handle; forked: the parent's
                _fail(self._library, self._destroy, status)

    def __enter__(self: _Self) -> _Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Handle(_Object):
    """hipBLASLt's handle for a device; about 26 MB of device memory. One serves one stream: its stream-K kernels deadlock otherwise.

    Args:
        device: index of the device.

    Raises:
        NativeUnavailableError: there is no native part, hipBLASLt or HIP runtime that fits.
        NativeError: there is no such device, or hipBLASLt is of another version than it was built for.
    """

    def __init__(self, device: int = 0) -> None:
        super().__init__(load(), "handle", device)
        self.device = device

    def info(self) -> HandleInfo:
        """Device, versions and git revision of the library, live grouped GEMMs."""
        info = self._library.ffi.new("hgg_handle_info *")
        self._call("hgg_handle_get_info", info)
        versions = [(v.major, v.minor, v.patch) for v in (info.built_for, info.loaded)]
        revision = self._library.ffi.string(info.revision).decode(errors="replace")
        return HandleInfo(info.device, versions[0], versions[1], revision, info.instances)


class GroupedGemm(_Object):
    """One grouped GEMM of hipBLASLt, run from records in device memory: `initialize` an algorithm, then `run`.

    Args:
        handle: closing it closes this too.
        problem: types and sizes.

    Raises:
        NativeUnsupportedError: hipBLASLt refuses the combination of types.
        NativeValueError: a size that is out of range, or that 32 bits cannot hold.
    """

    def __init__(self, handle: Handle, problem: GemmProblem) -> None:
        fields: dict[str, Any] = {f.name: getattr(problem, f.name) for f in dataclasses.fields(problem)}
        for name in ("type_a", "type_b", "type_c", "type_d"):
            fields[name] = DATA_TYPES[fields[name]]
        fields["bias_type"] = -1 if problem.bias_type is None else DATA_TYPES[problem.bias_type]
        fields["compute"], fields["ragged"] = COMPUTE_TYPES[problem.compute], RAGGED[problem.ragged]
        super().__init__(handle._library, "instance", handle._id, handle._library.ffi.new("hgg_problem *", fields))
        self.handle, self.problem = handle, problem

    def algorithms(self, max_count: int = 0) -> list[NativeAlgorithm]:
        """Algorithms that support the problem: at most `max_count` in hipBLASLt's own ranking, best first; with 0 all, in its order.

        Raises:
            NativeUnsupportedError: hipBLASLt has no kernel library for this device.
        """
        capacity, count = max_count or 1 << 16, self._library.ffi.new("int32_t *")  # more than any library has for one problem
        indices = self._library.ffi.new("int32_t[]", capacity)
        self._call("hgg_algorithms", max_count, indices, capacity, count)
        return [self.algorithm(index) for index in indices[0 : count[0]]]

    def algorithm(self, index: int) -> NativeAlgorithm:
        """The algorithm of that index among all for these types, supported or not; raises NativeValueError if there is none."""
        ffi = self._library.ffi
        out = ffi.new("hgg_algorithm *")
        self._call("hgg_algorithm_get", index, out)
        names = ffi.string(out.solution_name).decode(), ffi.string(out.kernel_name).decode()
        return NativeAlgorithm(out.index, *names, out.workspace_size, bool(out.supported), verified=not out.flags)

    def initialize(self, index: int, workspace: int, workspace_size: int, stream: int) -> bytes:
        """Readies it to run one algorithm from device records, with a workspace that is its own from now on.

        Needed again for another algorithm or workspace; not for other records.

        Args:
            index: an algorithm's.
            workspace: device address, aligned to WORKSPACE_ALIGNMENT. workspace_size: bytes there, at least what the algorithm needs.
            stream: hipStream_t as an int, on which the workspace is filled.

        Returns:
            The template: hipBLASLt's own record for the first problem, RECORD_SIZE bytes. The addresses in it mean nothing.

        Raises:
            NativeValueError: no such algorithm; a workspace that is short, misaligned or another's.
            NativeUnsupportedError: the algorithm does not take the problem, or is wrong with device records.
        """
        record = self._library.ffi.new("char[]", RECORD_SIZE)
        self._call("hgg_initialize", index, workspace, workspace_size, stream, record)
        return bytes(self._library.ffi.buffer(record))

    def prepared_run(self) -> tuple[int, int]:
        """For code that runs it by itself: the address of hgg_run, and the first argument (`include/hipgroupgemm.h`)."""
        library = self._library
        return int(library.ffi.cast("uintptr_t", library.ffi.addressof(library.lib, "hgg_run"))), int(self._id)

    def run(self, records: int, stream: int) -> None:
        """Launches on a stream, without waiting.

        Args:
            records: device address of one record (RECORD_SIZE bytes) for each of the problem's `count`.

        Raises:
            NativeError: not initialised, closed, or the launch failed; the text names the algorithm.
        """
        self._call("hgg_run", records, stream)
