"""Triton as a compiler: a kernel's specialisation -> machine code and how to launch it, kept in memory and on disk.

Triton's launcher and its active driver are never touched; the target is named explicitly, so this works without a device, too. A
specialisation found on disk is used without importing Triton at all.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.metadata
import importlib.util
import json
import logging
import os
import re
import tempfile
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from hipgroupgemm.runtime.cache import cache_key, default_cache
from hipgroupgemm.runtime.directories import require_trusted, temporary_directory
from hipgroupgemm.runtime.errors import CompileError
from hipgroupgemm.runtime.forks import new_rlock
from hipgroupgemm.runtime.parameters import TENSOR_MAP, Blob

__all__ = ["CompiledKernel", "KernelSpec", "Target", "compile_kernel", "is_compiled", "target_of", "triton_version", "unavailable_reason"]

_log = logging.getLogger("hipgroupgemm.triton")
ELEMENTS = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
"""Triton's names of the element types that the kernels take."""
_SWIZZLE_BYTES = (0, 32, 64, 128)
KERNELS = Path(__file__).with_name("kernels")
OLDEST = (3, 6)


class Target(NamedTuple):
    """What code is compiled for: Triton's GPUTarget, as plain data."""

    backend: str
    architecture: int | str
    warp_size: int

    @property
    def name(self) -> str:
        """The vendor's name of the architecture: "sm_90", "gfx942"."""
        return f"sm_{self.architecture}" if self.backend == "cuda" else str(self.architecture)


class KernelSpec(NamedTuple):
    """Everything that decides a kernel's code.

    Attributes:
        module: a file of kernels/; function: the kernel in it.
        signature: (parameter, type). Types are Triton's ("i32", "*bf16"), "constexpr", or a tuple ("desc", element, box) for a descriptor.
        constants: (parameter, value) of the constexpr ones.
        divisible: (parameter, n) where the value, or the address in bytes, is a multiple of n.
        options: (name, value) as Triton's compile takes them.
        target: what it is compiled for.
    """

    module: str
    function: str
    signature: tuple[tuple[str, Any], ...]
    constants: tuple[tuple[str, Any], ...]
    divisible: tuple[tuple[str, int], ...]
    options: tuple[tuple[str, Any], ...]
    target: Target


class CompiledKernel(NamedTuple):
    """Machine code and what a launch needs to know.

    Attributes:
        code: cubin or hsaco. name: of the kernel in it.
        shared: bytes of dynamic shared memory. threads: per block.
        boxes: (box, swizzle in bytes) of each descriptor, as the copy engine wants it.
        kinds, names: the launch's parameters in order, for `KernelParameters`.
    """

    code: bytes
    name: str
    shared: int
    threads: int
    boxes: tuple[tuple[tuple[int, ...], int], ...]
    kinds: tuple[str | Blob, ...]
    names: tuple[str, ...]


def target_of(architecture: str) -> Target:
    """Triton's target for a device's architecture, "sm_90" or "gfx942"."""
    if architecture.startswith("sm_"):
        return Target("cuda", int(architecture.removeprefix("sm_")), 32)
    return Target("hip", architecture, 64 if architecture.startswith("gfx9") else 32)


@functools.lru_cache(1)
def triton_version() -> str | None:
    """Triton's version without importing it, or None where it is not installed."""
    for name in ("triton", "pytorch-triton", "pytorch-triton-rocm", "triton-rocm"):
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def unavailable_reason() -> str | None:
    """Why Triton cannot be used, or None."""
    version = triton_version()
    if version is None or importlib.util.find_spec("triton") is None:
        return "Triton is not installed; pip install 'triton>=3.6'"
    if tuple(int(number) for number in re.findall(r"\d+", version)[:2]) < OLDEST:
        return f"Triton {version} is older than {OLDEST[0]}.{OLDEST[1]}; pip install -U triton"
    return None


@functools.lru_cache(8)
def _source(module: str) -> str:
    names = (module, "hopper_common") if module.startswith("hopper") else (module,)
    return "\n".join((KERNELS / f"{name}.py").read_text(encoding="utf-8") for name in names)


_compiled: dict[KernelSpec, CompiledKernel] = {}
_lock = new_rlock()


def compile_kernel(spec: KernelSpec) -> CompiledKernel:
    """The compiled kernel, from memory, from disk, or compiled now.

    Raises:
        CompileError: Triton refuses; the text has its message.
    """
    found = _compiled.get(spec)
    if found is not None:
        return found
    key = _key_of(spec)
    with _lock:  # Triton's compiler is not made for several threads
        found = _compiled.get(spec)
        if found is not None:
            return found
        cache = default_cache()
        stored = cache.get(key)
        if stored is not None:
            head, _, code = stored.partition(b"\n")
            facts = json.loads(head)
        else:
            began = time.perf_counter()
            facts, code = _build(spec)
            cache.put(key, json.dumps(facts).encode() + b"\n" + code)
            _log.info("compiled %s.%s for %s in %.1f s", spec.module, spec.function, spec.target.name, time.perf_counter() - began)
        found = _compiled[spec] = _describe(spec, facts, code)
        return found


def _key_of(spec: KernelSpec) -> str:
    """The kernel's name in the cache on disk."""
    return cache_key(_source(spec.module), [repr(spec[:-1])], repr(spec.target), f"triton {triton_version()}")


def is_compiled(spec: KernelSpec) -> bool:
    """Whether `compile_kernel` would find the kernel in memory or on disk."""
    path = default_cache().path(_key_of(spec))
    return spec in _compiled or (path is not None and path.exists())


