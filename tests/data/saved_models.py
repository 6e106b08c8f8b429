"""Stock models are trained, saved beside training, killed in a save, and resumed; bits compared.

``python saved_models.py MODEL-OPTIMIZER ...`` or ``all``. A line for each says ``right``, or what
is not. Two ranks train; step 2 is saved, step 5 is being saved when they are killed. Two others
resume: every tensor has the bits of before, gathered, and so have the losses up to step 5. And so
do three ranks, and one, which train on with losses of their own.
"""

import faulthandler
import os
import signal
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from threading import Event

import schedulefree
import torch
import torch.distributed as dist
import transformers
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from stock_models import BY_NAME  # noqa: E402

from overlap_recipes.checkpoint import CheckpointManager, TrainingState  # noqa: E402
from overlap_recipes.checkpoint.kept import Checkpoint

SAVED, LAST = 2, 5  # steps
RANKS, OTHERS = 2, (3, 1)
DEADLINE_S = 300.0  # of a machine that does much else; a rank needs 2
NAMES = ("gpt2", "mixtral", "qwen3_moe", "t5", "bart", "vit", "resnet", "clip")
MODELS = {"tied": "qwen2", "lora": "llama"} | {name: name for name in NAMES}
LORA = LoraConfig(target_modules=["q_proj", "v_proj"], r=4, lora_dropout=0.1)


def built(name: str, seed: int) -> nn.Module:
    """A sharded model; the base of LoRA has the same values at any seed."""
    model = BY_NAME[MODELS[name]].model(0 if name == "lora" else seed)
    if name == "lora":
        torch.manual_seed(seed)
        model = get_peft_model(model, LORA)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for module in list(model.modules()):
        if isinstance(module, transformers.modeling_layers.GradientCheckpointingLayer):
            fully_shard(module, mesh=mesh)
    scalars = {p for p in model.parameters() if p.ndim == 0}  # FSDP2 shards none
    for scalar in scalars:
        scalar.requires_grad_(False)
    return fully_shard(model, mesh=mesh, ignored_params=scalars)


def adamw(model: nn.Module) -> list[torch.optim.Optimizer]:
    return [torch.optim.AdamW(trained(model), lr=1e-2)]


def sgd(model: nn.Module) -> list[torch.optim.Optimizer]:
    return [torch.optim.SGD(trained(model), lr=1e-2, momentum=0.9)]


def muon(model: nn.Module) -> list[torch.optim.Optimizer]:
    """Muon for matrices, AdamW for the rest; torch's Muon cannot step fewer rows than ranks."""
    matrices = [p for p in trained(model) if p.ndim == 2 and p.shape[0] >= max(OTHERS)]
    others = [p for p in trained(model) if p.ndim != 2 or p.shape[0] < max(OTHERS)]
    optimizers = [torch.optim.Muon(matrices, lr=1e-2)]
    if others:
        optimizers.append(torch.optim.AdamW(others, lr=1e-2))
    return optimizers


def schedule_free(model: nn.Module) -> list[torch.optim.Optimizer]:
    optimizer = schedulefree.AdamWScheduleFree(trained(model), lr=1e-2, warmup_steps=3)
    optimizer.train()
    return [optimizer]


def trained(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]


OPTIMIZERS = {"adamw": adamw, "muon": muon, "sgd": sgd, "schedule_free": schedule_free}


class Job:
    """A training of one model with one optimizer; dropout makes losses depend on random numbers."""

    def __init__(self, case: str, seed: int) -> None:
        name, optimizer = case.split("-")
        self.model = built(name, seed)
        self.optimizers = OPTIMIZERS[optimizer](self.model)
        self.batch = BY_NAME[MODELS[name]].inputs
        scheduled = [] if optimizer == "schedule_free" else self.optimizers
        self.schedulers = [torch.optim.lr_scheduler.StepLR(x, 2, gamma=0.5) for x in scheduled]
        self.state = TrainingState(
            self.model,
            self.optimizers,
            scheduler=self.schedulers,
            trainable_only=name == "lora",
        )
        transformers.set_seed(100 * seed + dist.get_rank())

    def step(self, number: int) -> float:
        loss = self.model(**self.batch(10 * number + dist.get_rank())).loss
        loss.backward()
        for part in self.optimizers + self.schedulers:
            part.step()
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        return loss.item()

    def gathered(self) -> dict[str, object]:
        """All values of model, optimizers and schedulers, by name; whole tensors."""
        found: dict[str, object] = {}
        names = {p: name for name, p in self.model.named_parameters()}
        add(self.model.state_dict(), "model", found)
        for number, optimizer in enumerate(self.optimizers):
            for parameter, moments in optimizer.state.items():
                add(moments, f"state of {names[parameter]}", found)
            for group in optimizer.param_groups:
                settings = {**group, "params": [names[p] for p in group["params"]]}
                add(settings, f"group of optimizer {number}", found)
        for number, scheduler in enumerate(self.schedulers):
            add(scheduler.state_dict(), f"scheduler {number}", found)
        return found


