"""A writer that keeps its staging buffers says ``CompanionMismatch`` to a new key, and no more.

Avoided by recipes_source/checkpoint/pinned_staging.py.
"""

import torch
from torch.distributed.checkpoint import FileSystemWriter

writer = FileSystemWriter("unused", cache_staged_state_dict=True)
writer.state_dict_cache = {"weight": torch.zeros(2)}
try:
    writer.stage({"weight": torch.ones(2), "new": torch.ones(2)})
    print("fixed")
except Exception as error:
    print("fixed" if "new" in str(error) else "holds", type(error).__name__)