def _describe(spec: KernelSpec, facts: dict[str, Any], code: bytes) -> CompiledKernel:
    kinds: list[str | Blob] = []
    names: list[str] = []
    types = dict(spec.signature)
    for name in facts["parameters"]:
        kind = types[name]
        if isinstance(kind, tuple):
            rank = len(kind[2])
            kinds += [TENSOR_MAP, *["i32"] * rank, *["i64"] * rank]
            names += [name, *[f"{name}.shape{i}" for i in range(rank)], *[f"{name}.stride{i}" for i in range(rank)]]
        else:
            kinds, names = [*kinds, kind], [*names, name]
    kinds += ["ptr", "ptr"]  # Triton's own scratch and that of its profiler, which these kernels don't use
    names += ["global_scratch", "profile_scratch"]
    boxes = tuple((tuple(box), swizzle) for box, swizzle in facts["boxes"])
    return CompiledKernel(code, facts["name"], facts["shared"], facts["threads"], boxes, tuple(kinds), tuple(names))


def _build(spec: KernelSpec) -> tuple[dict[str, Any], bytes]:
    """Compiles with Triton; facts as JSON holds them, and the code."""
    import triton
    from triton.backends.compiler import GPUTarget

    kernels = importlib.import_module(f"{__package__}.kernels.{spec.module}")
    function = getattr(kernels, spec.function)
    names = list(function.arg_names)
    attributes = {(names.index(name),): [["tt.divisibility", by]] for name, by in spec.divisible}
    constants = {(names.index(name),): value for name, value in spec.constants}
    source: Any
    try:
        types = dict(spec.signature)
        signature = {name: _type_name(types[name]) for name in names}
        if spec.module.startswith("hopper"):
            source = _gluon_source()(function, signature, constants, attributes)
        else:
            from triton.compiler import ASTSource

            source = ASTSource(function, signature, constants, attributes)
        options = {"enable_fp_fusion": True, **dict(spec.options)}
        with warnings.catch_warnings(), _private_cache():
            warnings.simplefilter("ignore")  # of defaults that will change; what matters here is set
            result: Any = triton.compile(source, target=GPUTarget(*spec.target), options=options)
    except Exception as error:  # whatever Triton, LLVM or ptxas raise
        what = f"{spec.module}.{spec.function} for {spec.target.name}, Triton {triton_version()}, {spec.constants} {spec.options}"
        raise CompileError("triton.compile", 1, type(error).__name__, what, str(error)) from error
    metadata = result.metadata
    if getattr(metadata, "global_scratch_size", 0) or getattr(metadata, "profile_scratch_size", 0):
        raise CompileError("triton.compile", 1, "scratch", f"{spec.function} wants scratch memory of Triton's", "")
    described = [meta for meta in getattr(metadata, "tensordesc_meta", None) or [] if meta is not None]
    facts = {
        "name": metadata.name,
        "shared": int(metadata.shared),
        "threads": int(metadata.num_warps) * spec.target.warp_size,
        "boxes": [(list(meta["block_size"]), _SWIZZLE_BYTES[meta["swizzle"]]) for meta in described],
        "parameters": [name for name in names if types[name] != "constexpr"],
    }
    return facts, bytes(result.asm["cubin" if spec.target.backend == "cuda" else "hsaco"])


_MADE = re.compile(r"tt\.make_tensor_descriptor (%\S+), .* : (<.*>), (<.*>)( loc.*)?$", re.MULTILINE)
_REINTERPRETED = r'"ttng.reinterpret_tensor_descriptor"(\1) : (!tt.ptr\2) -> !tt.tensordesc\3\4'


@functools.lru_cache(1)
def _gluon_source() -> Any:
    """Triton's class for a kernel in Gluon; `hopper_common.descriptor_of` gets an operation that only the IR's text can name."""
    from triton._C.libtriton import ir
    from triton.experimental.gluon._runtime import GluonASTSource

    class Source(GluonASTSource):  # type: ignore[misc]
        def make_ir(self, *arguments: Any, **named: Any) -> Any:
            module = super().make_ir(*arguments, **named)
            text, count = _MADE.subn(_REINTERPRETED, str(module))
            if not count:
                return module
            context = module.context
            with tempfile.NamedTemporaryFile("w", suffix=".glir", dir=temporary_directory()) as file:
                file.write(text)
                file.flush()
                module = ir.parse_mlir_module(file.name, context)
            module.context = context
            return module

    return Source


@contextlib.contextmanager
def _private_cache() -> Iterator[None]:
    """Has Triton keep its files in a temporary directory where its own cache cannot be written, or where others can write it.

    What others can write is not run. Little is lost: `compile_kernel` keeps the result in a cache of this package's.
    """
    from triton import knobs

    try:
        os.makedirs(knobs.cache.dir, exist_ok=True)
        require_trusted(Path(knobs.cache.dir))
        with tempfile.TemporaryFile(dir=knobs.cache.dir):
            pass
    except OSError as error:
        _log.info("Triton's cache %s is not used: %s", knobs.cache.dir, error)
        with knobs.cache.scope():
            knobs.cache.dir = str(temporary_directory())
            yield
    else:
        yield


def _type_name(kind: Any) -> str:
    """Triton's spelling of a parameter's type."""
    if not isinstance(kind, tuple):
        return str(kind)
    _, element, box = kind
    from triton.experimental.gluon import language as gl

    return f"tensordesc<{element}{list(box)},{gl.NVMMASharedLayout.get_default_for(list(box), gl.dtype(element))!r}>"
