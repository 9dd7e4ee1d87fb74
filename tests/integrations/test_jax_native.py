"""The native door without a device: which launches the handler makes for XLA's buffers, and every byte of their parameters.

The handler is the product's own source, with an entry for the CPU behind it; the driver behind it notes what it is asked to launch. What
it should be asked is what the plan's own executable launches with operands at the same addresses.
"""

from __future__ import annotations

import ctypes
import itertools
import struct
import types

import numpy as np
import pytest
from fake_cuda import CONTEXT, FakeCuda, compile_nothing

jax = pytest.importorskip("jax")
import jax.numpy as jnp  # noqa: E402

from hipgroupgemm import plan as plans  # noqa: E402
from hipgroupgemm.backends import get_backend  # noqa: E402
from hipgroupgemm.backends.base import Arguments  # noqa: E402
from hipgroupgemm.backends.triton import backend as triton_backend  # noqa: E402
from hipgroupgemm.backends.triton import executable  # noqa: E402
from hipgroupgemm.integrations.jax import lowering, native  # noqa: E402
from hipgroupgemm.integrations.jax.primitive import Settings, problem_of, shapes_of  # noqa: E402
from hipgroupgemm.operands.views import ArrayView, Device  # noqa: E402
from hipgroupgemm.problem.dimension_numbers import BASIC, RaggedDotDimensionNumbers  # noqa: E402
from hipgroupgemm.runtime.host_code import load_host_code  # noqa: E402

STREAM = 0xABC
WGRAD = RaggedDotDimensionNumbers((((0,), (0,)), ((), ())), (0,), ())
DGRAD = RaggedDotDimensionNumbers((((1,), (2,)), ((), ())), (0,), (0,))
BATCHED = RaggedDotDimensionNumbers((((2,), (1,)), ((0,), (0,))), (0,), ())

ENTRY = r"""
extern "C" __attribute__((visibility("default"))) uint64_t seen[16], seen_count;
uint64_t seen[16], seen_count;
static ffi::Error on_host(ffi::RemainingArgs arguments, ffi::RemainingRets results, int64_t number) {
    seen_count = 0;
    for (size_t i = 0; i < arguments.size(); ++i) seen[seen_count++] = (uint64_t)arguments.get<ffi::AnyBuffer>(i)->untyped_data();
    for (size_t i = 0; i < results.size(); ++i) seen[seen_count++] = (uint64_t)(*results.get<ffi::AnyBuffer>(i))->untyped_data();
    return hgg::run((void *)0xABC, 0, arguments, results, number);
}
extern "C" __attribute__((visibility("default"))) XLA_FFI_Error *hgg_test(XLA_FFI_CallFrame *frame);
XLA_FFI_DEFINE_HANDLER_SYMBOL(hgg_test, on_host, ffi::Ffi::Bind().RemainingArgs().RemainingRets().Attr<int64_t>("recipe"));
"""
_numbers = itertools.count()


@pytest.fixture(scope="module")
def code():
    return native.build(ENTRY)


@pytest.fixture
def door(code, monkeypatch, tmp_path):
    """The way of a CUDA device from lowering to the driver, on this CPU."""
    fake = FakeCuda(tmp_path / "driver.so")
    fake.handler = native._typed(load_host_code(code, "hgg-test"))
    target = f"hgg_test_{next(_numbers)}"
    jax.ffi.register_ffi_target(target, jax.ffi.pycapsule(fake.handler.hgg_test), platform="cpu")
    monkeypatch.setattr(native, "TARGET", target)
    monkeypatch.setattr(native, "load", lambda: fake.handler)
    for name in ("_kept", "_faults"):
        monkeypatch.setattr(native, name, {})
    for module in (plans, triton_backend, native):
        monkeypatch.setattr(module, "get_runtime", lambda _: fake)
    monkeypatch.setattr(get_backend("triton"), "_properties", {})  # it remembers devices
    monkeypatch.setattr(executable, "compile_kernel", lambda spec: compile_nothing(fake, spec))
    monkeypatch.setattr(executable, "scan_function", lambda runtime, device, special=None: fake.function(f"scan {special}"))
    monkeypatch.setattr(executable, "scan_is_loaded", lambda *_: True)
    module = types.SimpleNamespace(get_function=lambda name, _: fake.function(name))
    monkeypatch.setattr(executable, "_module_of", lambda *_: module)
    monkeypatch.setattr(jax, "local_devices", lambda backend=None: [types.SimpleNamespace(local_hardware_id=0)])
    monkeypatch.setenv("HIPGROUPGEMM_TUNING_STORE", "off")
    return fake


def settings(numbers=BASIC, **changes):
    return Settings(numbers, "bfloat16", backend="triton").change(**changes)


def run(chosen, operands):
    """The lowered program, compiled and run; the addresses that XLA's buffers had are the handler's `seen`."""
    return jax.jit(lambda *arrays: lowering._gpu("cuda", *arrays, settings=chosen))(*operands)


