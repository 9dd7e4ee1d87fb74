"""Handles, grouped GEMMs and algorithms of hipBLASLt: a typed layer over the C ABI
(``include/hipgroupgemm.h``).

Everything is in hipBLASLt's own terms: column-major, ``D = alpha * op(A) op(B) + beta * C`` with op(A) m x k,
op(B) k x n. Device addresses and streams are ints. All objects may be used from several threads, in any order
of calls; one grouped GEMM does one thing at a time.
"""

from __future__ import annotations

import weakref
from typing import Any

import numpy as np
import numpy.typing as npt

from ._errors import NativeValueError, raise_status
from ._loader import Library, load
from ._types import (
    NO_LIMIT,
    RECORD_SIZE,
    ComputeType,
    DataType,
    Epilogue,
    GroupedGemmInfo,
    HandleInfo,
    NativeAlgorithm,
    Ragged,
    Sizes,
    TemplateRecord,
)


def _fail(library: Library, call: str, status: int) -> None:
    ffi, lib = library.ffi, library.lib
    raise_status(
        call,
        ffi.string(lib.hgg_status_name(status)).decode(),
        lib.hgg_last_library_status(),
        ffi.string(lib.hgg_last_error()).decode(errors="replace"),
    )


def _refuse(call: str, text: str) -> None:
    raise NativeValueError(call, "HGG_INVALID_ARGUMENT", -1, text)


class _Object:
    """What a handle and a grouped GEMM share: an id that the library knows, closed once."""

    def __init__(self, library: Library, identity: int, destroy: str) -> None:
        self._library = library
        self._id = identity
        self._destroy = destroy
        # Not at exit: by then the HIP runtime may be gone, and the process gives everything back anyway.
        self._finalizer = weakref.finalize(self, _destroy_silently, library, identity, destroy)
        self._finalizer.atexit = False

    def _check(self, call: str, status: int) -> None:
        if status:
            _fail(self._library, call, status)

    @property
    def closed(self) -> bool:
        """Whether ``close`` was called."""
        return not self._finalizer.alive

    def close(self) -> None:
        """Give everything back to the library and the device. Closing again does nothing."""
        if self._finalizer.detach() is None:
            return
        status = getattr(self._library.lib, self._destroy)(self._id)
        if status and self._library.ffi.string(self._library.lib.hgg_status_name(status)) != b"HGG_CLOSED":
            _fail(self._library, self._destroy, status)


def _destroy_silently(library: Library, identity: int, destroy: str) -> None:
    getattr(library.lib, destroy)(identity)


