"""What ranks tell each other; the argument names it."""

import logging
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from facing import face  # noqa: E402
from raising import assert_refused  # noqa: E402

from overlap_recipes.ranks import on_all_ranks, own_result  # noqa: E402


class OfTwoWords(Exception):
    """Is not made of a text alone."""

    def __init__(self, one: str, other: str) -> None:
        super().__init__(f"{one} {other}")


class OfALock(Exception):
    """Cannot be pickled."""

    def __init__(self) -> None:
        super().__init__("locked")
        self.logger = logging.StreamHandler()


def error_of(failing_ranks: tuple[int, ...], error: BaseException) -> BaseException:
    """What a rank gets if ``error`` is raised on those."""

    def work() -> str:
        if dist.get_rank() in failing_ranks:
            raise error
        return "done"

    try:
        on_all_ranks(work)
    except BaseException as raised:
        return raised
    raise AssertionError("nothing was raised")


def values(root: Path, device: torch.device) -> None:
    """Each rank has the values of all; a result of one's own is not sent."""
    assert on_all_ranks(lambda: {"rank": dist.get_rank()}) == [{"rank": 0}, {"rank": 1}]
    kept = logging.StreamHandler()  # cannot be pickled
    assert own_result(lambda: kept) is kept


def errors(root: Path, device: torch.device) -> None:
    """All ranks raise what has failed on one: its kind, its rank and its cause."""
    own = ValueError("no rows")
    told = error_of((1,), own)
    assert type(told) is ValueError
    assert str(told) == "rank 1: ValueError: no rows"
    assert told.__cause__ is (own if dist.get_rank() == 1 else None)

    full = OSError(28, "No space left on device", "a/file")
    told = error_of((0,), full)
    assert type(told) is OSError
    assert str(told) == f"rank 0: OSError: {full}"

    each = ValueError(f"of {dist.get_rank()}")
    assert str(error_of((0, 1), each)) == "rank 0: ValueError: of 0; rank 1: ValueError: of 1"

    alike = OfTwoWords("no", "rows")
    assert error_of((0, 1), alike) is alike

    for strange in (OfTwoWords("no", "rows"), OfALock()):
        told = error_of((1,), strange)
        assert type(told) is RuntimeError
        assert str(told) == f"rank 1: {type(strange).__name__}: {strange}"

    interrupt = KeyboardInterrupt()
    told = error_of((1,), interrupt)
    if dist.get_rank() == 1:
        assert told is interrupt
    else:
        assert type(told) is RuntimeError


def unsent(root: Path, device: torch.device) -> None:
    """A value that cannot be sent is an error on all ranks, and leaves none waiting."""
    own = logging.StreamHandler if dist.get_rank() == 0 else int
    assert_refused(lambda: on_all_ranks(own), TypeError, "rank 0: TypeError: cannot pickle")
    assert on_all_ranks(dist.get_rank) == [0, 1]


if __name__ == "__main__":
    face(globals())
