"""The labs: NumPy's for real, CuPy's by a stand-in module with CuPy's names."""

import sys
import time
import types

import numpy as np
import pytest
from hipgroupgemm.benchmark.judge import Judge
from hipgroupgemm.benchmark.labs import CuPyLab, NumPyLab, lab_for

from hipgroupgemm.benchmark import labs
from hipgroupgemm.benchmark.baselines import BASELINES
from hipgroupgemm.benchmark.runner import Job, make_operands
from hipgroupgemm.measure.environment import describe
from hipgroupgemm.measure.workloads import CLASSES, MoEShape
from hipgroupgemm.operands.dtypes import DTYPES


def test_numpy_lab_measures_memory_and_time() -> None:
    lab = NumPyLab()
    assert 8e6 <= lab.peak_extra(lambda: np.ones(10**6)) < 8.1e6
    assert lab.peak_extra(lambda: None) < 10_000
    assert 19 < lab.time(lambda: time.sleep(0.02)) < 2000
    assert lab.free_bytes() > 2**20
    assert lab.copy_rate(2**20) > 1e6
    array = lab.empty_nan((3, 2), DTYPES["bfloat16"])
    assert np.isnan(array.astype(np.float32)).all()


def test_describe_names_machine_and_versions() -> None:
    facts = describe(NumPyLab())
    assert facts["device"].startswith("cpu: ")
    assert facts["cores"] >= 1
    assert facts["versions"]["numpy"] == np.__version__
    assert {"hipgroupgemm", "python"} <= set(facts["versions"])
    assert isinstance(facts["blas"], str)


class FakeEvent:
    clock = 0.0

    def record(self) -> None:
        FakeEvent.clock += 1.5
        self.at = FakeEvent.clock

    def synchronize(self) -> None:
        pass


def fake_cupy(hip: bool, devices: int = 1) -> types.ModuleType:
    """A module with CuPy's names over NumPy: enough to run the lab's own code."""
    module = types.ModuleType("cupy")
    for name in (
        "empty",
        "zeros",
        "zeros_like",
        "ones",
        "asarray",
        "matmul",
        "copyto",
        "where",
        "arange",
        "cumsum",
        "searchsorted",
        "minimum",
    ):
        setattr(module, name, getattr(np, name))
    module.asnumpy = np.asarray
    module.__version__ = "14.0.0"
    hooks = []

    class MemoryHook:
        def __enter__(self):
            hooks.append(self)
            return self

        def __exit__(self, *_) -> None:
            hooks.remove(self)

    class RandomState(np.random.RandomState):
        def standard_normal(self, size, dtype):
            return super().standard_normal(size).astype(dtype)

    class Device:
        """The current device, or one that is current inside a with statement."""

        current = 0

        def __init__(self, index=None) -> None:
            self.id = Device.current if index is None else index
            self.attributes = {"L2CacheSize": 4096}

        def __enter__(self):
            self.before, Device.current = Device.current, self.id
            return self

        def __exit__(self, *_) -> None:
            Device.current = self.before

    runtime = types.SimpleNamespace(
        is_hip=hip,
        getDeviceCount=lambda: devices,
        memGetInfo=lambda: (10**9, 2 * 10**9),
        runtimeGetVersion=lambda: 13000,
        driverGetVersion=lambda: 13010,
        getDeviceProperties=lambda index: {"name": b"Accelerator", "gcnArchName": b"gfx942:sramecc+" if hip else b""},
    )
    stream = types.SimpleNamespace(synchronize=lambda: None)
    module.cuda = types.SimpleNamespace(
        runtime=runtime,
        Device=Device,
        Event=FakeEvent,
        MemoryHook=MemoryHook,
        get_elapsed_time=lambda start, end: end.at - start.at,
        get_current_stream=lambda: stream,
    )
    module.random = types.SimpleNamespace(RandomState=RandomState)
    module.get_default_memory_pool = lambda: types.SimpleNamespace(free_bytes=lambda: 5, free_all_blocks=lambda: None)
    module.hooks = hooks
    return module


@pytest.mark.parametrize("hip", [False, True])
def test_cupy_lab_by_a_stand_in(hip: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    cupy = fake_cupy(hip)
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    monkeypatch.setattr(labs, "_MEBI", 1024)
    with lab_for("auto") as lab:
        assert isinstance(lab, CuPyLab)
        assert str(lab.device) == ("rocm:0" if hip else "cuda:0")
        assert not lab.scales
        assert lab.default_dtype == "bfloat16"
        assert lab.time(lambda: None) == 1.5
        lab.flush()
        assert lab.free_bytes() == 10**9 + 5
        assert lab.copy_rate(4000) == pytest.approx(2 * 4000 / 1.5e-3)
        facts = describe(lab)
        assert facts["device"].endswith(": Accelerator")
        assert facts.get("architecture") == ("gfx942:sramecc+" if hip else None)

        def allocate() -> None:
            (hook,) = cupy.hooks
            hook.malloc_postprocess(device_id=0, size=90, mem_size=100, mem_ptr=1, pmem_id=1)
            hook.malloc_postprocess(device_id=0, size=90, mem_size=200, mem_ptr=2, pmem_id=2)
            hook.free_postprocess(device_id=0, mem_size=100, mem_ptr=1, pmem_id=1)
            hook.free_postprocess(device_id=0, mem_size=999, mem_ptr=7, pmem_id=7)  # older than the hook
            hook.malloc_postprocess(device_id=0, size=90, mem_size=50, mem_ptr=3, pmem_id=3)

        assert lab.peak_extra(allocate) == 300
        for name in CLASSES:
            o = make_operands(
                lab, Job(CLASSES[name], MoEShape(37, 19, 23, 5), np.array([3, 0, 11, 2, 5], np.int32), "test"), np.dtype(np.float32), 1
            )
            judge = Judge(lab, o)
            for baseline in BASELINES.values():
                lab.fill_nan(o.out)
                baseline[1](lab, o)
                assert judge.check(o.out).fault == ""


def test_labs_say_why_there_is_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(RuntimeError, match=r"CuPy is not usable .*hipgroupgemm\[rocm\]"), lab_for("gpu"):
        pass
    with lab_for("auto") as lab:
        assert isinstance(lab, NumPyLab)
    monkeypatch.setitem(sys.modules, "cupy", fake_cupy(True, devices=0))
    with pytest.raises(RuntimeError, match="CuPy finds no device"), lab_for("gpu"):
        pass


@pytest.mark.parametrize("hip", [False, True])
def test_named_gpus(hip: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    cupy = fake_cupy(hip, devices=2)
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    monkeypatch.setattr(labs, "_MEBI", 1024)
    kind, other = ("rocm", "cuda") if hip else ("cuda", "rocm")
    for name, wanted in [(kind, f"{kind}:0"), (f"{kind}:1", f"{kind}:1"), ("gpu", f"{kind}:0")]:
        with lab_for(name) as lab:
            assert str(lab.device) == wanted
            assert cupy.cuda.Device.current == lab.device.index
        assert cupy.cuda.Device.current == 0
    for name in (other, f"{kind}:2"):
        with pytest.raises(RuntimeError, match=rf"CuPy has no {name}.* here, only {kind}:0, {kind}:1"), lab_for(name):
            pass
    with pytest.raises(ValueError, match="device='tpu'"), lab_for("tpu"):
        pass
