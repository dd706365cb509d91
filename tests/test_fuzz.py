"""A few hundred cases of each fuzz target; `make fuzz` runs 100,000."""

import pytest

from tests import fuzz


@pytest.mark.parametrize("name", fuzz.TARGETS)
@pytest.mark.parametrize("count", [300, pytest.param(fuzz.CASES, marks=pytest.mark.exhaustive)])
def test_no_traceback_and_no_wrong_result(name: str, count: int) -> None:
    fuzz.cases(fuzz.TARGETS[name], count, seed=count)
