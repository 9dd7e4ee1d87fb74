"""A problem says what it needs, and a backend that does not declare it refuses: nothing is computed as something else."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

import hipgroupgemm as hgg
from hipgroupgemm import Device, Epilogue, GroupedGemmConfig, config_types
from hipgroupgemm.backends import backend_kinds, get_backend, select_backend
from hipgroupgemm.backends.reference import ReferenceBackend
from hipgroupgemm.operands.arrays import ArraySpec as Spec

BACKENDS = list(backend_kinds())


def config_of(m=40, k=16, n=24, g=3, dtype="bfloat16", **settings) -> GroupedGemmConfig:
    return hgg.config_for_ragged_dot(Spec((m, k), dtype), Spec((g, k, n), dtype), Spec((g,), "int32"), **settings)


def device_of(name: str) -> Device:
    return Device(backend_kinds()[name][0])


def reason_of(name: str, config: GroupedGemmConfig) -> str:
    reason = get_backend(name).can_handle(config, device_of(name))
    assert reason is not None, f"{name} would compute it"
    return reason


@dataclasses.dataclass(frozen=True, kw_only=True)
class FutureConfig(GroupedGemmConfig):
    """A config of tomorrow: a field that no backend of today has heard of."""

    sparsity: str | None = None

    def __post_init__(self) -> None:
        """Its own rules would stand here."""

    __hash__ = GroupedGemmConfig.__hash__


@dataclasses.dataclass(frozen=True, kw_only=True)
class FactoryConfig(FutureConfig):
    """Fields without a default value that could be compared."""

    scales: int = dataclasses.field(default_factory=int)

    __hash__ = GroupedGemmConfig.__hash__


@dataclasses.dataclass(frozen=True)
class FutureEpilogue(Epilogue):
    """An epilogue of tomorrow."""

    dropout: float = 0.0


def future(config: GroupedGemmConfig, **fields) -> FutureConfig:
    known = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    return FutureConfig(**{**known, **fields})


@pytest.mark.parametrize("name", BACKENDS)
def test_an_unheard_of_feature_is_refused_by_name(name):
    plain = config_of()
    assert "sparsity" not in future(plain).features()
    assert "sparsity" in reason_of(name, future(plain, sparsity="2:4"))
    known = {field.name: getattr(plain, field.name) for field in dataclasses.fields(plain)}
    assert "scales" in reason_of(name, FactoryConfig(**known, scales=5))
    assert "dropout" in reason_of(name, dataclasses.replace(plain, epilogue=FutureEpilogue(dropout=0.5)))
    assert "activation" in reason_of(name, dataclasses.replace(plain, epilogue=Epilogue(activation="silu")))
    for field in ("lhs_rows_extent", "out_rows_extent"):
        assert field.removesuffix("_extent") in reason_of(name, dataclasses.replace(plain, **{field: 80}))


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("role", ["a", "b", "d"])
def test_an_unheard_of_type_is_refused_by_name(name, role, monkeypatch):
    monkeypatch.setitem(config_types.FLOAT_BYTES, "posit16", 2)
    fields = {"type_d": "posit16", "type_c": "posit16"} if role == "d" else {f"type_{role}": "posit16"}
    assert "posit16" in reason_of(name, dataclasses.replace(config_of(), **fields))


def test_nobody_computes_what_nobody_declares():
    config = future(config_of(), sparsity="2:4")
    for device in ("cpu", "cuda", "rocm"):
        with pytest.raises(NotImplementedError, match="sparsity"):
            select_backend(config, Device(device))
        with pytest.raises(NotImplementedError, match="sparsity"):
            hgg.GroupedMatmulPlan(config, device=device, use_store=False)


def test_features_by_name():
    c, bias = Spec((40, 24), "bfloat16"), Spec((3, 24), "bfloat16")
    assert config_of().features() == frozenset()
    assert config_of(alpha=2.0, c=c, beta=1.0, bias=bias).features() == {"alpha", "c", "bias"}
    assert config_of(preferred_element_type="float32").features() == {"wide_output"}
    assert config_of(dtype="float32", preferred_element_type="bfloat16").features() == {"narrow_output"}
    assert config_of(dtype="float32", precision="tensorfloat32").features() == {"tf32"}
    mixed = hgg.config_for_ragged_dot(Spec((40, 16), "float16"), Spec((3, 16, 24), "float32"), Spec((3,), "int32"))
    assert mixed.features() == {"mixed_types"}
    part = hgg.config_for_ragged_dot(Spec((40, 16), "float16"), Spec((3, 16, 24), "float16"), Spec((8,), "int32"), group_offset=2)
    assert part.features() == {"group_offset"}
    strided = hgg.config_for_ragged_dot(Spec((40, 16), "float32", strides=(256, 8)), Spec((3, 16, 24), "float32"), Spec((3,), "int32"))
    assert strided.layouts() == {"lhs_inner_stride"} and config_of().layouts() == frozenset()


def test_extents_of_rows_are_kept_apart():
    config = dataclasses.replace(config_of(), lhs_rows_extent=100, out_rows_extent=70)
    assert (config.lhs_rows, config.m, config.out_rows) == (100, 40, 70)
    assert (config_of().lhs_rows, config_of().out_rows) == (40, 40)
    other = dataclasses.replace(config_of(), lhs_rows_extent=300, out_rows_extent=90)
    assert config.key() == other.key() != config_of().key()  # extents are values, their presence is part of the key
    assert config == GroupedGemmConfig.from_json(config.to_json())


def test_limit_and_scale_of_an_activation_are_values():
    configs = [dataclasses.replace(config_of(), epilogue=Epilogue(activation="swiglu_clamped", gate="halves", limit=x)) for x in (5.0, 7.0)]
    assert configs[0] != configs[1] and configs[0].key() == configs[1].key()
    assert Epilogue() == Epilogue.DEFAULT and Epilogue(bias=True) == Epilogue.BIAS


def test_a_backend_without_alpha_refuses_a_call_that_brings_one():
    class NoAlpha(ReferenceBackend):
        name = "no alpha"
        features = ReferenceBackend.features - {"alpha"}

    hgg.register_backend(NoAlpha(), ("cpu",))
    try:
        lhs, rhs = np.ones((5, 4), np.float32), np.ones((2, 4, 6), np.float32)
        assert (hgg.ragged_dot(lhs, rhs, [2, 3], backend="no alpha") == 4).all()
        with pytest.raises(NotImplementedError, match="does not have alpha"):
            hgg.ragged_dot(lhs, rhs, [2, 3], alpha=2.0, backend="no alpha")
        plan = hgg.GroupedMatmulPlan(hgg.config_for_ragged_dot(lhs, rhs, [2, 3]), "no alpha", "cpu")
        with plan, pytest.raises(NotImplementedError, match="does not have alpha"):
            plan.execute(lhs, rhs, [2, 3], alpha=2.0)
    finally:
        hgg.unregister_backend("no alpha")


@pytest.mark.parametrize("alphas", [(2.0, 1.0, 3.0), (1.0, 2.0, 3.0)])
def test_the_first_call_s_alpha_has_no_say_in_which_backend_others_get(alphas):
    calls = []

    class NoAlpha(ReferenceBackend):
        name = "no alpha"
        features = ReferenceBackend.features - {"alpha"}

        def prepare(self, config, device, algorithm, stream):
            calls.append(config)
            return super().prepare(config, device, algorithm, stream)

        def algorithms(self, config, device, limits):
            return [dataclasses.replace(one, backend="no alpha") for one in super().algorithms(config, device, limits)]

    hgg.register_backend(NoAlpha(), ("cpu",), first=True)
    try:
        hgg.clear_plan_cache()
        lhs, rhs = np.ones((5, 4), np.float32), np.ones((2, 4, 6), np.float32)
        for _ in range(2):
            for alpha in alphas:
                assert (hgg.ragged_dot(lhs, rhs, [2, 3], alpha=alpha) == 4 * alpha).all()
        assert len(calls) == 1  # alpha = 1 is computed by the backend that comes first
    finally:
        hgg.unregister_backend("no alpha")
