"""Every kernel of the Triton backend compiles for sm_90, gfx942 and gfx950, without a device.

A sample of the algorithms by default; all of them with HIPGROUPGEMM_ALL_ALGORITHMS=1.
"""

from __future__ import annotations

import collections
import copy
import dataclasses
import os
import re
import shutil

import numpy as np
import pytest

import hipgroupgemm as hgg
from hipgroupgemm.backends.base import AlgorithmLimits
from hipgroupgemm.backends.triton import TritonBackend, compiler, defaults, kernel_config, specs
from hipgroupgemm.backends.triton import backend as backend_module
from hipgroupgemm.config import GroupedGemmConfig, RaggedDotMode
from hipgroupgemm.operands.arrays import ArraySpec
from hipgroupgemm.operands.views import Device
from hipgroupgemm.problem.dimension_numbers import BASIC, RaggedDotDimensionNumbers

DGRAD = RaggedDotDimensionNumbers((((1,), (2,)), ((), ())), (0,), (0,))
WGRAD = RaggedDotDimensionNumbers((((0,), (0,)), ((), ())), (0,), ())
BATCH = RaggedDotDimensionNumbers((((2,), (1,)), ((0,), (0,))), (0,), ())
DEVICES = {
    "sm_90": kernel_config.DeviceProperties(compiler.target_of("sm_90"), 132, 232448),
    "sm_80": kernel_config.DeviceProperties(compiler.target_of("sm_80"), 108, 166912),
    "gfx942": kernel_config.DeviceProperties(compiler.target_of("gfx942"), 304, 65536),
    "gfx950": kernel_config.DeviceProperties(compiler.target_of("gfx950"), 256, 163840),
}
ALL = os.environ.get("HIPGROUPGEMM_ALL_ALGORITHMS") == "1"


def config_of(what, dtype="bfloat16", **kwargs):
    """A config of one of the classes, aligned unless the name says otherwise."""
    m, n, k, g = (1000, 264, 136, 7) if not what.startswith("odd") else (77, 45, 37, 3)
    what = what.removeprefix("odd ")
    sizes = ArraySpec((g,), "int32")
    if what == "forward":
        return hgg.config_for_ragged_dot(ArraySpec((m, k), dtype), ArraySpec((g, k, n), dtype), sizes, BASIC, **kwargs)
    if what == "data gradient":
        return hgg.config_for_ragged_dot(ArraySpec((m, k), dtype), ArraySpec((g, n, k), dtype), sizes, DGRAD, **kwargs)
    if what == "weight gradient":
        return hgg.config_for_ragged_dot(ArraySpec((m, k), dtype), ArraySpec((m, n), dtype), sizes, WGRAD, **kwargs)
    return hgg.config_for_ragged_dot(ArraySpec((g, m, k), dtype), ArraySpec((g, k, n), dtype), sizes, BATCH, **kwargs)


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("HIPGROUPGEMM_CACHE_DIR", str(tmp_path / "cache"))
    compiler._compiled.clear()


@pytest.mark.parametrize("what", ["forward", "data gradient", "weight gradient", "batch", "odd forward", "odd weight gradient"])
@pytest.mark.parametrize("architecture", ["sm_90", "gfx942", "gfx950"])
def test_algorithms_compile(architecture, what):
    device, key = DEVICES[architecture], config_of(what).key()
    found = defaults.ordered(key, device)
    assert found, "nothing runs this config"
    different = list({specs.spec_of(config, key, device): config for _, config in reversed(found)}.values())  # the swizzle is no constant
    for config in different if ALL else [different[0], different[-1]]:
        print(config.name)
        kernel = compiler.compile_kernel(specs.spec_of(config, key, device))
        assert kernel.shared <= device.shared_memory, config.name
        assert kernel.code[:4] == b"\x7fELF"
        assert kernel.threads % device.target.warp_size == 0
        if config.kernel == "tma":
            tables = specs.table_bytes(specs.room_for_groups(config, key, device))
            assert kernel.shared <= config.shared_bytes(2, 2) + tables, f"{config.name} takes more than it was thought to"
            behind_a_scan = compiler.compile_kernel(specs.spec_of(config, key, device, scanning=False))
            assert behind_a_scan.shared <= config.shared_bytes(2, 2), f"{config.name} takes more than it was thought to"
        if config.split > 1:
            assert compiler.compile_kernel(specs.add_partials_spec(config, key, device)).code


def listed(config):
    """The same problem with a list."""
    return dataclasses.replace(config, **{"out_listed" if config.ragged_mode is RaggedDotMode.CONTRACTING else "rhs_listed": True})


