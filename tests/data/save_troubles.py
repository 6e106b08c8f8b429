"""What can go wrong around the saves of three recipes; the argument names it."""

import contextlib
import logging
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from datetime import timedelta
from functools import partial
from pathlib import Path

RECIPES = Path(__file__).parents[2] / "recipes_source" / "checkpoint"
sys.path[:0] = [str(RECIPES), str(Path(__file__).parent)]

import _checks  # noqa: E402
import _toys as basic  # noqa: E402
import async_save  # noqa: E402
import default_stager  # noqa: E402
import pinned_staging  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import torch.distributed.checkpoint as dcp  # noqa: E402
from facing import face  # noqa: E402
from raising import raised  # noqa: E402
from torch import nn  # noqa: E402
from torch.distributed.checkpoint import FileSystemWriter, state_dict_saver  # noqa: E402
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions  # noqa: E402
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict  # noqa: E402
from torch.distributed.checkpoint.stateful import Stateful  # noqa: E402

basic.WIDTH, basic.HIDDEN = WIDTH, HIDDEN = 16, 64


class AppState(Stateful):
    """What a recipe from scratch saves: model, optimizer and step."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model = model
        self.optimizer = optimizer
        self.step = 0

    def state_dict(self) -> dict:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"step": self.step, "model": model, "optimizer": optimizer}

    def load_state_dict(self, state_dict: dict) -> None:
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state_dict["model"],
            optim_state_dict=state_dict["optimizer"],
        )
        self.step = state_dict["step"]


OfLibrary = basic.AppState
basic.AppState = AppState
WRITE = FileSystemWriter.write_data


STAGERS = ("async_save", "pinned_staging", "default_stager")


def saving(name: str, root: Path, device: torch.device) -> async_save.AsyncCheckpoints:
    """``AsyncCheckpoints`` with the stager of a recipe."""
    stager = None
    if name == "pinned_staging":
        stager = pinned_staging.PinnedStager()
    elif name == "default_stager":
        stager = default_stager.OverlappedStager(device, changing=list)
    return async_save.AsyncCheckpoints(
        root, stager, _checks.NamedWhenComplete, _checks.SameOnAllRanks()
    )


def ways(root: Path, device: torch.device) -> Iterator[async_save.AsyncCheckpoints]:
    """Each way of staging, with a directory of its own."""
    for name in STAGERS:
        checkpoints = saving(name, root / name, device)
        yield checkpoints
        if name == "default_stager":
            checkpoints.stager.close()


def save(checkpoints: async_save.AsyncCheckpoints, app: basic.AppState) -> None:
    """Save all of ``app`` after its last step."""
    if isinstance(checkpoints.stager, default_stager.OverlappedStager):
        checkpoints.stager.changing = app.model.buffers
    checkpoints.save(app.step, {"app": app.state_dict()})


def write_when(name: str, before_write: Callable[[], object]) -> None:
    """Call ``before_write`` before this rank's part of a checkpoint ``name`` is written."""

    def write_data(self, plan, planner):
        if Path(self.path).name.partition(".")[0] == name:
            before_write()
        return WRITE(self, plan, planner)

    FileSystemWriter.write_data = write_data


def disk_is_full() -> None:
    raise OSError(28, "No space left on device")


def assert_right(root: Path, device: torch.device, saved: dict[int, dict]) -> None:
    for step, bits in saved.items():
        basic.assert_same_bits(basic.load_app(root / f"step{step}", device), bits)


@contextlib.contextmanager
def uploads_held() -> Iterator[Callable[[], None]]:
    """No upload begins before the function that this gives is called."""
    released, plain = threading.Event(), state_dict_saver.save

    def save(*args, **kwargs):
        released.wait()
        return plain(*args, **kwargs)

    state_dict_saver.save = save
    try:
        yield released.set
    finally:
        released.set()
        state_dict_saver.save = plain


@contextlib.contextmanager
def logged() -> Iterator[list[str]]:
    """The errors that are logged meanwhile."""
    messages: list[str] = []
    handler = logging.Handler(logging.ERROR)
    handler.emit = lambda record: messages.append(record.getMessage())
    logging.getLogger().addHandler(handler)
    try:
        yield messages
    finally:
        logging.getLogger().removeHandler(handler)


def remove_incomplete(root: Path) -> None:
    """Take away what failed saves have left; it is not what this is about."""
    dist.barrier()
    if dist.get_rank() == 0:
        for directory in root.rglob("*.incomplete"):
            shutil.rmtree(directory)
    dist.barrier()


