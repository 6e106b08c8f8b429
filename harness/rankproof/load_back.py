"""Load checkpoints in processes that have never seen the training run, and hash every leaf.

Run like a recipe, on any number of ranks: alone it loads plain tensors, on several it loads shards
and puts them together, so a checkpoint is read at another world size than it was written at.
"""

import json
import math
import os
import re
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from rankproof.errors import summary
from rankproof.ledger import pickled_sha256, tensor_sha256

NOT_KNOWN_HERE = (  # pickle's words, and torch.load's
    r"attribute '(\S+)' on <module '__main__'",
    r"No module named '(\S+)'",
    r"GLOBAL (\S+) was not an allowed global",
)


def empty_state(metadata: Metadata, world_size: int) -> dict:
    """A place for every leaf the checkpoint lists; tensors in no known state."""
    state = {}
    for name, entry in metadata.state_dict_metadata.items():
        if isinstance(entry, BytesStorageMetadata):
            state[name] = b""
            continue
        tensor = torch.empty(entry.size, dtype=entry.properties.dtype)
        if world_size > 1 and tensor.dim() > 0:
            mesh = init_device_mesh("cpu", (world_size,))
            tensor = distribute_tensor(tensor, mesh, [Shard(0)])
        state[name] = tensor
    return state


def unfilled(metadata: Metadata) -> str:
    """The first tensor of which the checkpoint does not have all elements, and how many; or empty.

    A load leaves the others as they are, and says nothing.
    """
    for name, entry in metadata.state_dict_metadata.items():
        if isinstance(entry, BytesStorageMetadata):
            continue
        chunks = {(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in entry.chunks}
        there = sum(math.prod(sizes) for _, sizes in chunks)
        whole = math.prod(entry.size)
        if there < whole:
            return f"{name}: {there} of {whole} elements are in the checkpoint"
    return ""


def hashes(state: dict, chunks: dict[str, list]) -> dict:
    """By leaf: SHA-256 of each chunk (offsets, sizes) asked for, or the repr of a plain value."""
    found = {}
    for name, value in state.items():
        if isinstance(value, DTensor):
            value = value.full_tensor()
        if not isinstance(value, torch.Tensor):
            found[name] = {"value": repr(value), "pickle": pickled_sha256(value)}
            continue
        by_chunk = {"whole": tensor_sha256(value)}
        for offsets, sizes in chunks.get(name, []):
            part = value[tuple(slice(o, o + s) for o, s in zip(offsets, sizes, strict=True))]
            by_chunk[json.dumps([offsets, sizes])] = tensor_sha256(part)
        size = value.numel() * value.element_size()
        found[name] = {"shape": list(value.shape), "sha256": by_chunk, "bytes": size}
    return found


def load(directory: str, chunks: dict[str, list], world_size: int) -> dict:
    """What the checkpoint holds, or why it cannot be loaded."""
    try:
        metadata = dcp.FileSystemReader(directory).read_metadata()
        missing = unfilled(metadata)
        if missing:
            return {"error": missing}
        state = empty_state(metadata, world_size)
        dcp.load(state, checkpoint_id=directory, no_dist=world_size == 1)
    except (Exception, dcp.CheckpointException) as error:
        own_class = not_known_here(str(error))
        if own_class:
            what = f"objects of the script's own classes ({own_class})"
            return {"unjudged": f"it holds {what}, not loaded back"}
        return {"error": summary(error)[:500]}
    return {"leaves": hashes(state, chunks)}


def not_known_here(error: str) -> str:
    """The class, or its module, that a process that is not the script cannot load; empty if none.

    A script may allow ``torch.load`` its own classes.
    """
    for words in NOT_KNOWN_HERE:
        found = re.search(words, error)
        if found:
            return found[1].removeprefix("__main__.")
    return ""


def main(request: Path, answer: Path) -> None:
    world_size = int(os.environ["WORLD_SIZE"])
    if world_size > 1:
        dist.init_process_group("gloo")
    asked = json.loads(request.read_text())
    found = {directory: load(directory, chunks, world_size) for directory, chunks in asked.items()}
    if world_size > 1:
        dist.destroy_process_group()
    if os.environ["RANK"] == "0":
        answer.write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