@pytest.mark.parametrize("what", ["forward", "data gradient", "weight gradient", "odd forward", "odd weight gradient"])
@pytest.mark.parametrize("architecture", ["sm_90", "gfx942", "gfx950"])
def test_lists_compile_and_have_the_algorithms_of_the_stacked_array(architecture, what, monkeypatch):
    monkeypatch.setattr(kernel_config, "HOPPER_FEATURES", kernel_config.HOPPER_FEATURES | {"rhs_listed", "out_listed"})  # as they would be
    device, key = DEVICES[architecture], listed(config_of(what).key())
    found = defaults.ordered(key, device)
    assert found == defaults.ordered(config_of(what).key(), device)
    kinds = {(k.kernel, k.subtiles == 0, k.split > 1): k for _, k in reversed(found)}
    for kernel in kinds.values() if ALL else list(kinds.values())[:2]:
        print(kernel.name)
        compiled = compiler.compile_kernel(specs.spec_of(kernel, key, device))
        assert compiled.shared <= device.shared_memory
        assert any(name.endswith("_maps") for name in compiled.names) == (kernel.kernel == "tma")
        if kernel.split > 1:
            assert compiler.compile_kernel(specs.add_partials_spec(kernel, key, device)).code


def test_lists_are_left_to_the_portable_kernels():
    """Until tables of tensor maps have been right on hardware."""
    key = listed(config_of("forward").key())
    assert "tma" not in {k.kernel for _, k in defaults.ordered(key, DEVICES["sm_90"])}


@pytest.mark.parametrize("what", ["forward", "weight gradient"])
@pytest.mark.parametrize("architecture", ["sm_80", "gfx942"])
def test_aligned_arrays_of_a_list_are_moved_in_vectors_as_wide(architecture, what, monkeypatch):
    """What is known of the addresses in a table comes through to loads and stores: they are those of the stacked array, with one more
    load for each address. What is not aligned is moved in small pieces."""
    import triton

    texts, compile_ = [], triton.compile
    monkeypatch.setattr(triton, "compile", lambda *a, **k: texts.append((made := compile_(*a, **k)).asm) or made)
    device, text = DEVICES[architecture], "ptx" if architecture == "sm_80" else "amdgcn"
    moves = r"cp\.async\.c[ga]|0x10;|[ls][dt]\.global[.\w]*" if text == "ptx" else r"(?:global|buffer)_(?:load|store)\w*"
    found = []
    for form in (lambda c: c, listed, lambda c: listed(dataclasses.replace(c, rhs_alignment=2, output_alignment=2, c_alignment=2))):
        m, n, k, g = 1024, 256, 128, 8
        rhs, numbers = ((g, k, n), BASIC) if what == "forward" else ((m, n), WGRAD)
        config = hgg.config_for_ragged_dot(ArraySpec((m, k), "bfloat16"), ArraySpec(rhs, "bfloat16"), ArraySpec((g,), "int32"), numbers)
        key = form(config).key()
        kernel = next(k for _, k in defaults.ordered(key, device) if k.tile_n >= 64 and not k.swap and k.split == 1)
        compiler.compile_kernel(specs.spec_of(kernel, key, device))
        found.append(collections.Counter(re.findall(moves, texts[-1][text])))
    stacked, aligned, other = found
    assert (aligned - stacked).total() == 1 and not stacked - aligned
    assert (other - stacked).total() > 10


@pytest.mark.parametrize("architecture", ["sm_90", "sm_80", "gfx942", "gfx950"])
def test_every_variant_of_a_mode_compiles(architecture):
    device = DEVICES[architecture]
    c, bias = ArraySpec((1000, 264), "float32"), ArraySpec((7, 264), "float32")
    variants = [
        config_of("forward", beta=1.0, c=c, bias=bias, preferred_element_type=np.float32),
        config_of("forward", "float32"),
        config_of("weight gradient", "float32", precision="tensorfloat32"),
        config_of("odd data gradient", "float16"),
    ]
    for config in variants:
        _, kernel = defaults.ordered(config.key(), device)[0]
        assert compiler.compile_kernel(specs.spec_of(kernel, config.key(), device)).code


def test_a_kernel_comes_back_from_disk(tmp_path):
    device, key = DEVICES["gfx942"], config_of("odd forward").key()
    spec = specs.spec_of(defaults.ordered(key, device)[0][1], key, device)
    first = compiler.compile_kernel(spec)
    compiler._compiled.clear()
    build, compiler._build = compiler._build, None  # nothing may be compiled now
    try:
        assert compiler.compile_kernel(spec) == first
    finally:
        compiler._build = build


