"""Saves to memory."""

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.storage import StorageWriter
from torch.futures import Future


class Memory(StorageWriter):
    def reset(self, checkpoint_id=None):
        pass

    def set_up_storage_writer(self, is_coordinator, *args, **kwargs):
        pass

    def prepare_local_plan(self, plan):
        return plan

    def prepare_global_plan(self, plans):
        return plans

    def write_data(self, plan, planner):
        done = Future()
        done.set_result([])
        return done

    def finish(self, metadata, results):
        pass

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id):
        return True


if __name__ == "__main__":
    dist.init_process_group("gloo")
    dcp.save({"x": torch.ones(4)}, storage_writer=Memory())
    dist.destroy_process_group()
