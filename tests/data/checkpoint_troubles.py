"""What can go wrong around a save of the checkpoint recipes; the argument names it."""

import sys
import tempfile
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import closing
from pathlib import Path

RECIPES = Path(__file__).parents[2] / "recipes_source" / "checkpoint"
sys.path.insert(0, str(RECIPES))

import async_save as basic  # noqa: E402
import default_stager  # noqa: E402
import pinned_staging  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import torch.distributed.checkpoint as dcp  # noqa: E402
from torch import nn  # noqa: E402
from torch.distributed.checkpoint import FileSystemWriter  # noqa: E402

basic.WIDTH, basic.HIDDEN = 16, 64
WRITE = FileSystemWriter.write_data


def write_when(name: str, before_write: Callable[[], object]) -> None:
    """Call ``before_write`` before this rank's part of a checkpoint ``name`` is written."""

    def write_data(self, plan, planner):
        if Path(self.path).name == name:
            before_write()
        return WRITE(self, plan, planner)

    FileSystemWriter.write_data = write_data


def disk_is_full() -> None:
    raise OSError(28, "No space left on device")


def raised(call: Callable[[], object]) -> BaseException | None:
    """What ``call`` raises."""
    try:
        call()
    except BaseException as error:
        return error
    return None


def interrupt_the_first_wait(upload: Future, then: Callable[[], object]) -> None:
    """Make the first wait for ``upload`` raise KeyboardInterrupt and the others begin with it."""
    waits = []

    def interrupted(original: Callable) -> Callable:
        def wait(timeout=None):
            waits.append(timeout)
            if len(waits) == 1:
                raise KeyboardInterrupt
            then()
            return original(timeout)

        return wait

    upload.result, upload.exception = interrupted(upload.result), interrupted(upload.exception)


def assert_right(root: Path, device: torch.device, saved: dict[int, dict]) -> None:
    for step, bits in saved.items():
        basic.assert_same_bits(basic.load_app(root / f"step{step}", device), bits)


# -- one after another: AsyncCheckpoints and PinnedCheckpoints ------------------------------------


def interrupted(root: Path, device: torch.device) -> None:
    """A wait is interrupted during the write; the emergency save comes at once."""
    for kind in (basic.AsyncCheckpoints, pinned_staging.PinnedCheckpoints):
        app, saved, release = basic.build_app(device), {}, threading.Event()
        write_when("step1", release.wait)
        with closing(kind(root / kind.__name__)) as checkpoints:
            basic.train_step(app, device)
            saved[app.step] = basic.snapshot(app)
            checkpoints.save(app)
            first = checkpoints.upload
            interrupt_the_first_wait(first, release.set)
            basic.train_step(app, device)
            assert isinstance(raised(lambda c=checkpoints, a=app: c.save(a)), KeyboardInterrupt)
            saved[app.step] = basic.snapshot(app)
            checkpoints.save(app)
            beside = not first.done()
            release.set()
            assert not beside, f"{kind.__name__}: the emergency save ran beside the first one"
        assert_right(checkpoints.root, device, saved)


class PlainState:
    """A state of one tensor, ``weight``."""

    def __init__(self, weight: torch.Tensor) -> None:
        self.step, self.weight, self.settings = 1, weight, {}

    def state_dict(self) -> dict:
        return {"weight": self.weight, "step": self.step, "settings": self.settings}


def other_dtype(root: Path, device: torch.device) -> None:
    """The buffers are bfloat16, then the state is float32."""
    third = torch.full((4,), 1 / 3, device=device)
    app = PlainState(third.bfloat16())
    with closing(pinned_staging.PinnedCheckpoints(root)) as checkpoints:
        checkpoints.save(app)
        app.step, app.weight = 2, third
        error = raised(lambda: checkpoints.save(app))
        assert isinstance(error, ValueError) and "release()" in str(error), repr(error)
        checkpoints.release()
        checkpoints.save(app)
        checkpoints.wait()
        loaded = {"app": {"weight": torch.zeros(4, device=device)}}
        dcp.load(loaded, checkpoint_id=root / "step2")
        assert torch.equal(loaded["app"]["weight"], third)


