"""The CPU's workbench: operands, judge, snapshots, times."""

from __future__ import annotations

import harness_contract as contract
import numpy as np
import pytest
from harness_contract import CASES
from harness_contract_tests import ContractTests

from hipgroupgemm.backends.base import AlgorithmLimits
from hipgroupgemm.backends.reference import ReferenceBackend
from hipgroupgemm.measure.harness import harness_for


@pytest.fixture
def bench():
    with harness_for("cpu") as bench:
        yield bench


class TestContract(ContractTests):
    """On this bench."""


@pytest.mark.parametrize("name", CASES)
def test_the_reference_passes_on_benched_operands(bench, name):
    case = CASES[name]
    backend = ReferenceBackend()
    algorithm = backend.algorithms(case.config, bench.device, AlgorithmLimits())[0]
    executable = backend.prepare(case.config, bench.device, algorithm, bench.stream)
    operands = bench.operands(case.config, seed=8)
    arguments = bench.arguments(operands, bench.sizes(case.host_sizes))
    bench.poison(operands)
    bench.flush()
    assert bench.time(lambda: executable.execute(arguments)) > 0
    bench.synchronize()
    verdict = bench.check(operands, case.host_sizes)
    assert verdict.reason == ""
    before = bench.snapshot(operands)
    executable.execute(arguments)
    assert bench.same(operands, before) == 0


def test_8_bit_results_fit_their_type(bench):
    config = contract._config(contract.FORWARD, *(contract.spec(s, "float8_e4m3fn") for s in ((40, 900), (2, 900, 33))), [30, 8])
    case = contract.Case("8-bit", config, [30, 8])
    operands = contract.right_operands(bench, case)
    assert np.isfinite(bench.values(operands).astype(np.float64)).all()
    assert bench.check(operands, case.host_sizes).reason == ""
    contract.change(bench, operands, (0, 0, 29, 32), 100.0)
    assert "1 of" in bench.check(operands, case.host_sizes).reason
