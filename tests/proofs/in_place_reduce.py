"""``reduce_in_place``: on one and two ranks every loss and weight has the bits of stock FSDP2.

It does for each reduction's dtype, since a sum of two does not depend on its order. More ranks sum
in another order.
"""

import in_place_gather as in_place
import peer_memory
import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy

from overlap_recipes.fsdp2.in_place_gather import gather_in_place
from overlap_recipes.fsdp2.in_place_reduce import reduce_in_place


def prove(device: torch.device) -> None:
    for dtypes in ((), (torch.bfloat16, torch.float32), (torch.bfloat16, torch.bfloat16)):
        policy = MixedPrecisionPolicy(*dtypes)
        expected = in_place.train(peer_memory.build(device, policy), device)
        model = peer_memory.build(device, policy, stock=False)
        gather_in_place(model)
        pushed = reduce_in_place(model)
        found = in_place.train(model, device)
        assert dist.get_world_size() > 2 or peer_memory.same(found, expected), "not stock's bits"
        torch.testing.assert_close(found, expected, rtol=0.05, atol=0.01)
        if pushed is not None:
            assert pushed.calls == peer_memory.UNITS * in_place.STEPS, "FSDP2 reduced by itself"
            print(f"{pushed.calls} reductions by pushes")


def main() -> None:
    peer_memory.run(prove)


if __name__ == "__main__":
    main()