def seen(door):
    count = ctypes.c_uint64.in_dll(door.handler, "seen_count").value
    return list((ctypes.c_uint64 * 16).in_dll(door.handler, "seen")[:count])


def launched_by_plan(door, chosen, operands, addresses, monkeypatch):
    """What the plan's own executable launches with operands at these addresses."""
    slots = [*chosen.roles, "out", "scratch"]
    at = dict(zip(slots, addresses, strict=True))
    at = {role: address or at["scratch"] for role, address in at.items()}
    _, problem = problem_of(shapes_of(operands), chosen, Device("cuda", 0))
    config = problem.config

    class Scratch:
        def __init__(self, *_):
            pass

        def pointer(self, _):
            return at["scratch"]

    monkeypatch.setattr(executable, "Scratch", Scratch)
    most = chosen.max_multiprocessors
    with plans.GroupedMatmulPlan(config, "triton", Device("cuda", 0), use_store=False, max_multiprocessors=most) as plan:
        ready = plan._backend.prepare(plan.key, plan.device, plan.algorithm, 0)
        sizes = operands[2]
        view = ArrayView(0, problem.sizes_shape, problem.sizes_strides, np.dtype(sizes.dtype.name), plan.device, "jax")
        offset = chosen.group_offset or 0
        if chosen.has_group_offset:
            offset = ArrayView(at["group_offset"], (1,), (4,), np.dtype("int32"), plan.device, "jax")
        pointers = {role: at[role] for role in slots if role not in ("scratch", "group_offset")}
        ready._scratch = Scratch()
        door.ran.clear()
        ready.execute(Arguments(config, pointers, view, False, offset, "zero", "none", 0))
    return [(*launch, STREAM) for launch in door.ran]


def fault_inside(door, launches, scratch):
    """Launches with the fault flag, the one thing that lies elsewhere, in the scratch."""
    (faults,) = native._faults.values()
    kept, inside = struct.pack("<Q", faults.base), struct.pack("<Q", scratch)  # where the flag is the first section
    return [(*launch[:5], launch[5].replace(kept, inside), launch[6]) for launch in launches]


CASES = {
    "rows, scanned by every block": (settings(), (64, 64), (6, 64, 64), 6, "int32"),
    "rows behind a scan": (settings(), (64, 64), (1500, 64, 64), 1500, "int32"),
    "rows, sizes of 64 bits": (settings(), (63, 64), (6, 64, 64), 6, "int64"),
    "rows, sizes of 8 bits": (settings(), (63, 64), (6, 64, 64), 6, "uint8"),
    "transposed weights": (settings(DGRAD), (65, 64), (6, 72, 64), 6, "int32"),
    "weight gradient": (settings(WGRAD), (64, 64), (64, 128), 6, "int32"),
    "weight gradient, split": (settings(WGRAD, out_type="float32"), (65536, 64), (65536, 64), 2, "int32"),
    "batch": (settings(BATCHED), (3, 8, 64), (3, 64, 64), 2, "int32"),
    "odd sizes, portable": (settings(), (33, 65), (6, 65, 63), 6, "int32"),
    "a bias": (settings(has_bias=True), (33, 64), (6, 64, 63), 6, "int32"),
    "alpha": (settings(alpha=0.5), (64, 64), (6, 64, 64), 6, "int32"),
    "few multiprocessors": (settings(max_multiprocessors=5), (2048, 64), (6, 64, 64), 6, "int32"),
    "an offset on the host": (settings(group_offset=2), (64, 64), (6, 64, 64), 9, "int32"),
    "an offset on the device": (settings(has_group_offset=True), (64, 64), (6, 64, 64), 9, "int32"),
    "no rows": (settings(WGRAD), (0, 64), (0, 64), 3, "int32"),
    "no k": (settings(), (64, 0), (6, 0, 64), 6, "int32"),
}


def operands_of(case, rng):
    chosen, lhs, rhs, groups, kind = case
    dtype = jnp.float32 if chosen.out_type == "float32" else jnp.bfloat16
    made = [jnp.asarray(rng.standard_normal(shape), dtype) for shape in (lhs, rhs)]
    made.append(np.asarray(rng.integers(0, 3, groups), kind))
    if chosen.has_group_offset:
        made.append(jnp.asarray([2], jnp.int32))
    if chosen.has_bias:
        made.append(jnp.asarray(rng.standard_normal((rhs[0], rhs[2])), dtype))
    return made


@pytest.mark.parametrize("name", CASES)
def test_the_launches_are_the_plan_s(name, door, rng, monkeypatch):
    chosen = CASES[name][0]
    with jax.enable_x64(True) if hasattr(jax, "enable_x64") else jax.experimental.enable_x64():
        operands = [jnp.asarray(x) for x in operands_of(CASES[name], rng)]
        program = jax.jit(lambda *arrays: lowering._gpu("cuda", *arrays, settings=chosen))
        for _ in range(3):  # other addresses each time
            program(*operands).block_until_ready()
            got, addresses = door.told(), seen(door)
            assert len(addresses) == len(chosen.roles) + 2 and got
            with monkeypatch.context() as patch:
                wanted = launched_by_plan(door, chosen, operands, addresses, patch)
            assert fault_inside(door, got, addresses[-1]) == wanted
            operands = [x + jnp.zeros_like(x) for x in operands]
    assert door.asked_capturing.value == 0  # a command buffer may be recording
    assert door.current.value == CONTEXT
    expected = 1 if name in ("rows, scanned by every block", "transposed weights", "alpha", "batch") else None
    assert expected is None or len(got) == expected


