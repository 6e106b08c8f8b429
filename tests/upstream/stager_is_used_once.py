"""A ``DefaultStager`` can be used once; the second save fails.

Avoided by recipes_source/checkpoint/default_stager.py.
"""

import torch
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

stager = DefaultStager(StagingOptions(False, False, True, False))
try:
    for _ in range(2):
        staged = stager.stage({"weight": torch.ones(2)})
        getattr(staged, "result", dict)()
    print("fixed")
except KeyError as error:
    print("holds", repr(error))
