"""Ranks tell each other what they have, and what has failed on one is raised on all."""

import pytest
from troubles import survives

from overlap_recipes.ranks import on_all_ranks


def test_ranks_meet():
    survives("rank_troubles", "values", "errors", "unsent", ranks=2)


def test_a_job_without_a_group_is_one_rank():
    assert on_all_ranks(lambda: 3) == [3]
    own = KeyError("name")

    def work() -> None:
        raise own

    with pytest.raises(KeyError) as raised:
        on_all_ranks(work)
    assert raised.value is own