def test_extents_of_zero_have_algorithms():
    for device in DEVICES.values():
        for m, n, k, g in ((0, 8, 8, 2), (8, 0, 8, 2), (8, 8, 0, 2), (8, 8, 8, 0), (0, 0, 0, 0)):
            sizes = ArraySpec((g,), "int32")
            forward = hgg.config_for_ragged_dot(ArraySpec((m, k), "bfloat16"), ArraySpec((g, k, n), "bfloat16"), sizes, BASIC)
            weights = hgg.config_for_ragged_dot(ArraySpec((m, k), "bfloat16"), ArraySpec((m, n), "bfloat16"), sizes, WGRAD)
            batch = hgg.config_for_ragged_dot(ArraySpec((g, m, k), "bfloat16"), ArraySpec((g, k, n), "bfloat16"), sizes, BATCH)
            assert all(defaults.ordered(config.key(), device) for config in (forward, weights, batch))


def test_names_and_indices():
    for architecture, device in DEVICES.items():
        for mode in RaggedDotMode:
            names = [config.name for config in kernel_config.kernel_configs(mode, device.target)]
            assert len(set(names)) == len(names), f"{architecture} {mode}"


def random_config(rng):
    """Of any shape class."""
    m, n, k, g = (int(2 ** rng.uniform(low, high)) for low, high in ((4, 17), (4, 13), (4, 13), (0, 9)))
    what = rng.choice(["forward", "data gradient", "weight gradient", "batch"])
    lhs = {"batch": (min(g, 8), min(m, 4096), k)}.get(what, (m, k))
    rhs = {"forward": (g, k, n), "data gradient": (g, n, k), "weight gradient": (m, n), "batch": (min(g, 8), k, n)}[what]
    numbers = {"forward": BASIC, "data gradient": DGRAD, "weight gradient": WGRAD, "batch": BATCH}[what]
    sizes = ArraySpec((min(g, 8) if what == "batch" else g,), "int32")
    return hgg.config_for_ragged_dot(ArraySpec(lhs, "bfloat16"), ArraySpec(rhs, "bfloat16"), sizes, numbers)


def test_the_table_of_defaults_names_algorithms_that_exist(rng):
    device = DEVICES["sm_90"]
    for mode, table in defaults.DEFAULTS.items():
        names = {config.name for config in kernel_config.kernel_configs(mode, device.target)}
        for shape_class, found in table.items():
            assert set(found) <= names, f"{mode} {shape_class}: {set(found) - names}"
            assert len(set(found)) == len(found), shape_class
    # the table's entries are those that the rule gives, no more and no less
    reached = {mode: set() for mode in defaults.DEFAULTS}
    for _ in range(5000):
        key = random_config(rng).key()
        mode = RaggedDotMode.CONTRACTING if key.ragged_mode is RaggedDotMode.CONTRACTING else RaggedDotMode.NON_CONTRACTING
        reached[mode].add(defaults.shape_class(key, device))
    assert reached == {mode: set(table) for mode, table in defaults.DEFAULTS.items()}


def test_the_first_is_the_table_s_and_has_the_usual_swizzle(rng):
    for architecture, device in DEVICES.items():
        for _ in range(50):
            key = random_config(rng).key()
            found = defaults.ordered(key, device)
            assert len({index for index, _ in found}) == len(found)
            configs = kernel_config.kernel_configs(key.ragged_mode, device.target)
            assert all(configs[index] is kernel for index, kernel in found)
            (_, first), *_ = found
            assert first.swizzle == first.usual_swizzle(key)
            if architecture == "sm_90" and kernel_config.hopper_refusal(key, device.target) is None:
                mode = RaggedDotMode.CONTRACTING if key.ragged_mode is RaggedDotMode.CONTRACTING else RaggedDotMode.NON_CONTRACTING
                table = defaults.DEFAULTS[mode][defaults.shape_class(key, device)]
                able = {kernel.name for _, kernel in found}
                assert [kernel.name for _, kernel in found[: len(table)]][: len(able & set(table))] == [n for n in table if n in able]


def test_versions_tell_revisions_of_the_kernels_apart(tmp_path, monkeypatch):
    found = TritonBackend().versions(Device("cuda"))
    assert found.keys() == {"triton", "triton_kernels"} and re.fullmatch("[0-9a-f]{12}", found["triton_kernels"])
    digest = backend_module._kernels_digest.__wrapped__
    folder = shutil.copytree(compiler.KERNELS, tmp_path / "kernels")
    monkeypatch.setattr(backend_module, "KERNELS", folder)
    digests = {found["triton_kernels"]}
    assert digest() in digests
    jitted = [path for path in folder.parent.rglob("*.py") if re.search(r"^@[\w.]*jit\b", path.read_text(), re.MULTILINE)]
    assert len(jitted) >= 4
    for path in jitted:
        path.write_text(path.read_text() + "\n")
        digests.add(digest())
    assert len(digests) == 1 + len(jitted)


