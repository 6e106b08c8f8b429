"""torch's elastic launcher starts the ranks; one of them fails."""

import torch
import torch.distributed as dist
from torch.distributed import launcher as pet


def train() -> None:
    dist.init_process_group("gloo")
    total = torch.ones(1)
    dist.all_reduce(total)
    assert dist.get_rank() == 0, "the loss is not finite"
    dist.destroy_process_group()


if __name__ == "__main__":
    config = pet.LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=2,
        run_id="elastic",
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
        monitor_interval=0.1,
    )
    pet.elastic_launch(config, entrypoint=train)()
