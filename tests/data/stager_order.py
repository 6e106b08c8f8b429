"""``DefaultStager`` copies weights that the optimizer step before it has not written yet.

python stager_order.py: torch alone, one GPU. Prints how much of each staged weight is wrong.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.fsdp import fully_shard

WIDTH, QUEUED = 4096, int(2e9)  # features; clock cycles of work that is queued before the step
REUSE_CRASHES = "2.11" <= torch.__version__ < "2.13"


def main() -> None:
    gpu = torch.cuda.is_available()
    device = torch.device("cuda" if gpu else "cpu")
    dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1)
    model = fully_shard(nn.Linear(WIDTH if gpu else 8, WIDTH if gpu else 8, device=device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    options = StagingOptions(False, False, True, gpu)  # pageable: to pin memory may synchronise
    stager = DefaultStager(options)
    for save in range(5):
        model(torch.ones(4, model.in_features, device=device)).sum().backward()
        if gpu:
            torch.cuda._sleep(QUEUED)  # as any long step does
        optimizer.step()
        optimizer.zero_grad()
        right = model.weight.to_local().detach().clone()  # on the compute stream, so in order
        staged = stager.stage({"weight": model.weight.detach()}).result()["weight"].to_local()
        wrong = (staged.cpu() != right.cpu()).float().mean().item()
        print(f"save {save}: {wrong:.0%} of the elements are not those of this step")
        if REUSE_CRASHES:
            stager.close()
            stager = DefaultStager(options)
    stager.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
