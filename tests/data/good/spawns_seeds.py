"""NumPy's seeds are spawned; no process is."""

import os

import numpy
import torch
import torch.distributed as dist

if __name__ == "__main__":
    dist.init_process_group("gloo")
    seeds = numpy.random.SeedSequence(7).spawn(dist.get_world_size())
    mine = numpy.random.default_rng(seeds[int(os.environ["RANK"])])
    dist.all_reduce(torch.from_numpy(mine.random(3)))
    dist.destroy_process_group()
