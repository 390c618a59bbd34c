"""Steps run by data-parallel workers under a consistency policy: `parallelize(step, consistency=...)`."""

from __future__ import annotations

import pytest

import autopar
from autopar.errors import OptionError


def test_a_step_in_stages_has_no_policy_of_workers() -> None:
    with pytest.raises(OptionError, match="`stages`=2: pipelines are synchronous"):
        autopar.parallelize(lambda state, batch: state, consistency="bsp", stages=2)
