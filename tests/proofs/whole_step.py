"""``HostAdamW``: clipped, scheduled, averaged, and through a batch that is not a number.

On the CPU all weights have the bits of ordinary training on the device, with masters. A GPU's Adam
rounds in another way than the host's: there no weight may be further away than ``ON_DEVICE``. (The
tests on a GPU train longer, with gradients that are nearly zero, where Adam may step the other way.
They let one weight in a thousand be further away, by two rates per step.)
"""

from copy import deepcopy

import torch
import torch.distributed as dist
from _training import MAX_NORM, ON_DEVICE, STEPS, Model, losses, train
from adam_in_pieces import train_resident

from overlap_recipes.offload import adam_in_pieces as pieces
from overlap_recipes.offload.streaming import stream_layers
from overlap_recipes.offload.whole_step import HostAdamW
from overlap_recipes.ranks import start_rank


def main() -> None:
    device = start_rank()
    try:
        torch.manual_seed(0)
        model = Model().bfloat16()
        ordinary = deepcopy(model).to(device)
        groups, settings = pieces.groups_of(model.parameters()), pieces.SETTINGS
        with (
            stream_layers(model, model.encoder.layers, device) as streamed,
            HostAdamW(groups, streamed, max_norm=MAX_NORM, **settings) as optimizer,
        ):
            train(optimizer, device)
            assert optimizer.skipped == 1, f"{optimizer.skipped} steps skipped, not the bad one"
        train_resident(ordinary, losses(ordinary, device), MAX_NORM)
        for name, theirs in ordinary.named_parameters():
            apart = (model.get_parameter(name).to(device) - theirs).abs().max().item()
            assert apart <= ON_DEVICE * (device.type != "cpu"), f"{name} is {apart} from resident"
        print(f"{STEPS} steps, one of them skipped: the weights of the resident run")
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
