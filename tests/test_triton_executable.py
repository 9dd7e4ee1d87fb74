"""What a prepared algorithm of sm_90 launches for each kind of call, and with which arguments; without a device, nothing is compiled."""

from __future__ import annotations

import contextlib
import types

import numpy as np
import pytest

import hipgroupgemm as hgg
from hipgroupgemm.backends.base import Arguments
from hipgroupgemm.backends.triton import candidates, compiler, executable, specs
from hipgroupgemm.operands.arrays import ArraySpec
from hipgroupgemm.operands.views import ArrayView, Device
from hipgroupgemm.problem.dimension_numbers import BASIC, RaggedDotDimensionNumbers

WGRAD = RaggedDotDimensionNumbers((((0,), (0,)), ((), ())), (0,), ())
MACHINE = candidates.Machine(compiler.target_of("sm_90"), 132, 232448)
CUDA, CPU = Device("cuda", 0), Device("cpu", 0)
BASE, SIZES = 1 << 20, 1 << 24


class Launch:
    """Notes that it was run, and with what."""

    def __init__(self, runtime, name, parameters):
        self.runtime, self.name, self.parameters, self.grid = runtime, name, parameters, None

    def set_grid(self, grid):
        self.grid = grid

    def run(self):
        values = dict(zip(self.parameters.names or (), (self.parameters[i] for i in range(len(self.parameters))), strict=False))
        self.runtime.launched.append((self.name, values))


class Runtime:
    """Launches nothing."""

    kind = "cuda"

    def __init__(self):
        self.launched, self.compiled = [], []

    @contextlib.contextmanager
    def use_device(self, _):
        yield

    def capture_id(self, _):
        return 0

    def prepare_launch(self, function, grid, block, shared, stream, parameters, programmatic=False):
        return Launch(self, function, parameters)


@pytest.fixture
def runtime(monkeypatch):
    made = Runtime()

    def compile_kernel(spec):
        made.compiled.append(spec)
        kinds, names = [], []
        for name, kind in spec.signature:
            if kind != "constexpr":
                kinds.append("u64" if isinstance(kind, tuple) else kind)
                names.append(name)
        scanning = dict(spec.constants).get("GROUPS", 0) > 0
        return compiler.CompiledKernel(b"", "scanning" if scanning else "behind", 0, 128, (), tuple(kinds), tuple(names))

    monkeypatch.setattr(executable, "compile_kernel", compile_kernel)
    monkeypatch.setattr(executable, "scan_function", lambda *_: "scan")
    monkeypatch.setattr(executable, "_module_of", lambda *_: types.SimpleNamespace(get_function=lambda name, _: name))
    monkeypatch.setattr(
        executable, "Descriptors", lambda *_: types.SimpleNamespace(point=lambda *_: None, move=lambda *_: None)
    )  # fmt: skip
    monkeypatch.setattr(
        executable, "Scratch", lambda *_, **__: types.SimpleNamespace(reserve=lambda: None, pointer=lambda *_: BASE, close=lambda: None)
    )  # fmt: skip

    class HostSizes(executable.HostSizes):
        def __init__(self, *_):
            pass

        def copy(self, sizes, destination):
            return destination

        def close(self):
            pass

    monkeypatch.setattr(executable, "HostSizes", HostSizes)
    return made


def config_of(mode, rows=64, groups=6, **kwargs):
    sizes = ArraySpec((groups,), "int32")
    if mode == "rows":
        return hgg.config_for_ragged_dot(ArraySpec((rows, 64), "bfloat16"), ArraySpec((groups, 64, 64), "bfloat16"), sizes, BASIC, **kwargs)
    return hgg.config_for_ragged_dot(ArraySpec((rows, 64), "bfloat16"), ArraySpec((rows, 64), "bfloat16"), sizes, WGRAD, **kwargs)


