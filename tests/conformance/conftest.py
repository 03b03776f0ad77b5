"""Which failure case each test of the shipped suite covers: the suite itself knows no marks of this repository."""

from __future__ import annotations

from pathlib import Path

import pytest

CASES = {
    "test_keys_that_differ_anywhere_are_different_objects": ("KEY-1", "KEY-3", "KEY-5", "PLUG-2"),
    "test_every_bit_pattern_of_any_length_is_kept": ("PLUG-1",),
    "test_batches_of_any_size_answer_each_key_in_order": ("FAIL-4",),
    "test_one_bad_object_does_not_spoil_its_batch": ("FAIL-7",),
    "test_only_verified_hits_are_counted": ("STAT-6",),
    "test_a_damaged_payload_is_corrupt_once_and_healed_by_a_put": ("FILE-4",),
    "test_another_identity_under_the_name_is_missing_until_the_next_put": ("FILE-4",),
    "test_bytes_that_are_no_object_are_no_hit": ("SEC-1",),
    "test_many_threads_putting_one_object_store_it_once": ("RACE-6",),
    "test_clear_is_about_one_namespace": ("FILE-7",),
    "test_the_capacity_is_kept_and_what_was_used_last_stays": ("EVICT-2", "FILE-5"),
    "test_a_chain_loses_its_tail_first": ("EVICT-3",),
    "test_what_cannot_fit_is_refused_and_evicts_nothing": ("EVICT-5",),
    "test_what_was_stored_is_there_after_reopening": ("FAIL-8",),
}


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent not in item.path.parents:
            continue
        if cases := CASES.get(getattr(item, "originalname", item.name)):
            item.add_marker(pytest.mark.case(*cases))
