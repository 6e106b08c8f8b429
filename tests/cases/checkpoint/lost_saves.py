"""Saves that were called and then lost, on two ranks; the argument says how the loop ends.

``handler``: a save in an exception handler that raises on. ``error``: an error on all ranks after
a save. ``interrupted``: Ctrl-C on all. ``one_rank``: an error on one rank, after a save that all
have called. In each, what all ranks have called is there.
"""

import sys
from contextlib import suppress

import roundtrip
import torch
import torch.distributed as dist

from overlap_recipes.checkpoint import CheckpointManager, TrainingState

TIMES = 4


def loop(own: CheckpointManager, state: TrainingState) -> None:
    model, (optimizer,) = state.model, state.optimizers
    for number in range(1, 9):
        roundtrip.train_step(model, optimizer, number)
        try:
            if number in (2, 4):
                own.save(number)
            if number == 5 and sys.argv[1] == "handler":
                raise FloatingPointError("the loss is nan")
            if number == 4 and sys.argv[1] == "error":
                raise FloatingPointError("the loss is nan")
            if number == 4 and sys.argv[1] == "interrupted":
                raise KeyboardInterrupt
            if number == 4 and sys.argv[1] == "one_rank":
                if dist.get_rank() == 1:
                    raise FloatingPointError("the loss is nan")
                return
        except FloatingPointError:
            if sys.argv[1] == "handler":
                own.save(number)
            raise


def main() -> None:
    due = "step5" if sys.argv[1] == "handler" else "step4"
    kept = []
    with roundtrip.job() as root:
        for time in range(TIMES):
            model = roundtrip.two_layers(0)
            optimizer = torch.optim.AdamW(model.parameters())
            state = TrainingState(model, optimizer)
            own = CheckpointManager(root / str(time), state, grace_s=None)
            with suppress(FloatingPointError, KeyboardInterrupt), own:
                loop(own, state)
            dist.barrier()
            kept.append((root / str(time) / due).exists())
        assert kept == [True] * TIMES, f"kept {kept.count(True)} of {TIMES}"


if __name__ == "__main__":
    main()
