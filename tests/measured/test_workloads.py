"""The loops of the benchmarks read from the device as often as they say."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.workloads import StockLoop, llama, shard

LENGTH = 16  # tokens


class Reads(TorchDispatchMode):
    """Counts the scalars that are moved to the host."""

    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function is torch.ops.aten._local_scalar_dense.default:
            self.count += 1
        return function(*args, **(kwargs or {}))


def tiny(**options) -> StockLoop:
    return StockLoop(shard(llama("llama-tiny", "cpu")), 2 * LENGTH, LENGTH, **options)


def test_a_stock_loop_reads_in_forward_and_at_the_end_of_a_step(one_rank) -> None:
    loop = tiny(reads=True)
    loop.step()
    with Reads() as reads:
        loop.step()
    assert reads.count == 2
    assert loop.loss is not None