def test_cases_reach_every_kind_of_launch(door, rng):
    kinds = set()
    for case in CASES.values():
        run(case[0], operands_of(case, rng)).block_until_ready()
        for function, *_, attribute, data, _ in door.told():
            kinds.add(function.split(" ")[0])
            kinds |= {"programmatic"} if attribute else set()
            kinds |= {"tensor maps"} if "STAGES" in function else set()  # a constant of the kernels that have them
            assert data
    assert kinds >= {"scan", "contracting", "non_contracting", "add_partials", "programmatic", "tensor maps"}


def test_one_recipe_serves_all_programs_of_a_problem(door, rng):
    operands = operands_of(CASES["rows behind a scan"], rng)
    run(settings(), operands), run(settings(), [x + x for x in operands])
    assert len(native._kept) == 1
    run(settings(alpha=2.0), operands)
    assert len(native._kept) == 2


def test_the_context_is_made_current_and_restored(door, rng):
    operands = operands_of(CASES["a bias"], rng)
    door.current.value = 3
    run(CASES["a bias"][0], operands).block_until_ready()
    assert door.told() and door.current.value == 3


def test_a_failing_driver_is_an_error_of_the_program(door, rng):
    operands = operands_of(CASES["a bias"], rng)
    run(CASES["a bias"][0], operands).block_until_ready()
    door.failing.value = 701
    with pytest.raises(Exception, match="launch 0 failed with the driver's status 701"):
        run(CASES["a bias"][0], operands).block_until_ready()


def test_a_recipe_of_another_process_is_refused(door):
    out = jax.ShapeDtypeStruct((4,), np.float32)
    with pytest.raises(Exception, match="has no recipe 99"):
        jax.jit(lambda x: jax.ffi.ffi_call(native.TARGET, out)(x, recipe=np.int64(99)))(jnp.ones(4)).block_until_ready()


def test_wrong_sizes_are_told(door, rng):
    run(settings(), operands_of(CASES["rows, scanned by every block"], rng)).block_until_ready()
    run(settings(WGRAD), operands_of(CASES["weight gradient"], rng)).block_until_ready()
    native.check()
    (faults,) = native._faults.values()
    ctypes.memmove(faults.base + 32, struct.pack("<iiqqq", 2, 0, 4, 9, 7), 32)  # as the scan would write it
    with pytest.raises(ValueError, match="group 4"):
        native.check()
    native.check()


def test_threads_do_not_mix_addresses(door, rng):
    """Two programs of one recipe at once: each launch has the addresses of one call."""
    from concurrent.futures import ThreadPoolExecutor

    case = CASES["rows, scanned by every block"]
    chosen = case[0]
    program = jax.jit(lambda *arrays: lowering._gpu("cuda", *arrays, settings=chosen))
    sets = [operands_of(case, rng) for _ in range(4)]
    sets = [[jnp.asarray(x) for x in operands] for operands in sets]
    program(*sets[0]).block_until_ready()
    door.told()
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda i: program(*sets[i % 4]).block_until_ready(), range(40)))
    pairs = {(x[0].unsafe_buffer_pointer(), x[1].unsafe_buffer_pointer()) for x in sets}
    words = [set(struct.unpack(f"<{len(data) // 8}Q", data[: len(data) // 8 * 8])) for *_, data, _ in door.told()]
    assert len(words) == 40
    assert all(sum(a in found and b in found for a, b in pairs) == 1 for found in words)


def test_where_it_cannot_be_built(monkeypatch, tmp_path):
    monkeypatch.setenv("HIPGROUPGEMM_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("CXX", "false")
    with pytest.raises(native.NativeDoorError, match="failed"):
        native.build()
    monkeypatch.setattr(jax.ffi, "include_dir", lambda: str(tmp_path))
    with pytest.raises(native.NativeDoorError, match="no FFI headers"):
        native.build()


def test_the_command_builds_ahead_of_time(monkeypatch, tmp_path, capsys):
    from hipgroupgemm.integrations.jax.__main__ import main

    monkeypatch.setenv("HIPGROUPGEMM_CACHE_DIR", str(tmp_path))
    assert main(["build"]) == 0 and "is built" in capsys.readouterr().out
    monkeypatch.setenv("CXX", "false")
    assert main(["build"]) == 0  # from the cache
    monkeypatch.setenv("HIPGROUPGEMM_CACHE_DIR", str(tmp_path / "other"))
    assert main(["build"]) == 1 and "cannot be built: false failed" in capsys.readouterr().err
    assert main([]) == 2 and "usage" in capsys.readouterr().err