def group_gone(root: Path, device: torch.device) -> None:
    """The process group is destroyed in a ``finally`` while an upload waits its turn."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    for checkpoints in ways(root, device):
        app = basic.build_app(device)
        basic.train_step(app, device)
        bits = basic.snapshot(app)
        dist.barrier()
        with uploads_held() as release:
            save(checkpoints, app)
            upload = checkpoints.upload
            store = dist.distributed_c10d._get_default_store()
            dist.destroy_process_group()
            time.sleep(0.5 * rank)  # one after another, as threads may
            release()
            error = upload.exception()
        dist.init_process_group(
            "gloo", store=dist.PrefixStore("again", store), rank=rank, world_size=ranks
        )
        dist.barrier()
        named = checkpoints.root / "step1"
        if named.exists():
            print(f"{type(checkpoints).__name__}: {error!r}")
            basic.assert_same_bits(basic.load_app(named, device), bits)
        assert error is not None, "a save without its group reported success"
        remove_incomplete(root)


OPTIMIZERS = {
    "Adam": partial(torch.optim.Adam, weight_decay=0.1, amsgrad=True),
    "AdamW": torch.optim.AdamW,
    "Adamax": partial(torch.optim.Adamax, weight_decay=0.1),
    "Adadelta": partial(torch.optim.Adadelta, weight_decay=0.1),
    "Adagrad": partial(torch.optim.Adagrad, weight_decay=0.1),
    "NAdam": torch.optim.NAdam,
    "RAdam": partial(torch.optim.RAdam, weight_decay=0.1),
    "ASGD": torch.optim.ASGD,
    "RMSprop": partial(torch.optim.RMSprop, weight_decay=0.1, momentum=0.9, centered=True),
    "Rprop": torch.optim.Rprop,
    "SGD": torch.optim.SGD,
    "SGD momentum": partial(torch.optim.SGD, momentum=0.9, weight_decay=0.1),
    "SGD dampening": partial(torch.optim.SGD, momentum=0.9, dampening=0.5),
    "Adafactor": torch.optim.Adafactor,
    "Muon": torch.optim.Muon,
}


class CountsInInt(torch.optim.SGD):
    """An optimizer whose state holds a plain ``step``."""

    def step(self, closure: Callable | None = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                state["step"] = state.get("step", 0) + 1
                if parameter.grad is not None:
                    parameter.data.add_(parameter.grad, alpha=-group["lr"] / state["step"])


def app_with(optimizer: Callable, seed: int = 0) -> OfLibrary:
    torch.manual_seed(seed)
    model = nn.Linear(WIDTH, WIDTH, bias=False)
    return OfLibrary(model, optimizer(model.parameters(), lr=0.01))


def before_the_first_step(root: Path, device: torch.device) -> None:
    """A checkpoint of step 0 changes neither this training nor that of a job that resumes."""
    changed = {}
    for name, optimizer in (OPTIMIZERS | {"int step": CountsInInt}).items():
        never_saved, app, resumed = (app_with(optimizer, seed) for seed in (0, 0, 1))
        where = root / name
        try:
            dcp.save({"app": app}, checkpoint_id=where)
            dcp.load({"app": resumed}, checkpoint_id=where)
        except Exception as error:
            changed[name] = repr(error)
            continue
        for trained in (never_saved, app, resumed):
            for _ in range(5):
                basic.train_step(trained, device)
        for kind, trained in (("same job", app), ("resumed", resumed)):
            if not torch.equal(trained.model.weight, never_saved.model.weight):
                off = (trained.model.weight - never_saved.model.weight).abs().max().item()
                changed[f"{name}, {kind}"] = f"off by {off:.0e}"
    assert not changed, changed


def disk_full(root: Path, device: torch.device) -> None:
    """It costs a save, which is reported; the next is taken; the last save's error is raised."""
    for checkpoints in ways(root, device):
        app, saved = basic.build_app(device), {}
        with logged() as messages:
            for step in range(1, 5):
                write_when("step4" if step == 4 else "step2", disk_is_full)
                basic.train_step(app, device)
                saved[app.step] = basic.snapshot(app)
                save(checkpoints, app)
            error = raised(checkpoints.close)
        assert isinstance(error, RuntimeError) and "No space left" in str(error), repr(error)
        assert any("step2" in text and "No space left" in text for text in messages), messages
        for step in (2, 4):
            del saved[step]
            assert not (checkpoints.root / f"step{step}").exists()
        FileSystemWriter.write_data = WRITE
        assert_right(checkpoints.root, device, saved)
        remove_incomplete(root)


def cut_off_before(root: Path, device: torch.device) -> None:
    """Files of a save that was cut off lie where a later job saves the same step."""
    for checkpoints in ways(root, device):
        left = checkpoints.root / "step1.incomplete"
        if dist.get_rank() == 0:
            left.mkdir(parents=True)
            for name in ("__0_0.distcp", "__7_0.distcp", ".metadata", ".metadata.tmp"):
                (left / name).write_bytes(b"of another job")
        dist.barrier()
        app = basic.build_app(device)
        basic.train_step(app, device)
        bits = basic.snapshot(app)
        with closing(checkpoints):
            save(checkpoints, app)
        basic.assert_same_bits(basic.load_app(checkpoints.root / "step1", device), bits)
        dist.barrier()


def one_rank_cannot_stage(root: Path, device: torch.device) -> None:
    """It ends its job: a save that it begins later would meet the one in which the others are."""
    async_save.PATIENCE = timedelta(seconds=3)
    last = dist.get_rank() == dist.get_world_size() - 1
    for checkpoints in ways(root, device):
        state = {"ones": torch.ones(2, device=device)}
        whole = dcp.async_save
        if last:
            dcp.async_save = out_of_memory
        error = raised(lambda c=checkpoints, s=state: c.save(1, s))
        dcp.async_save = whole
        if last:
            assert isinstance(error, MemoryError), repr(error)
            error = raised(lambda c=checkpoints, s=state: c.save(2, s))
            assert isinstance(error, RuntimeError) and "end the job" in str(error), repr(error)
        else:
            assert isinstance(raised(checkpoints.wait), RuntimeError)
        assert not list(checkpoints.root.glob("step[12]"))
        dist.barrier()
    remove_incomplete(root)


def out_of_memory(*_: object, **__: object) -> None:
    raise MemoryError("no room for a copy of the state")


def a_stager_that_nobody_waits_for(root: Path, device: torch.device) -> None:
    """torch's copies while training goes on, and no optimizer step waits: refused at once."""
    stager = DefaultStager(StagingOptions(False, False, True, False))
    error = raised(lambda: async_save.AsyncCheckpoints(root, stager))
    stager.close()
    assert isinstance(error, TypeError) and "DefaultStager" in str(error), repr(error)


if __name__ == "__main__":
    face(globals())
