"""The first code block of each page runs as it stands, with a small model in its place.

In an empty folder, on the CPU. A block can import the package or the files of its page's folder,
and finds what its page leaves to the reader. What needs a GPU is replaced by ``INSTEAD``.
"""

import ast
import contextlib
import importlib.util
import os
import re
import shlex
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.fsdp import fully_shard

from overlap_recipes.checkpoint import CheckpointManager, TrainingState
from overlap_recipes.checkpoint.__main__ import main as command

SOURCE = Path(__file__).parents[1] / "recipes_source"
ALWAYS = "checkpoint", "trainers"  # folders whose pages all begin with lines to paste

ELSEWHERE = {"train_what_does_not_fit": "tests/offload/test_pasted_blocks.py"}
INSTEAD = {
    "torchtitan_fsdp2": {"from torchtitan.models.llama3 import model_registry\n": ""},
    "lightning_strategy": {"Trainer(strategy": 'Trainer(accelerator="cpu", strategy'},
    "transformers_trainer": {  # accelerate shards on accelerators alone
        "trainer = OverlappedTrainer(": "trainer = TrainerOnAnyDevice(",
        'output_dir="run",': 'output_dir="run", use_cpu=True,',
        "save_steps=100": "save_steps=2",
    },
}
LEAVES = {  # checkpoints that must be there after the block
    "saves_beside_training": ["checkpoints/step1000"],
    "torchtitan_checkpointer": ["checkpoint/step-100"],
    "transformers_trainer": ["run/checkpoint-2/pytorch_model_fsdp_0"],
    "lightning_strategy": ["run/last-step=100.ckpt"],
}


def introduction(page: Path) -> str:
    return ast.get_docstring(ast.parse(page.read_text(encoding="utf-8")))


def first_block(page: Path) -> str:
    """The Python of the page's first block, "" if it has none."""
    text = introduction(page) + "\n"
    block = re.search(r"^\.\. code-block:: python\n\n((?: +.*\n|\n)+)", text, re.MULTILINE)
    return textwrap.dedent(block[1]) if block else ""


def later_blocks(page: Path, language: str) -> list[str]:
    """The blocks of the page's prose, after its introduction."""
    text = page.read_text(encoding="utf-8")
    pattern = rf"^# \.\. code-block:: {language}\n#\n((?:#   .*\n|#\n)+)"
    found = []
    for block in re.findall(pattern, text, re.MULTILINE):
        lines = [line.removeprefix("#") for line in block.splitlines()]
        found.append(textwrap.dedent("\n".join(lines)))
    return found


def included(page: Path) -> str:
    """The function of its own file that the page begins with, "" if there is none."""
    directive = rf"^\.\. literalinclude:: {page.name}\n   :pyobject: (\w+)"
    found = re.search(directive, introduction(page), re.MULTILINE)
    return found[1] if found else ""


def with_blocks() -> list[Path]:
    """The pages whose first block runs here."""
    found = []
    for page in sorted(SOURCE.glob("*/[!_]*.py")):
        begins = page.parent.name in ALWAYS or first_block(page)
        if begins and page.stem not in ELSEWHERE:
            found.append(page)
    return found


def module_of(page: Path) -> ModuleType:
    """A recipe with its toys, without its folder on the path: the block must not find it."""
    name = f"toys_of_{page.stem}"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, page)
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


@pytest.fixture
def no_recipes(monkeypatch: pytest.MonkeyPatch) -> None:
    """What other tests of this process have imported or put on the path is not there."""
    source = str(SOURCE)
    kept = [folder for folder in sys.path if not folder.startswith(source)]
    monkeypatch.setattr(sys, "path", kept)
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if file is not None and file.startswith(source):
            monkeypatch.delitem(sys.modules, name)


@pytest.fixture
def rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A group of one, in a directory of its own; trainers leave a port in the environment."""
    environment = dict(os.environ)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    handler = signal.getsignal(signal.SIGTERM)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    signal.signal(signal.SIGTERM, handler)
    if dist.is_initialized():
        dist.destroy_process_group()
    if accelerate := sys.modules.get("accelerate"):  # it remembers the device for ever
        accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    os.environ.clear()
    os.environ.update(environment)


def yours() -> dict[str, object]:
    """What a reader has before the block. Steps after the third change nothing, to save time."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)
    taken = []

    def train_step(given: object) -> None:
        """Take a step on a batch, or with a state that counts its steps."""
        taken.append(given)
        if len(taken) <= 3:
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        if hasattr(given, "step"):
            given.step += 1

    train_step(None)
    return {
        "device": torch.device("cpu"),
        "model": model,
        "optimizer": optimizer,
        "schedule": schedule,
        "scheduler": schedule,
        "batches": range(1001),
        "train_step": train_step,
        "steps": 1000,
    }