def call(config, dtype="int32", step=None, device=CUDA, ends=False, offset=0, at=SIZES, out=3 << 20):
    dtype = np.dtype(dtype)
    view = ArrayView(at, (config.group_total,), (step or dtype.itemsize,), dtype, device, "")
    return Arguments(config, {"lhs": 1 << 20, "rhs": 2 << 20, "out": out}, view, ends, offset, "zero", "none", 0)


def make(runtime, config):
    key = config.key()
    candidate = next(c for _, c in candidates.ordered(key, MACHINE) if c.kernel == "hopper")
    return executable.TritonExecutable(runtime, CUDA, key, candidate, MACHINE, 0, "")


def names(runtime):
    found = [name for name, _ in runtime.launched]
    runtime.launched.clear()
    return found


@pytest.mark.parametrize("mode", ["rows", "slabs"])
def test_one_launch_where_the_kernel_can_read_the_sizes(mode, runtime):
    config = config_of(mode)
    ready = make(runtime, config)
    for arguments in (
        call(config),
        call(config, "int64"),
        call(config, "int64", step=24),
        call(config, ends=True),
        call(config, "uint8", device=CPU),  # they come to the device as int64
        call(config, at=SIZES + 4),
    ):
        ready.execute(arguments)
        ready.execute(arguments)
        assert names(runtime) == ["scanning", "scanning"]
    assert len(runtime.compiled) == 1
    for arguments in (call(config, "uint8"), call(config, "int16", ends=True), call(config, at=SIZES + 2), call(config, offset=1)):
        ready.execute(arguments)
        assert names(runtime) == ["scan", "behind"]
    ready.execute(call(config))
    assert names(runtime) == ["scanning"]
    assert len(runtime.compiled) == 2


@pytest.mark.parametrize("mode", ["rows", "slabs"])
def test_arguments_of_the_scan(mode, runtime):
    config = config_of(mode)
    ready = make(runtime, config)
    for arguments, wanted in [
        (call(config), {"sizes": SIZES, "sizes_step": 1, "wide": 0, "offsets": 0}),
        (call(config, "int64", ends=True), {"sizes": SIZES, "sizes_step": 2, "wide": 1, "offsets": 1}),
        (call(config, "int32", step=20), {"sizes": SIZES, "sizes_step": 5, "wide": 0, "offsets": 0}),
        (call(config, "int16", device=CPU), {"sizes_step": 2, "wide": 1, "offsets": 0}),
    ]:
        ready.execute(arguments)
        (_, values) = runtime.launched.pop()
        assert {name: values[name] for name in wanted} == wanted
        assert values["groups"] == 6 and values["fault"] == BASE + ready._fault


def test_no_rows_are_scanned_and_compile_nothing(runtime):
    config = config_of("rows")
    ready = make(runtime, config)
    ready.execute(call(config))
    assert names(runtime) == ["scanning"]
    ready.execute(call(config_of("rows", rows=0)))
    assert names(runtime) == ["scan"]  # wrong sizes are flagged all the same
    ready.execute(call(config))
    assert names(runtime) == ["scanning"]
    assert len(runtime.compiled) == 1


def test_an_empty_contraction_is_written(runtime):
    config = config_of("slabs")
    ready = make(runtime, config)
    ready.execute(call(config_of("slabs", rows=0)))
    assert names(runtime) == ["scanning"]


@pytest.mark.parametrize(("groups", "room"), [(1, 128), (128, 128), (129, 256), (1000, 1024), (1024, 1024), (1025, 0)])
def test_room_for_groups(groups, room):
    key = config_of("rows", rows=4096, groups=groups).key()
    alone = [c for _, c in candidates.ordered(key, MACHINE) if c.kernel == "hopper" and c.blocks == 1]
    small = min(alone, key=lambda c: c.shared_bytes(2, 2))
    assert specs.room_for_groups(small, key, MACHINE) == room
    constants = dict(specs.spec_of(small, key, MACHINE).constants)
    assert constants["GROUPS"] == room and constants["PROGRAMMATIC"] is not bool(room)
