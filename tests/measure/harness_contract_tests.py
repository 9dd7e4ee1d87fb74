"""The checks of `harness_contract` as tests of one class, for benches of this process: a module with a fixture `bench` inherits it."""

from __future__ import annotations

import harness_contract as contract
import pytest
from harness_contract import CASES


class ContractTests:
    """What a workbench must do."""

    @pytest.mark.parametrize("name", CASES)
    def test_operands_are_laid_out_as_the_config_says(self, bench, name):
        contract.check_inputs(bench, CASES[name])

    @pytest.mark.parametrize("name", CASES)
    def test_a_right_result_passes(self, bench, name):
        contract.check_right_result_passes(bench, CASES[name])

    @pytest.mark.parametrize("name", CASES)
    def test_planted_faults_are_found(self, bench, name, rng):
        contract.check_planted_faults(bench, CASES[name], rng)

    @pytest.mark.parametrize("name", CASES)
    def test_what_no_group_reads_does_not_matter(self, bench, name):
        contract.check_others_rows_do_not_matter(bench, CASES[name])

    @pytest.mark.parametrize("name", CASES)
    def test_bitwise_differences(self, bench, name, rng):
        contract.check_same(bench, CASES[name], rng)

    @pytest.mark.parametrize("name", CASES)
    def test_changed_inputs_show_and_contents_change_in_place(self, bench, name):
        contract.check_digests_and_renewal(bench, CASES[name])
        contract.check_out_full_of_numbers(bench, CASES[name])

    def test_sizes_change_in_place(self, bench):
        contract.check_sizes_in_place(bench)

    def test_sampling(self, bench):
        contract.check_sampling_finds_a_wrong_tile(bench)

    def test_undefined_tails_must_be_untouched(self, bench):
        contract.check_undefined_tail(bench)

    def test_errors_too_small_for_the_bound_of_an_element(self, bench):
        contract.check_small_errors(bench)

    def test_scalars_and_group_offsets(self, bench):
        contract.check_scalars_and_offsets(bench)

    def test_wrong_calls_are_refused(self, bench):
        contract.check_refusals(bench)

    def test_infinite_sums(self, bench):
        contract.check_overflow(bench)