def other_settings(root: Path, device: torch.device) -> None:
    """A plain value more, and nothing else."""
    app = PlainState(torch.ones(4, device=device))
    with closing(pinned_staging.PinnedCheckpoints(root)) as checkpoints:
        checkpoints.save(app)
        app.step, app.settings = 2, {"initial_lr": 0.1}
        error = raised(lambda: checkpoints.save(app))
        assert isinstance(error, ValueError) and "initial_lr" in str(error), repr(error)


# -- staged beside training: StagedCheckpoints ----------------------------------------------------


class WithTable(basic.SampleCounter):
    """A counter beside a buffer that the state dict leaves out."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.ones(3), persistent=False)


def staged_app(layers: list[nn.Module], wrap: Callable = lambda model: model) -> basic.AppState:
    model = wrap(nn.Sequential(*layers, nn.Linear(basic.WIDTH, basic.WIDTH)))
    return basic.AppState(model, torch.optim.AdamW(model.parameters()))


def buffers_by_any_name(root: Path, device: torch.device) -> None:
    """Buffers that the state dict leaves out, names otherwise, or names twice."""
    counters = [basic.SampleCounter(), basic.SampleCounter()]
    counters[1].samples = counters[0].samples
    apps = {
        "not persistent": staged_app([WithTable()]),
        "DDP": staged_app([basic.SampleCounter()], nn.parallel.DistributedDataParallel),
        "compiled": staged_app(
            [basic.SampleCounter()], lambda model: torch.compile(model, backend="eager")
        ),
        "shared": staged_app(counters),
    }
    for name, app in apps.items():
        live = {buffer.data_ptr() for buffer in app.model.buffers()}
        state = default_stager.StagedApp(app, device).state_dict()["model"]
        counts = {key: value for key, value in state.items() if key.endswith("samples")}
        assert len(counts) == (2 if name == "shared" else 1), counts
        for key, value in counts.items():
            assert value.data_ptr() not in live, f"{name}: {key} is the live buffer"


def staging_fails(root: Path, device: torch.device) -> None:
    """One state cannot be staged, the next one can."""
    app = basic.build_app(device)
    with closing(default_stager.StagedCheckpoints(root, device)) as checkpoints:
        default_stager.train_step(app, checkpoints, device)
        settings = app.optimizer.param_groups[0]
        settings["log"] = default_stager.Unstageable()
        checkpoints.save(app)
        del settings["log"]
        assert isinstance(raised(checkpoints.wait_staged), TypeError)
        assert isinstance(raised(checkpoints.wait), TypeError)
        default_stager.train_step(app, checkpoints, device)
        checkpoints.save(app)
        saved = {app.step: basic.snapshot(app)}
    assert_right(root, device, saved)


def saved_before_the_first_step(root: Path, device: torch.device) -> None:
    """A checkpoint of step 0 is written, and another job goes on from it."""
    never_saved, app = basic.build_app(device), basic.build_app(device)
    with closing(basic.AsyncCheckpoints(root)) as checkpoints:
        checkpoints.save(app)
    resumed = basic.load_app(root / "step0", device)
    for trained in (never_saved, app, resumed):
        for _ in range(2):
            basic.train_step(trained, device)
    for trained in (app, resumed):
        basic.assert_same_bits(trained, basic.snapshot(never_saved))


def saved_before_the_first_step_by_sgd(root: Path, device: torch.device) -> None:
    """Optimizers that keep no count of their steps."""
    for momentum in (0.0, 0.9):
        model = nn.Linear(basic.WIDTH, 2).to(device)
        app = basic.AppState(model, torch.optim.SGD(model.parameters(), 0.1, momentum))
        before = [parameter.clone() for parameter in model.parameters()]
        app.state_dict()
        for parameter, value in zip(model.parameters(), before, strict=True):
            assert torch.equal(parameter, value)


TROUBLES = (
    *(interrupted, other_dtype, other_settings),
    *(buffers_by_any_name, staging_fails),
    *(saved_before_the_first_step, saved_before_the_first_step_by_sgd),
)

if __name__ == "__main__":
    device = basic.start_rank()
    with tempfile.TemporaryDirectory() as temporary:
        root = basic.directory_of_rank_0(Path(temporary))
        {trouble.__name__: trouble for trouble in TROUBLES}[sys.argv[1]](root, device)
    dist.destroy_process_group()
