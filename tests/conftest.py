"""Settings that hold for every test: this checkout first, one thread, offline, no display."""

import os
import sys
from pathlib import Path

import pytest
from hypothesis import settings

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

for name, value in {
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
    "MPLBACKEND": "Agg",
}.items():
    os.environ.setdefault(name, value)

# A busy machine makes one example slow, which is not a failure; and a run that found nothing
# must find nothing when it is repeated.
settings.register_profile("midspan", deadline=None, derandomize=True, database=None)
settings.load_profile("midspan")


# Tests that take long because they start processes, compile, or repeat much.  They run in
# `make test-parity` (and so in every check of a change) instead of in `make test`.
LONG = (
    "cli/test_benchmarks.py",
    "cli/test_convert.py::test_a_real_process",
    "cli/test_doctor.py::test_collectives_of_two_processes_give_the_right_values",
    "cli/test_doctor.py::test_this_machine_is_usable",
    "cli/test_generate.py::test_a_real_process",
    "cli/test_plan.py::test_seventy_billion_on_512_ranks_is_planned_in_seconds",
    "cli/test_plan.py::test_sixty_four_ranks_are_compared_in_seconds",
    "cli/test_plan.py::test_the_script_by_path",
    "cli/test_prepare.py::test_bundled_corpus_is_prepared_and_then_up_to_date",
    "cli/test_prepare.py::test_killed_runs_leave_no_process_and_continue_to_the_same_bytes",
    "cli/test_pretrain.py::test_a_signal_",
    "cli/test_studies.py::test_runs_at_toy_size",
    "cli/test_scripts.py::test_every_script_answers_help_from_everywhere",
    "cli/test_wrong_checkpoints.py::test_failure_of_the_main_rank_alone_ends_all_ranks",
    "cli/test_wrong_checkpoints.py::test_wrong_setting_under_torchrun_is_said_once",
    "unit/test_block.py::test_every_component_works_or_is_refused",
    "unit/test_eso.py::test_every_component_works_or_is_refused",
    "unit/test_checkpoint.py::test_a_kill_before_every_single_file_operation",
    "unit/test_checkpoint.py::test_twenty_random_kills",
    "unit/test_gradients.py",
    "unit/test_memory.py",
    "unit/test_pipeline_table.py::test_distance_to_the_bound",
    "unit/test_pipeline_table.py::test_the_whole_table",
    "unit/test_tokenize.py::test_run_interrupted_at_any_rename_continues",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    found = set()
    for item in items:
        name = item.nodeid.removeprefix("tests/")
        for prefix in LONG:
            if name.startswith(prefix):
                found.add(prefix)
                item.add_marker(pytest.mark.long)
    files = {item.nodeid.removeprefix("tests/").partition("::")[0] for item in items}
    collected = {prefix for prefix in LONG if prefix.partition("::")[0] in files}
    if len(files) > 40:  # not a selection by hand
        assert found == collected, f"LONG names tests that are gone: {collected - found}"