def add(tree: object, path: str, found: dict[str, object]) -> None:
    if isinstance(tree, dict):
        for key, value in tree.items():
            add(value, f"{path}: {key}", found)
    elif isinstance(tree, DTensor):
        found[path] = tree.full_tensor().detach()
    elif torch.is_tensor(tree):
        found[path] = tree.detach().clone()
    else:
        found[path] = tree


def is_same(one: object, other: object) -> bool:
    if not torch.is_tensor(one) or not torch.is_tensor(other):
        return type(one) is type(other) and one == other
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    return torch.equal(bytes_of(one), bytes_of(other))


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def killed(case: str, directory: Path) -> None:
    """Train and save, and end by a signal in the middle of the save of the last step."""
    job = Job(case, seed=0)
    in_save = Event()

    def wait_for_the_end(*args: object) -> None:
        in_save.set()
        Event().wait()

    losses = {}
    checkpoints = CheckpointManager(directory / "run", job.state, grace_s=None).__enter__()
    assert checkpoints.resume() == 0
    for step in range(1, LAST + 1):
        losses[step] = job.step(step)
        if step == SAVED:
            saved = job.gathered()
            first = checkpoints.save(step)
    first.result()
    assert any(torch.is_tensor(x) for name, x in saved.items() if name.startswith("state of"))
    torch.save((saved, losses), directory / f"rank{dist.get_rank()}.pt")
    Checkpoint.finish = wait_for_the_end  # when its files are written, before it has a name
    checkpoints.save(LAST)
    in_save.wait()
    dist.barrier()
    os.kill(os.getpid(), signal.SIGKILL)


def resumed(case: str, directory: Path) -> None:
    job = Job(case, seed=1)
    saved, _ = torch.load(directory / "rank0.pt", weights_only=False)
    _, losses = torch.load(directory / f"rank{dist.get_rank() % RANKS}.pt", weights_only=False)
    with CheckpointManager(directory / "run", job.state, grace_s=None) as checkpoints:
        assert checkpoints.resume() == SAVED
        found = job.gathered()
        assert found.keys() == saved.keys(), f"other names: {found.keys() ^ saved.keys()}"
        wrong = [name for name in saved if not is_same(found[name], saved[name])]
        assert not wrong, f"{len(wrong)} of {len(saved)} differ, such as {wrong[0]}"
        for step in range(SAVED + 1, LAST + 1):
            loss = job.step(step)
            if dist.get_world_size() == RANKS:
                assert loss == losses[step], f"step {step}: loss {loss}, was {losses[step]}"
            assert torch.tensor(loss).isfinite()


def ended(work: Callable[[str, Path], None], case: str, directory: Path, ranks: int) -> list[int]:
    """Call ``work`` on new ranks; their exit codes, of a signal negative."""
    store = directory / f"store of {work.__name__} on {ranks}"
    children = []
    for rank in range(ranks):
        child = os.fork()
        if child == 0:
            as_rank(work, case, directory, store, rank, ranks)
        children.append(child)
    codes = []
    for child in children:
        _, status = os.waitpid(child, 0)
        codes.append(os.waitstatus_to_exitcode(status))
    return codes


def as_rank(work: Callable, case: str, directory: Path, store: Path, rank: int, ranks: int) -> None:
    """Work as a rank of a group, and end."""
    faulthandler.dump_traceback_later(DEADLINE_S, exit=True)
    code = 1
    try:
        shared = dist.FileStore(str(store), ranks)
        dist.init_process_group("gloo", store=shared, rank=rank, world_size=ranks)
        work(case, directory)
        dist.destroy_process_group()
        code = 0
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def verdict(case: str) -> str:
    with tempfile.TemporaryDirectory() as temporary:
        directory = Path(temporary)
        codes = ended(killed, case, directory, RANKS)
        if codes != [-signal.SIGKILL] * RANKS:
            return f"the first job ended by {codes}"
        for ranks in (RANKS, *OTHERS):
            codes = ended(resumed, case, directory, ranks)
            if any(codes):
                return f"the job of {ranks} ranks ended by {codes}"
    return "right"


def main() -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    cases = sys.argv[1:]
    if cases == ["all"]:
        cases = [f"{model}-{optimizer}" for model in MODELS for optimizer in OPTIMIZERS]
    wrong = []
    for case in cases:
        found = verdict(case)
        print(f"{case:24} {found}", flush=True)
        if found != "right":
            wrong.append(case)
    sys.exit(f"not right: {wrong}" if wrong else 0)


if __name__ == "__main__":
    main()
