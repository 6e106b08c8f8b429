"""Stand-in."""

import torch.distributed.checkpoint as dcp


def load(states, source, *, skip=(), process_group=None):
    if isinstance(source, dcp.StorageReader):
        dcp.load(states, storage_reader=source)
    else:
        dcp.load(states, checkpoint_id=source)
