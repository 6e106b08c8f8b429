"""Two ranks that would train apart without a word: the library must say so before a step.

The argument: ``layer_drop`` (wav2vec2, on by default there: each rank skips layers of its own),
``seeds`` (each rank has made weights of its own), ``gradients`` (one rank has some before the
check of the first step: the other waited for it until the time-out) or ``small_host`` (the late
rank saw what the first had taken already, and counted it again: it alone was refused).
"""

import sys
import tempfile
import time
from contextlib import closing
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from transformers import Wav2Vec2Config, Wav2Vec2ForCTC

from overlap_recipes import host_memory
from overlap_recipes.offload import HostAdamW, check_first_step, stream_layers
from overlap_recipes.offload.streamed_model import StreamedModel

HOST = torch.device("cpu")
SMALL_HOST = 100_000  # bytes: more than one rank takes for moments, less than two


def wav2vec2() -> nn.Module:
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "vocab_size": 8}
    kernels = {"conv_dim": (8,), "conv_kernel": (10,), "conv_stride": (5,)}
    config = Wav2Vec2Config(
        **sizes,
        **kernels,
        num_hidden_layers=2,
        num_feat_extract_layers=1,
        num_conv_pos_embeddings=4,
        num_conv_pos_embedding_groups=2,
    )
    assert config.layerdrop > 0, "wav2vec2 drops no layers by default any more"
    return Wav2Vec2ForCTC(config).train()


def refused(call, words: str) -> None:
    try:
        call()
    except (RuntimeError, ValueError) as refusal:
        assert words in str(refusal), refusal
    else:
        raise AssertionError(f"not refused: {words}")


def layer_drop() -> None:
    torch.manual_seed(0)
    model = wav2vec2()
    with stream_layers(model, model.wav2vec2.encoder.layers, HOST) as streamed:
        refused(partial(HostAdamW, model.parameters(), streamed), "layerdrop is 0.1")
        model.config.layerdrop = 0.0
        with HostAdamW(model.parameters(), streamed) as optimizer:
            model(torch.randn(2, 400)).logits.square().mean().backward()
            optimizer.step()


def small_host() -> None:
    """Both ranks take from one cgroup, in which there is room for one; they come one by one."""
    folders = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folders)
    host_memory.ROOT = Path(folders[0])
    cgroup = host_memory.ROOT / "sys/fs/cgroup"
    cgroup.mkdir(parents=True, exist_ok=True)
    (host_memory.ROOT / "proc/self").mkdir(parents=True, exist_ok=True)
    (host_memory.ROOT / "proc/self/cgroup").write_text("0::/\n")
    (cgroup / "memory.max").write_text(str(SMALL_HOST))
    (cgroup / "memory.current").write_text("0")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    with stream_layers(model, list(model), HOST) as streamed:
        time.sleep(dist.get_rank())
        adam = partial(HostAdamW, model.parameters(), streamed)
        refused(adam, "moments of layers of 2 ranks take")
        dist.barrier()
        (cgroup / "memory.max").write_text(str(2 * SMALL_HOST))
        dist.barrier()
        time.sleep(dist.get_rank())
        with HostAdamW(model.parameters(), streamed):
            (cgroup / "memory.current").write_text(str(SMALL_HOST))  # what this rank has taken


def seeds() -> None:
    torch.manual_seed(dist.get_rank())
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    streamed = StreamedModel(model, model, HOST)
    with closing(HostAdamW(model.parameters(), streamed)):
        refused(lambda: model(torch.ones(2, 8)).sum().backward(), "different weights")


def gradients() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    if dist.get_rank() == 0:
        model[0].weight.grad = torch.ones(8, 8)
    with stream_layers(model, model[1:], HOST) as streamed:
        check = partial(check_first_step, streamed, lambda: model(torch.ones(2, 8)).sum())
        refused(check, "rank 0: RuntimeError: there are gradients already")


if __name__ == "__main__":
    dist.init_process_group("gloo")
    programs = {"layer_drop": layer_drop, "seeds": seeds, "gradients": gradients}
    programs |= {"small_host": small_host}
    for name in sys.argv[1:]:
        programs[name]()
    dist.destroy_process_group()
