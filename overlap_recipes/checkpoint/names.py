# SPDX-License-Identifier: BSD-3-Clause
# Overlap Recipes 0.2.1, overlap_recipes/checkpoint/names.py
"""The names of checkpoints: ``step5`` is the checkpoint of step 5, and no other name is."""

import re
from collections.abc import Iterable
from pathlib import Path

NAME = re.compile(r"step(0|[1-9][0-9]*)")


def name_of(step: int) -> str:
    """The name of the checkpoint of ``step``."""
    return f"step{step}"


def step_of(name: str) -> int | None:
    """The step that a name stands for; None for any other, such as ``step-5`` or ``step05``."""
    found = NAME.fullmatch(name)
    return int(found.group(1)) if found else None


def steps_of(names: Iterable[str]) -> list[int]:
    """The steps of all ``names`` that stand for one, the newest first."""
    found = []
    for name in names:
        step = step_of(name)
        if step is not None:
            found.append(step)
    return sorted(found, reverse=True)


def check_name(directory: Path) -> None:
    """Refuse a checkpoint that nobody would find again.

    Raises:
        ValueError: the name of ``directory`` does not stand for a step.
    """
    if step_of(directory.name) is None:
        raise ValueError(
            f"{directory.name!r} would never be found again: name it 'step5' for step 5, "
            f"as overlap_recipes.checkpoint.name_of(5) does"
        )


def refuse_below(steps: Iterable[int], directory: Path) -> None:
    """Refuse a save that rules of ``steps_left_out`` would delete at once, as the older one.

    Raises:
        RuntimeError: one of ``steps``, which are there, is above that of ``directory``.
    """
    newest = max(steps, default=0)
    if step_of(directory.name) < newest:
        raise RuntimeError(f"step{newest} is there: resume from it, or take another root")


def check_kept(keep_last: int, keep_every: int) -> None:
    """Refuse rules by which nothing would be kept.

    Raises:
        ValueError: of such a rule.
    """
    if keep_last < 1:
        raise ValueError(f"keep_last is {keep_last}: keep one checkpoint at least")
    if keep_every < 0:
        raise ValueError(f"keep_every is {keep_every}: give the distance of steps, or 0")


def steps_left_out(steps: list[int], keep_last: int, keep_every: int) -> list[int]:
    """Which of ``steps``, the newest first, neither rule keeps.

    Args:
        keep_last: how many of the newest stay.
        keep_every: steps that it divides stay, too; 0: none.

    Raises:
        ValueError: nothing would be kept.
    """
    check_kept(keep_last, keep_every)
    older = steps[keep_last:]
    return [step for step in older if not keep_every or step % keep_every]
