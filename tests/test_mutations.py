"""Committed checkpoints of every format, mutated: opening, planning, auditing and reading work or raise a MtplabError.

Seconds of what `python -m tests.fuzz` does for minutes.
"""

import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.mutations import FIXTURES, case, run

EXAMPLES = int(os.environ.get("MTPLAB_FUZZ_EXAMPLES", "25"))


@pytest.mark.parametrize("name", FIXTURES)
def test_mutated_checkpoints_raise_nothing_else(tmp_path: Path, name: str) -> None:
    run(0, tmp_path / "x", name)  # what is imported and compiled on first use counts for nobody

    # a seed has nothing to be made smaller
    @settings(max_examples=EXAMPLES, suppress_health_check=list(HealthCheck))
    @given(seed=st.integers(0, 2**32))
    def mutated(seed: int) -> None:
        run(seed, tmp_path / "x", name)

    mutated()


def test_mutations_get_far(tmp_path: Path) -> None:
    """Half of them at least are still opened, and planning sees many of them: else this would test the JSON parser."""
    reached = [run(seed, tmp_path / "x") for seed in range(150)]
    assert reached.count("planned") > 40 and reached.count("refused") > 40
    assert all(case(name).shards for name in FIXTURES)
