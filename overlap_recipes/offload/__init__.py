# SPDX-License-Identifier: BSD-3-Clause
# Overlap Recipes 0.1.0, overlap_recipes/offload/__init__.py
"""Train what does not fit on the device: its layers and its Adam live in host memory."""

from .one_copy_a_host import Host, SharedAdamW, SharedModel
from .streamed_model import StreamedModel, resident_bytes
from .whole_step import HostAdamW

__all__ = [
    "Host",
    "HostAdamW",
    "SharedAdamW",
    "SharedModel",
    "StreamedModel",
    "resident_bytes",
]