class Handle(_Object):
    """hipBLASLt's handle for one stream of one device; about 26 MB of device memory.

    Args:
        device: index of the device.
        stream: hipStream_t as an int; 0 is the default stream.

    Raises:
        NativeUnavailableError: there is no native part, hipBLASLt or HIP runtime that fits.
        NativeError: there is no such device, or hipBLASLt is of another version than it was built for.
    """

    def __init__(self, device: int = 0, stream: int = 0) -> None:
        library = load()
        out = library.ffi.new("hgg_handle *")
        status = library.lib.hgg_handle_create(_int32("hgg_handle_create", "device", device), stream, out)
        if status:
            _fail(library, "hgg_handle_create", status)
        super().__init__(library, out[0], "hgg_handle_destroy")
        self.device = device
        self.stream = stream

    def info(self) -> HandleInfo:
        """Device, stream, versions and git revision of the library, live grouped GEMMs."""
        info = self._library.ffi.new("hgg_handle_info *")
        self._check("hgg_handle_get_info", self._library.lib.hgg_handle_get_info(self._id, info))
        return HandleInfo(
            info.device,
            info.stream,
            (info.built_for.major, info.built_for.minor, info.built_for.patch),
            (info.loaded.major, info.loaded.minor, info.loaded.patch),
            self._library.ffi.string(info.revision).decode(errors="replace"),
            info.instances,
        )

    def __enter__(self) -> Handle:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class GroupedGemm(_Object):
    """One grouped GEMM of hipBLASLt, run from records in device memory.

    The order: :meth:`set_problem`, an algorithm from :meth:`heuristic` or :meth:`all_algorithms`,
    :meth:`initialize`, :meth:`run`. Any other order raises.

    Args:
        handle: whose stream it runs on. Closing the handle closes it too.
        type_a, type_b, type_c, type_d: element types.
        compute: accumulation type.
        trans_a: A is stored k x m instead of m x k.
        trans_b: B is stored n x k instead of k x n.
        epilogue: DEFAULT or BIAS.
        bias_type: element type of the bias; only read with BIAS.

    Raises:
        NativeUnsupportedError: hipBLASLt refuses the combination of types.
    """

    def __init__(
        self,
        handle: Handle,
        type_a: DataType,
        type_b: DataType,
        type_c: DataType,
        type_d: DataType,
        *,
        compute: ComputeType = ComputeType.FLOAT32,
        trans_a: bool = False,
        trans_b: bool = False,
        epilogue: Epilogue = Epilogue.DEFAULT,
        bias_type: DataType = DataType.FLOAT32,
    ) -> None:
        library = handle._library
        call = "hgg_instance_create"
        types = library.ffi.new("hgg_types *")
        types.type_a = _int32(call, "type_a", type_a)
        types.type_b = _int32(call, "type_b", type_b)
        types.type_c = _int32(call, "type_c", type_c)
        types.type_d = _int32(call, "type_d", type_d)
        types.compute = _int32(call, "compute", compute)
        types.trans_a = _int32(call, "trans_a", trans_a)
        types.trans_b = _int32(call, "trans_b", trans_b)
        types.epilogue = _int32(call, "epilogue", epilogue)
        types.bias_type = _int32(call, "bias_type", bias_type)
        out = library.ffi.new("hgg_instance *")
        status = library.lib.hgg_instance_create(handle._id, types, out)
        if status:
            _fail(library, call, status)
        super().__init__(library, out[0], "hgg_instance_destroy")
        self.handle = handle
        self._run = library.lib.hgg_run

    def info(self) -> GroupedGemmInfo:
        """Problems set, whether it can run, with which algorithm and workspace."""
        info = self._library.ffi.new("hgg_instance_info *")
        self._check("hgg_instance_get_info", self._library.lib.hgg_instance_get_info(self._id, info))
        return GroupedGemmInfo(
            info.count,
            bool(info.initialized),
            info.algorithm_index,
            info.workspace,
            info.workspace_size,
            info.workspace_needed,
        )

    def set_problem(
        self,
        m: Sizes,
        n: Sizes,
        k: Sizes,
        batch: Sizes = 1,
        *,
        ragged: Ragged = Ragged.N,
        lda: Sizes | None = None,
        ldb: Sizes | None = None,
        ldc: Sizes | None = None,
        ldd: Sizes | None = None,
        stride_a: Sizes | None = None,
        stride_b: Sizes | None = None,
        stride_c: Sizes | None = None,
        stride_d: Sizes | None = None,
        alpha: float = 1.0,
        beta: float = 0.0,
    ) -> None:
        """Set the sizes that the launch grid and the choice of kernels are made from.

        An int stands for all problems; arrays must have the same length, at least 2. Device records that need
        more tiles than these sizes would leave output unwritten, without an error: if the ragged n sum to at
        most T, n = [T, 1, ..., 1] covers every distribution. The ragged size must be 1 in one problem, so
        that no kernel is offered that needs multiples of it, or some least width. :meth:`initialize` is
        needed afterwards.

        Args:
            m, n, k: sizes; m at least 1, n and k at least 0.
            batch: matrices in each problem's strided batch.
            ragged: which size differs on the device.
            lda, ldb, ldc, ldd: leading dimensions in elements; None is packed.
            stride_a, stride_b, stride_c, stride_d: batch strides in elements; None is packed.
            alpha, beta: what the template record gets.

        Raises:
            NativeValueError: lengths that differ, sizes out of range, anything that 32 bits cannot hold.
        """
        call = "hgg_set_problem"
        given = {
            "m": m,
            "n": n,
            "k": k,
            "batch": batch,
            "lda": lda,
            "ldb": ldb,
            "ldc": ldc,
            "ldd": ldd,
            "stride_a": stride_a,
            "stride_b": stride_b,
            "stride_c": stride_c,
            "stride_d": stride_d,
        }
        arrays = {name: _integers(call, name, value) for name, value in given.items() if value is not None}
        lengths = {name: array.size for name, array in arrays.items() if array.ndim}
        if not lengths:
            _refuse(call, "m, n, k and batch are all single numbers; wanted an array of sizes for at least one")
        count = next(iter(lengths.values()))
        if any(length != count for length in lengths.values()):
            _refuse(
                call,
                f"arrays of unequal length: {', '.join(f'{name} {size}' for name, size in lengths.items())}",
            )
        ffi = self._library.ffi
        problem = ffi.new("hgg_problem *")
        problem.count = count
        problem.ragged = _int32(call, "ragged", ragged)
        problem.alpha = alpha
        problem.beta = beta
        kept = []
        for name, array in arrays.items():
            full = np.ascontiguousarray(np.broadcast_to(array, (count,)))
            buffer = ffi.from_buffer("int64_t[]", full)
            kept.append((full, buffer))
            setattr(problem, name, buffer)
        self._check(call, self._library.lib.hgg_set_problem(self._id, problem))

    def heuristic(self, max_count: int = 16, max_workspace: int = NO_LIMIT) -> list[NativeAlgorithm]:
        """hipBLASLt's own ranking of what supports the problem within ``max_workspace`` bytes, best first.

        Raises:
            NativeUnsupportedError: hipBLASLt has no kernel library for this device.
        """
        call = "hgg_algorithms_heuristic"
        wanted = _int32(call, "max_count", max_count)
        limit = _limit(call, max_workspace)
        return self._listed(call, lambda *out: self._library.lib.hgg_algorithms_heuristic(self._id, wanted, limit, *out))

    def all_algorithms(self, max_workspace: int = NO_LIMIT) -> list[NativeAlgorithm]:
        """Every algorithm that supports the problem within ``max_workspace`` bytes, in the library's order.

        Raises:
            NativeUnsupportedError: hipBLASLt has no kernel library for this device.
        """
        call = "hgg_algorithms_all"
        limit = _limit(call, max_workspace)
        return self._listed(call, lambda *out: self._library.lib.hgg_algorithms_all(self._id, limit, *out))

    def algorithm(self, index: int) -> NativeAlgorithm:
        """The algorithm of that index among all for these types, supported or not.

        Raises:
            NativeValueError: there is none.
        """
        ffi, call = self._library.ffi, "hgg_algorithm_get"
        out = ffi.new("hgg_algorithm *")
        self._check(call, self._library.lib.hgg_algorithm_get(self._id, _int32(call, "index", index), out))
        flags = out.flags
        return NativeAlgorithm(
            index=out.index,
            name=ffi.string(out.solution_name).decode(),
            kernel_name=ffi.string(out.kernel_name).decode(),
            workspace_size=out.workspace_size,
            supported=bool(out.supported),
            splits=bool(flags & (self._library.lib.HGG_ALGORITHM_SPLIT | self._library.lib.HGG_ALGORITHM_EXTRA_KERNEL)),
            stream_k=bool(flags & self._library.lib.HGG_ALGORITHM_STREAM_K),
        )

    def find_algorithm(self, name: str, index: int = -1) -> NativeAlgorithm:
        """A pinned algorithm: the one of this index, if it has this name; with index -1, the only one of this
        name.

        Raises:
            NativeValueError: the index names something else, or the name nothing; the text says what is
                where.
        """
        call = "hgg_algorithm_find"
        if "\0" in name:
            _refuse(call, f"solution_name is {name!r}, wanted a name without zero bytes")
        out = self._library.ffi.new("int32_t *")
        where = _int32(call, "index", index)
        self._check(call, self._library.lib.hgg_algorithm_find(self._id, where, name.encode(), out))
        return self.algorithm(out[0])

    def initialize(
        self,
        algorithm: NativeAlgorithm | int,
        workspace: int,
        workspace_size: int,
        *,
        allow_split: bool = False,
        allow_stream_k: bool = False,
    ) -> None:
        """Ready it to run one algorithm from device records, with a workspace that is its own from now on.

        Needed again after :meth:`set_problem` and for another algorithm or workspace; not for other records.

        Args:
            algorithm: an algorithm, or its index.
            workspace: device address, aligned to WORKSPACE_ALIGNMENT.
            workspace_size: bytes there; at least the algorithm's ``workspace_size``.
            allow_split, allow_stream_k: take such an algorithm too, whose results you have checked.

        Raises:
            NativeValueError: no such algorithm; a workspace that is short, misaligned, not on the device or
                another's. NativeUnsupportedError: the algorithm does not take the problem, or is not
                verified.
        """
        call, lib = "hgg_initialize", self._library.lib
        index = _int32(call, "algorithm", algorithm.index if isinstance(algorithm, NativeAlgorithm) else algorithm)
        allow = (lib.HGG_ALLOW_SPLIT if allow_split else 0) | (lib.HGG_ALLOW_STREAM_K if allow_stream_k else 0)
        size = _limit(call, workspace_size)
        self._check(call, lib.hgg_initialize(self._id, index, _address(call, "workspace", workspace), size, allow))

    def release(self) -> None:
        """Undo :meth:`initialize`; the workspace is free again."""
        self._check("hgg_release", self._library.lib.hgg_release(self._id))

    def template(self) -> TemplateRecord:
        """hipBLASLt's own record for the first problem; needs :meth:`initialize` first."""
        ffi, call = self._library.ffi, "hgg_template_record"
        record = ffi.new("char[]", RECORD_SIZE)
        bias, activation = ffi.new("int32_t *"), ffi.new("int32_t *")
        status = self._library.lib.hgg_template_record(self._id, record, RECORD_SIZE, bias, activation)
        self._check(call, status)
        return TemplateRecord(bytes(ffi.buffer(record, RECORD_SIZE)), bias[0], activation[0])

    def run(self, records: int, records_size: int, stream: int) -> None:
        """Launch on the handle's stream, without waiting.

        Args:
            records: device address of one record (RECORD_SIZE bytes) for each problem set.
            records_size: bytes there.
            stream: the handle's; another is refused.

        Raises:
            NativeError: not initialised, closed, or the launch failed.
            NativeValueError: too few records, a bad address, another stream.
        """
        status = self._run(self._id, records, records_size, stream)
        if status:
            _fail(self._library, "hgg_run", status)

    def __enter__(self) -> GroupedGemm:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _listed(self, call: str, ask: Any) -> list[NativeAlgorithm]:
        ffi = self._library.ffi
        count = ffi.new("int32_t *")
        capacity = 1024
        while True:
            indices = ffi.new("int32_t[]", capacity)
            self._check(call, ask(indices, capacity, count))
            if count[0] <= capacity:
                return [self.algorithm(indices[i]) for i in range(count[0])]
            capacity = count[0]


