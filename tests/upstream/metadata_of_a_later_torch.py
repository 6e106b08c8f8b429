"""A checkpoint of torch 2.15 is not read by earlier versions: ``too many values to unpack``.

Avoided by recipes_source/checkpoint/load.py.
"""

import torch
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING, TensorProperties

row_major = _MEM_FORMAT_ENCODING.TORCH_CONTIGUOUS_FORMAT
of_2_15 = (torch.float32, torch.strided, False, row_major, False, (1,))  # strides come last
try:
    TensorProperties().__setstate__(of_2_15)
    print("fixed")
except ValueError:
    print("holds")