class Blocks(nn.Module):
    """A model whose units the pages on sharding call ``layers`` or ``blocks``."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def yours_in(page: Path) -> dict[str, object]:
    """What else the block of this page asks for."""
    name = page.stem
    if name == "peer_copies":
        return {"model": Blocks(), "fully_shard": fully_shard}
    if name == "saves_beside_training":
        return {"loader": Loader(1000)}
    if name == "load":
        given = yours()
        saved = TrainingState(given["model"], given["optimizer"])
        dcp.save({"app": saved}, checkpoint_id="checkpoints/step1000")
        dcp.save({"model": given["model"].state_dict()}, checkpoint_id="pretrained")
        return {}
    if name == "export":
        return {"model": small_llama()}
    if name == "torchtitan_fsdp2":
        recipe = module_of(page)
        fields = ("model", "pipelining_fn", "post_optimizer_build_fn", "state_dict_adapter")
        spec = recipe.ModelSpec(
            "decoder", "small", **dict.fromkeys(fields), parallelize_fn=recipe.parallelize
        )
        return {"config": SimpleNamespace(), "model_registry": lambda size: spec}
    if name == "torchtitan_checkpointer":
        return {"config": SimpleNamespace()}
    if name == "transformers_trainer":
        recipe = module_of(page)
        text = torch.zeros(4, dtype=torch.int64)
        data = [{"input_ids": text, "labels": text}] * 8
        model = recipe.LlamaForCausalLM(recipe.MODEL)
        return {"model": model, "data": data, "TrainerOnAnyDevice": recipe.TrainerOnAnyDevice}
    if name == "lightning_strategy":
        recipe = module_of(page)

        class Model(recipe.Model):
            def on_train_batch_end(self, *_) -> None:
                self.trainer.should_stop = self.global_step > 100

        data = torch.utils.data.DataLoader(torch.ones(202, recipe.WIDTH), batch_size=2)
        return {"model": Model(), "data": data}
    return {}


def small_llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = dict.fromkeys(("hidden_size", "intermediate_size", "vocab_size"), 8)
    config = LlamaConfig(**sizes, num_attention_heads=2, num_hidden_layers=1)
    return LlamaForCausalLM(config)


class Loader:
    """Batches of a rank, which know how many have been taken."""

    def __init__(self, batches: int) -> None:
        self.batches = batches
        self.taken = 0

    def __iter__(self) -> Iterator[int]:
        while self.taken < self.batches:
            self.taken += 1
            yield self.taken

    def state_dict(self) -> dict[str, int]:
        return {"taken": self.taken}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.taken = state["taken"]


def blocks_of_readme() -> list[str]:
    text = (SOURCE.parent / "README.md").read_text(encoding="utf-8")
    return re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def landing_block() -> str:
    text = (SOURCE.parent / "index.rst").read_text(encoding="utf-8")
    block = re.search(r"^\.\. code-block:: python\n\n((?: {3}.*\n|\n)+)", text, re.MULTILINE)
    return textwrap.dedent(block[1]).rstrip("\n") + "\n"


def log_lines(text: str) -> list[str]:
    """The shape of each line of the log that tells of a save: its figures are left out."""
    found = re.findall(r"step200: the call took[^`]+?written in [\d.]+ s", text)
    return [re.sub(r"[\d.]+ s", "N s", " ".join(line.split())) for line in found]


def test_the_first_block_runs_as_it_stands_and_logs_what_readme_shows(tmp_path: Path) -> None:
    """README's, which the landing page has, too: a process in an empty folder, and once more."""
    block, readme = blocks_of_readme()[0], SOURCE.parent / "README.md"
    assert landing_block() == block
    (tmp_path / "train.py").write_text(block, encoding="utf-8")
    library = {"PYTHONPATH": str(SOURCE.parent)}
    said = []
    for _ in range(2):
        command = [sys.executable, "train.py"]
        ran = subprocess.run(
            command, cwd=tmp_path, env=os.environ | library, capture_output=True, text=True
        )
        assert ran.returncode == 0, ran.stderr
        said.append(ran.stderr)
    assert "resumed" not in said[0] and "resumed from step 200" in said[1]
    for page in (readme, SOURCE.parent / "index.rst"):
        shown = log_lines(page.read_text(encoding="utf-8"))
        assert shown and shown == log_lines(said[0]), page.name
    kept = {path.name for path in (tmp_path / "checkpoints").glob("step*")}
    assert kept == {"step100", "step200"}