def _int32(call: str, name: str, value: object) -> int:
    if not isinstance(value, (int, np.integer)):
        raise TypeError(f"{call}: {name} is {value!r} ({type(value).__name__}), wanted an int")
    if not -(2**31) <= int(value) < 2**31:
        _refuse(call, f"{name} is {value}, wanted a 32-bit int")
    return int(value)


def _limit(call: str, value: int) -> int:
    if not isinstance(value, (int, np.integer)):
        raise TypeError(f"{call}: bytes are {value!r} ({type(value).__name__}), wanted an int")
    if not 0 <= int(value) <= NO_LIMIT:
        _refuse(call, f"bytes are {value}, wanted 0 to {NO_LIMIT}")
    return int(value)


def _address(call: str, name: str, value: int) -> int:
    if not isinstance(value, (int, np.integer)):
        raise TypeError(f"{call}: {name} is {value!r} ({type(value).__name__}), wanted a device address as an int")
    if not 0 <= int(value) < 2**64:
        _refuse(call, f"{name} is {value}, wanted a device address")
    return int(value)


def _integers(call: str, name: str, value: Sizes) -> npt.NDArray[np.int64]:
    array = np.asarray(value)
    if array.dtype == np.bool_ or not (np.issubdtype(array.dtype, np.integer) or array.size == 0):
        raise TypeError(f"{call}: {name} has dtype {array.dtype}, wanted integers")
    if array.ndim > 1:
        raise TypeError(f"{call}: {name} has shape {array.shape}, wanted one dimension")
    if array.dtype == np.uint64 and array.size and int(array.max()) > 2**63 - 1:
        _refuse(call, f"{name} has {int(array.max())}, wanted at most 32 bits")
    return array.astype(np.int64)
