"""FSDP1's sharded state, which holds ShardedTensors."""

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType

if __name__ == "__main__":
    dist.init_process_group("gloo")
    model = FullyShardedDataParallel(torch.nn.Linear(8, 8), device_id=torch.device("cpu"))
    with FullyShardedDataParallel.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
        dcp.save({"model": model.state_dict()}, checkpoint_id="step1")
    dist.destroy_process_group()