def test_readmes_loop_over_a_loader_runs(rank, no_recipes, tmp_path: Path) -> None:
    """With the lines of the block above in it: 250 batches, and a run that goes on to 420."""
    whole, block, *_ = blocks_of_readme()
    left_out = "        ...  # your step; then the lines from `leave` on, as above\n"
    assert left_out in block
    begin, end = whole.index("        leave = "), whole.index("sys.exit")
    block = block.replace(left_out, f"        train_step(batch)\n{whole[begin:end]}")
    block += whole[end:]
    for batches, done, kept in (
        (250, 0, {"step100", "step200"}),
        (420, 200, {"step300", "step400"}),
    ):
        given = yours() | {"loader": Loader(batches), "sys": sys}
        given |= {"CheckpointManager": CheckpointManager, "TrainingState": TrainingState}
        with pytest.raises(SystemExit) as left:
            exec(block, given)
        assert left.value.code == 0
        assert given["done"] == done
        assert given["loader"].taken == batches
        assert {path.name for path in (tmp_path / "checkpoints").glob("step*")} == kept


def test_readme_says_how_large_the_library_is() -> None:
    text = (SOURCE.parent / "README.md").read_text(encoding="utf-8")
    said = int(re.search(r"about ([\d,]+) lines", text)[1].replace(",", ""))
    files = (SOURCE.parent / "overlap_recipes").rglob("*.py")
    lines = sum(len(file.read_text(encoding="utf-8").splitlines()) for file in files)
    assert 0.85 * said < lines < 1.15 * said


def save_by(config: SimpleNamespace, recipe: ModuleType) -> None:
    """What a torchtitan job does with the block's config."""
    training = recipe.Training(torch.device("cpu"), None, seed=0)
    checkpointer = config.checkpoint.build(
        dataloader=training.data,
        model_parts=[training.model],
        optimizers=training.optimizers,
        lr_schedulers=training.schedulers,
        states={"train_state": training},
        sd_adapter=None,
    )
    checkpointer.save(100)
    checkpointer.close()


@pytest.mark.filterwarnings("ignore:FSDP2 communicates as before. there is one rank")
@pytest.mark.parametrize("page", with_blocks(), ids=lambda page: page.stem)
def test_a_first_block_runs(page: Path, rank, no_recipes, monkeypatch: pytest.MonkeyPatch) -> None:
    if name := included(page):
        calls = [
            node.func for node in ast.walk(ast.parse(page.read_text())) if hasattr(node, "func")
        ]
        assert name in {getattr(call, "id", None) for call in calls}, "the proof does not call it"
        return
    block, names = first_block(page), yours() | yours_in(page)
    assert block, "the page begins without lines to paste"
    for theirs, ours in INSTEAD.get(page.stem, {}).items():
        assert theirs in block
        block = block.replace(theirs, ours)
    if f"from {page.stem} import" in block:
        monkeypatch.syspath_prepend(page.parent)
    exits = page.stem == "saves_beside_training"
    with pytest.raises(SystemExit) if exits else contextlib.nullcontext():
        exec(compile(block, page.name, "exec"), names)
    if page.stem == "torchtitan_checkpointer":
        save_by(names["config"], module_of(page))
    if page.stem == "torchtitan_fsdp2":
        build = module_of(page).build
        assert build(names["config"].model_spec, False, torch.device("cpu")).in_place
    for left in LEAVES.get(page.stem, []):
        assert any(Path(left).iterdir()), left


def test_a_folder_of_the_hub_is_loaded_by_the_later_block_of_its_page(rank, no_recipes) -> None:
    (block,) = later_blocks(SOURCE / "checkpoint" / "load.py", "python")
    saved = small_llama()
    saved.save_pretrained("folder")
    names = {"folder": "folder"}
    exec(block, names)
    loaded = dict(names["model"].named_parameters())
    for name, parameter in saved.named_parameters():
        assert torch.equal(loaded[name].full_tensor(), parameter), name


def test_what_a_page_has_our_command_do_ends_well(rank) -> None:
    given = yours()
    state = TrainingState(given["model"], given["optimizer"])
    with CheckpointManager("checkpoints", state) as checkpoints:
        checkpoints.save(1)
    done = []
    for block in later_blocks(SOURCE / "checkpoint" / "saves_beside_training.py", "bash"):
        for line in block.splitlines():
            words = shlex.split(line, comments=True)
            if words[:3] == ["python", "-m", "overlap_recipes.checkpoint"]:
                assert command(words[3:]) == 0, line
                done.append(words[3])
    assert done == ["list", "verify", "prune"]
