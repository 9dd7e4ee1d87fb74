"""The CPU's workbench: operands, judge, snapshots, times."""

from __future__ import annotations

import numpy as np
import pytest
import workbench_contract as contract
from workbench_contract import CASES

from hipgroupgemm.backends.base import AlgorithmLimits
from hipgroupgemm.backends.reference import ReferenceBackend
from hipgroupgemm.tuning.workbench import workbench_for


@pytest.fixture
def bench():
    with workbench_for("cpu") as bench:
        yield bench


@pytest.mark.parametrize("name", CASES)
def test_operands_are_laid_out_as_the_config_says(bench, name):
    contract.check_inputs(bench, CASES[name])


@pytest.mark.parametrize("name", CASES)
def test_a_right_result_passes(bench, name):
    contract.check_right_result_passes(bench, CASES[name])


@pytest.mark.parametrize("name", CASES)
def test_planted_faults_are_found(bench, name, rng):
    contract.check_planted_faults(bench, CASES[name], rng)


@pytest.mark.parametrize("name", CASES)
def test_what_no_group_reads_does_not_matter(bench, name):
    contract.check_others_rows_do_not_matter(bench, CASES[name])


@pytest.mark.parametrize("name", CASES)
def test_bitwise_differences(bench, name, rng):
    contract.check_same(bench, CASES[name], rng)


@pytest.mark.parametrize("name", CASES)
def test_changed_inputs_show_and_contents_change_in_place(bench, name):
    contract.check_digests_and_renewal(bench, CASES[name])
    contract.check_out_full_of_numbers(bench, CASES[name])


def test_sizes_change_in_place(bench):
    contract.check_sizes_in_place(bench)


def test_sampling(bench):
    contract.check_sampling_finds_a_wrong_tile(bench)


def test_undefined_tails_must_be_untouched(bench):
    contract.check_undefined_tail(bench)


def test_errors_too_small_for_the_bound_of_an_element(bench):
    contract.check_small_errors(bench)


def test_scalars_and_group_offsets(bench):
    contract.check_scalars_and_offsets(bench)


def test_copies_share_out_and_wrong_calls_are_refused(bench):
    contract.check_copies_and_refusals(bench)


@pytest.mark.parametrize("name", CASES)
def test_the_reference_passes_on_benched_operands(bench, name):
    case = CASES[name]
    backend = ReferenceBackend()
    algorithm = backend.algorithms(case.config, bench.device, AlgorithmLimits())[0]
    executable = backend.prepare(case.config, bench.device, algorithm, bench.stream)
    (operands,) = bench.operands(case.config, seed=8)
    arguments = bench.arguments(operands, bench.sizes(case.host_sizes))
    bench.poison(operands)
    bench.flush()
    assert bench.time(lambda: executable.execute(arguments)) > 0
    bench.synchronize()
    verdict = bench.judge(operands, case.host_sizes)
    assert verdict.fault == ""
    before = bench.snapshot(operands)
    executable.execute(arguments)
    assert bench.same(operands, before) == 0


def test_8_bit_results_fit_their_type(bench):
    config = contract._config(contract.FORWARD, *(contract.spec(s, "float8_e4m3fn") for s in ((40, 900), (2, 900, 33))), [30, 8])
    case = contract.Case("8-bit", config, [30, 8])
    operands = contract.right_operands(bench, case)
    assert np.isfinite(bench.values(operands).astype(np.float64)).all()
    assert bench.judge(operands, case.host_sizes).fault == ""
    contract.change(bench, operands, (0, 0, 29, 32), 100.0)
    assert "1 of" in bench.judge(operands, case.host_sizes).fault