def test_what_keeps_the_sm_90_kernels_away():
    target = DEVICES["sm_90"].target
    assert kernel_config.hopper_refusal(config_of("forward").key(), target) is None
    assert "aligned" in kernel_config.hopper_refusal(config_of("odd forward").key(), target)
    assert "float32" in kernel_config.hopper_refusal(config_of("forward", "float32").key(), target)
    assert "sm_80 is not sm_90" in kernel_config.hopper_refusal(config_of("forward").key(), DEVICES["sm_80"].target)
    c, bias = ArraySpec((1000, 264), "bfloat16"), ArraySpec((7, 264), "bfloat16")
    assert kernel_config.hopper_refusal(config_of("forward", c=c, beta=1.0, bias=bias).key(), target) == "bias, c"


def test_a_feature_that_nobody_thought_of_reaches_no_kernel(monkeypatch):
    config, device = config_of("forward").key(), DEVICES["sm_90"]
    backend = TritonBackend()
    monkeypatch.setattr(backend, "properties", lambda _: device)
    assert backend.can_handle(config, Device("cuda", 0)) is None
    for method in ("features", "layouts"):
        with monkeypatch.context() as patch:
            patch.setattr(GroupedGemmConfig, method, lambda _: frozenset(["teleported_rows"]))
            assert kernel_config.hopper_refusal(config, device.target) == "teleported_rows"
            assert "teleported_rows" in backend.can_handle(config, Device("cuda", 0))
            assert all(kernel.kernel != "tma" for _, kernel in defaults.ordered(config, device))
    for field in ("type_a", "type_b", "type_d"):
        strange = copy.copy(config)
        object.__setattr__(strange, field, "float8_e4m3fn")
        assert field in kernel_config.hopper_refusal(strange, device.target)
        operand = {"type_a": "lhs", "type_b": "rhs", "type_d": "out"}[field]
        assert f"{operand} of type float8_e4m3fn: not offered" in backend.can_handle(strange, Device("cuda", 0))


@pytest.mark.parametrize(("architecture", "told"), [("sm_90", "aligned"), ("sm_80", "sm_80 is not sm_90"), ("gfx942", None)])
def test_hopper_is_spoken_of_on_nvidia_devices_alone(architecture, told, monkeypatch):
    device = DEVICES[architecture]
    monkeypatch.setattr(backend_module, "TritonExecutable", lambda *arguments: arguments[-1])
    monkeypatch.setattr(backend_module, "get_runtime", lambda kind: None)
    backend = TritonBackend()
    monkeypatch.setattr(backend, "properties", lambda _: device)
    key, where = config_of("odd forward").key(), Device("cuda" if device.target.backend == "cuda" else "rocm", 0)
    (algorithm,) = backend.algorithms(key, where, AlgorithmLimits(1))
    why = backend.prepare(key, where, algorithm, 0)
    assert told in why if told else why is None


def test_a_cache_of_triton_s_that_others_can_write_is_left_alone(tmp_path, monkeypatch, caplog):
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(shared))
    device, key = DEVICES["gfx942"], config_of("odd forward").key()
    with caplog.at_level("WARNING", "hipgroupgemm.triton"):
        assert compiler.compile_kernel(specs.spec_of(defaults.ordered(key, device)[0][1], key, device)).code[:4] == b"\x7fELF"
    assert not list(shared.iterdir()) and not caplog.records


def test_a_cache_of_triton_s_that_cannot_be_written(monkeypatch, caplog):
    monkeypatch.setenv("TRITON_CACHE_DIR", "/dev/null/cache")
    monkeypatch.setenv("HIPGROUPGEMM_CACHE_DIR", "/dev/null/ours")
    device, key = DEVICES["gfx942"], config_of("odd forward").key()
    with caplog.at_level("WARNING", "hipgroupgemm"):
        for _, kernel in defaults.ordered(key, device)[:2]:
            assert compiler.compile_kernel(specs.spec_of(kernel, key, device)).code[:4] == b"\x7fELF"
    (warning,) = caplog.records  # that nothing can be kept
    assert "/dev/null/ours" in warning.getMessage()
    from triton import knobs

    assert knobs.cache.dir == "/dev/null/cache", "it was left changed"
