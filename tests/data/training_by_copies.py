"""Train with gathers and reductions by copies between ranks; see ``tests/test_sharding_copies.py``.

The models, the unsharded run and the comparison are those of ``sharded_training.py``.
"""

import argparse
import sys
import warnings
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parent))

import sharded_training as common  # noqa: E402  (it makes the recipes importable)

import async_save  # noqa: E402  isort: skip
import copy_engine_gather as copy_engine  # noqa: E402  isort: skip
import copy_engine_reduce  # noqa: E402  isort: skip
import sharded_parameter as rows  # noqa: E402  isort: skip
from prefetch_schedule import PrefetchContext  # noqa: E402  isort: skip
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402  isort: skip
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard  # noqa: E402  isort: skip

CPU = torch.device("cpu")


def under_fsdp2(shuffled: bool, dtype: torch.dtype, seed: int = 0, reduce: bool = True):
    """A model, its optimizer and its backward, all of FSDP2 but the communication."""
    model = common.Model(shuffled, seed)
    policy = MixedPrecisionPolicy(param_dtype=dtype if dtype != torch.float32 else None)
    for unit in (*reversed(model.units()), model):  # inner units first
        fully_shard(unit, mp_policy=policy)
    optimizer = common.ADAMW([p for p in model.parameters() if p.requires_grad])
    with warnings.catch_warnings(record=True) as warned:
        gathers = copy_engine.gather_by_copy_engines(model, optimizer, policy.param_dtype)
    assert bool(gathers) == (dist.get_world_size() > 1) != bool(warned)
    if gathers and reduce:
        copy_engine_reduce.reduce_by_copy_engines(model, gathers)
    return model, optimizer, torch.Tensor.backward


def under_context(shuffled: bool):
    """The same under a schedule of our own."""
    model, ranks = common.Model(shuffled), dist.get_world_size()
    numel = max(-(-p.shape[0] // ranks) * p.shape[1:].numel() for p in model.parameters())
    gathering, reducing = (copy_engine.PeerMemory(dist.group.WORLD, CPU) for _ in range(2))
    push = copy_engine_reduce.PushReduceScatter(reducing, numel, torch.float32)
    memory = {"gather": gathering.gather, "empty": gathering.empty, "reduce_scatter": push}
    mesh = init_device_mesh("cpu", (ranks,))
    context = PrefetchContext(model, model.units(), mesh, **memory)
    optimizer = common.ADAMW([p for p in model.parameters() if p.requires_grad])
    optimizer.register_step_pre_hook(lambda *_: gathering.barrier())
    optimizer.register_step_post_hook(lambda *_: gathering.barrier())
    gathering.barrier()
    return model, optimizer, context.backward


def train_on(model, optimizer, backward, turns: range, shuffled: bool, dtype: torch.dtype) -> list:
    losses = []
    for turn in turns:
        loss = common.loss_of(model, turn, dist.get_rank(), dtype)
        losses.append(loss.detach())
        backward(loss)
        if turn % 2 or not shuffled:
            optimizer.step()
            optimizer.zero_grad()
    return losses


def train() -> None:
    turns = range(common.PASSES)
    for shuffled in (False, True):
        reference, expected = common.train_unsharded(shuffled, torch.float32)
        built = [under_fsdp2(shuffled, torch.float32)]
        if dist.get_world_size() > 1:
            built.append(under_context(shuffled))
        for parts in built:
            losses = train_on(*parts, turns, shuffled, torch.float32)
            common.compare(parts[0], reference, losses, expected)
    if dist.get_world_size() == 2:  # with more, rounding in bfloat16 grows beyond any tolerance
        reference, expected = common.train_unsharded(False, torch.bfloat16)
        parts = under_fsdp2(False, torch.bfloat16)
        losses = train_on(*parts, turns, False, torch.bfloat16)
        common.compare(parts[0], reference, losses, expected)


def save(directory: Path) -> None:
    """Save weights that live in peer memory, while training goes on; the harness loads them."""
    model, optimizer, backward = under_fsdp2(False, torch.float32)
    app = async_save.AppState(model, optimizer)
    checkpoints = async_save.AsyncCheckpoints(directory)
    for turn in range(4):
        train_on(model, optimizer, backward, range(turn, turn + 1), False, torch.float32)
        app.step += 1
        checkpoints.save(app)
    checkpoints.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=("train", "save"))
    parser.add_argument("--dir", type=Path, help="of the checkpoints that are saved")
    asked = parser.parse_args()
    rows.start_rank()
    try:
        train() if asked.what == "train" else save(asked.dir)
        dist.barrier()
    finally:
        dist.destroy_process_group()
