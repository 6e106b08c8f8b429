"""prime-rl#3252, NemotronH: a run that has a parameter without a gradient is resumed."""

import roundtrip
import torch
from torch import nn

from overlap_recipes.checkpoint.restart import Run, resume
from overlap_recipes.checkpoint.retention import RetainedSaves

WIDTH = 8


def build() -> Run:
    torch.manual_seed(0)
    model = nn.ModuleDict({"used": nn.Linear(WIDTH, WIDTH), "unused": nn.Linear(WIDTH, WIDTH)})
    optimizer = torch.optim.AdamW(model.parameters())
    return Run(model, optimizer, torch.optim.lr_scheduler.ConstantLR(optimizer))


def main() -> None:
    with roundtrip.job() as root:
        run = build()
        with RetainedSaves(root, roundtrip.HOST) as saves:
            run.model["used"](torch.ones(WIDTH)).sum().backward()
            run.optimizer.step()
            run.optimizer.zero_grad()
            run.step = 1
            saves.save({"run": run}, root / "step1")
        step = resume(build(), root)
        assert step == 1, f"resumed at step {step}, saved was step 1"


if __name__ == "__main__":
    main()
