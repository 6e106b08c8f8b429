"""What users of three trainers do around saves; the arguments name the trainer and the troubles."""

import logging
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

REPO = Path(__file__).parents[2]
sys.path[:0] = [str(Path(__file__).parent), str(REPO), str(REPO / "recipes_source" / "trainers")]

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from raising import raised  # noqa: E402

from overlap_recipes.checkpoint import saves as saves_module  # noqa: E402
from overlap_recipes.checkpoint.saves import Saves  # noqa: E402
from overlap_recipes.checkpoint.writer import FileWriter  # noqa: E402
from overlap_recipes.checkpoint.writing import Target  # noqa: E402

warnings.filterwarnings("ignore")
FULL = OSError(28, "No space left on device")


def names(root: Path) -> list[str]:
    dist.barrier()
    found = sorted(path.name for path in root.iterdir())
    dist.barrier()
    return found


def local(model: torch.nn.Module) -> list[torch.Tensor]:
    return [weight.detach().to_local().clone() for weight in model.parameters()]


def same(first: list[torch.Tensor], second: list[torch.Tensor]) -> bool:
    return all(torch.equal(*pair) for pair in zip(first, second, strict=True))


class Plans:
    """Where memory is made and files are planned, while its block lasts."""

    def __init__(self) -> None:
        self.made_by: list[str] = []
        self.in_saves = 0

    def __enter__(self) -> "Plans":
        self.make_buffer = Saves.make_buffer
        self.write = FileWriter.write

        def make_buffer(saves: Saves, tensors: list) -> None:
            self.made_by.append(threading.current_thread().name)
            self.make_buffer(saves, tensors)

        def write(files: FileWriter, *args: object) -> None:
            before = files.plans
            self.write(files, *args)
            self.in_saves += files.plans - before

        Saves.make_buffer = make_buffer
        FileWriter.write = write
        return self

    def __exit__(self, *error: object) -> None:
        Saves.make_buffer = self.make_buffer
        FileWriter.write = self.write

    def were_made_beside_training(self) -> None:
        assert self.made_by == ["write"], f"memory was made by the threads {self.made_by}"
        assert self.in_saves == 0, f"saves made {self.in_saves} plans"


def torchtitan() -> dict[str, Callable[[Path], None]]:
    import torchtitan_checkpointer as recipe

    from overlap_recipes.trainers import torchtitan as library

    logging.disable(logging.WARNING)
    logging.getLogger("torchtitan").setLevel(logging.ERROR)
    manager = library.OverlappedCheckpointManager

    def training(root: Path, **settings: object) -> recipe.Training:
        given = manager.Config
        manager.Config = lambda **others: given(**{**others, **settings})
        try:
            return recipe.Training(recipe.start_rank.device, root, seed=0)
        finally:
            manager.Config = given

    def leftovers_do_not_count(root: Path) -> None:
        """What killed runs have left is not kept in the place of complete checkpoints."""
        if dist.get_rank() == 0:
            for step in 300, 400:
                (root / f"step-{step}.incomplete").mkdir()
                (root / f"step-{step}.incomplete" / ".metadata").touch()
        dist.barrier()
        run = training(root, keep_latest_k=2)
        run.train()
        assert {"step-4", "step-6", "step-8"} <= set(names(root)), names(root)

    def refused(root: Path) -> None:
        """What this class cannot do is refused before training, not at the first save."""
        for setting in {"async_mode": "async_with_pinned_mem"}, {"folder": "s3://bucket/run"}:
            error = raised(lambda setting=setting: training(root, **setting))
            assert isinstance(error, ValueError), (setting, error)

    def interrupted(root: Path) -> None:
        """Ctrl-C: torchtitan's program ends without ``close``, and the save is finished."""
        program = (
            f"import sys; sys.path[:0] = {sys.path[:3]}\n"
            "import pathlib, torchtitan_checkpointer as recipe\n"
            f"training = recipe.Training(recipe.start_rank(''), pathlib.Path({str(root)!r}), 0)\n"
            "training.checkpointer.save(recipe.SAVE_EVERY)\n"
            "raise KeyboardInterrupt"
        )
        if dist.get_rank() == 0:
            alone = {name: value for name, value in os.environ.items() if "RANK" not in name}
            subprocess.run([sys.executable, "-c", program], env=alone, timeout=60, check=False)
        assert names(root) == ["step-2"], names(root)

    def killed_in_the_last_save(root: Path) -> None:
        """It is written over one of an earlier run, and a later run must not load the mixture."""
        training(root).train()
        run, stock = training(root), library.CheckpointManager.dcp_save

        def killed(
            self: manager, state: dict, checkpoint_id: str, *_: object, **__: object
        ) -> None:
            Path(checkpoint_id, f"__{dist.get_rank()}_0.distcp").write_text("half")
            raise KeyboardInterrupt

        library.CheckpointManager.dcp_save = killed
        load = run.checkpointer.load
        run.checkpointer.load = lambda: load(step=4)
        error = raised(run.train)
        library.CheckpointManager.dcp_save = stock
        assert isinstance(error, KeyboardInterrupt), repr(error)
        dist.barrier()
        assert run.checkpointer._find_load_step() == 6, names(root)
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(root / "step-8")  # the harness judges what is left

    def first_save_is_prepared(root: Path) -> None:
        with Plans() as plans:
            training(root).train()
        plans.were_made_beside_training()
        with Plans() as plans:
            training(root / "disabled", async_mode="disabled").train()
        assert not plans.made_by, "memory for saves that do not come"

    def ranks_differ(root: Path) -> None:
        """What torchtitan would give to all ranks, and differs, fails the first save."""
        run = training(root)
        place = SimpleNamespace(state_dict=lambda: {"place": dist.get_rank()})
        place.load_state_dict = lambda state: None
        run.checkpointer.states["mine"] = place
        error = raised(run.train)
        assert isinstance(error, RuntimeError) and "mine.place" in str(error), repr(error)
        dist.barrier()

    recipe.start_rank.device = recipe.start_rank("troubles")
    troubles = (
        ranks_differ,
        *(first_save_is_prepared, leftovers_do_not_count, refused, interrupted),
        killed_in_the_last_save,
    )
    return {f.__name__: f for f in troubles}


def lightning() -> dict[str, Callable[[Path], None]]:
    import lightning_strategy as recipe
    from lightning.pytorch.callbacks import Callback, ModelCheckpoint, OnExceptionCheckpoint
    from lightning.pytorch.plugins.io import TorchCheckpointIO

    from overlap_recipes.trainers import lightning as library
    from overlap_recipes.trainers.lightning import LightningFiles, OverlappedStrategy

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    logging.getLogger("overlap_recipes.checkpoint.saves").setLevel(logging.CRITICAL)

    def trainer(*callbacks: Callback, strategy: type = OverlappedStrategy) -> recipe.Trainer:
        return recipe.Trainer(
            max_steps=4,
            accelerator="cpu",
            devices=dist.get_world_size(),
            strategy=strategy(dist.get_world_size(), tensor_parallel_size=1),
            plugins=[recipe.TorchElasticEnvironment()],
            callbacks=list(callbacks),
            enable_checkpointing=bool(callbacks),
            enable_progress_bar=False,
            enable_model_summary=False,
            logger=False,
        )

    def fit(train: recipe.Trainer, resume: str | None = None) -> recipe.Model:
        model = recipe.Model()
        train.fit(model, recipe.Batches(), ckpt_path=resume)
        return model

    def first_save_is_prepared(root: Path) -> None:
        checkpoints = ModelCheckpoint(root, "{step}", every_n_train_steps=2)
        with Plans() as plans:
            fit(trainer(checkpoints))
        plans.were_made_beside_training()
        small = ModelCheckpoint(root, "w{step}", every_n_train_steps=4, save_weights_only=True)
        with Plans() as plans:
            fit(trainer(small))
        assert plans.made_by == ["MainThread"], "of a state that is not saved"

    def one_name(root: Path) -> None:
        """``save_last=True`` writes ``last.ckpt`` at every save; a later run resumes from it."""
        checkpoints = ModelCheckpoint(root, "{step}", every_n_train_steps=2, save_last=True)
        model = fit(trainer(checkpoints))
        assert names(root) == ["last.ckpt", "step=4.ckpt"], names(root)
        assert same(local(model), local(fit(trainer(), resume=str(root / "last.ckpt")))), "older"

    def closure_called_again(root: Path) -> None:
        """LBFGS calls its closure several times a step, and wants new gradients each time."""

        class Model(recipe.Model):
            def configure_optimizers(self) -> torch.optim.Optimizer:
                return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=3)

        trained = []
        for strategy in library.ModelParallelStrategy, OverlappedStrategy:
            torch.manual_seed(0)
            model = Model()
            trainer(strategy=strategy).fit(model, recipe.Batches())
            trained.append(local(model))
        assert same(*trained), "other weights than with ModelParallelStrategy"

    def last_is_a_link(root: Path) -> None:
        """``save_last="link"`` links to what is complete, however late the write is."""
        asked, linked = threading.Event(), []
        write, save = LightningFiles.write, Saves.save

        class Asked(OverlappedStrategy):
            def file_exists(self, *args: object) -> bool:
                asked.set()
                return super().file_exists(*args)

        class Linked(ModelCheckpoint):
            @staticmethod
            def _link_checkpoint(trainer: object, filepath: str, linkpath: str) -> None:
                linked.append(Path(filepath, ".metadata").exists())
                asked.set()
                ModelCheckpoint._link_checkpoint(trainer, filepath, linkpath)

        def save_held(self: Saves, *args: object) -> object:
            asked.clear()
            return save(self, *args)

        def held(self: LightningFiles, *args: object) -> None:
            asked.wait(60)
            write(self, *args)

        LightningFiles.write, Saves.save = held, save_held
        fit(
            trainer(Linked(root, "{step}", every_n_train_steps=2, save_last="link"), strategy=Asked)
        )
        LightningFiles.write, Saves.save = write, save
        assert linked and all(linked), linked
        assert (root / "last.ckpt").resolve() == (root / "step=4.ckpt").resolve(), names(root)

    class Raises(Callback):
        """Raise at the end of step 3, on all ranks."""

        def __init__(self, error: BaseException) -> None:
            self.error = error

        def on_train_batch_end(self, trainer: recipe.Trainer, *_: object) -> None:
            if trainer.global_step == 3:
                raise self.error

    def saved_on_exception(root: Path) -> None:
        """The checkpoint that Lightning saves when training raises is written."""
        on_exception = OnExceptionCheckpoint(root)
        for error in RuntimeError("stop"), KeyboardInterrupt():
            torch.manual_seed(0)
            found = raised(lambda error=error: fit(trainer(Raises(error), on_exception)))
            assert isinstance(found, (RuntimeError, SystemExit)), repr(found)
            assert names(root) == ["on_exception.ckpt"], (error, names(root))
            saved = str(root / "on_exception.ckpt")
            torch.manual_seed(1)
            resumed = fit(trainer(), resume=saved)
            assert min(resumed.losses) == 4, resumed.losses
            torch.manual_seed(0)
            assert same(local(resumed), local(fit(trainer(on_exception)))), "another run"
            assert names(root) == [], "a finished fit removes it"

    def half_deleted(root: Path) -> None:
        """A run that is killed while it deletes the old checkpoint resumes from the new one."""
        remove = TorchCheckpointIO.remove_checkpoint

        def killed(self: TorchCheckpointIO, path: str) -> None:
            (Path(path) / "meta.pt").unlink()

        checkpoints = "last-{step}"
        TorchCheckpointIO.remove_checkpoint = killed
        model = fit(trainer(ModelCheckpoint(root, checkpoints, every_n_train_steps=2)))
        TorchCheckpointIO.remove_checkpoint = remove
        train = trainer(ModelCheckpoint(root, checkpoints, every_n_train_steps=2))
        resumed = fit(train, resume="last")
        assert train.global_step == 4 and same(local(model), local(resumed)), "not the last"

    def failed_deletion(root: Path) -> None:
        """What cannot be deleted stays, under another name, and training goes on."""
        remove = TorchCheckpointIO.remove_checkpoint

        def denied(self: TorchCheckpointIO, path: str) -> None:
            raise PermissionError(13, "Permission denied", str(path))

        logging.getLogger("concurrent.futures").setLevel(logging.CRITICAL)
        TorchCheckpointIO.remove_checkpoint = denied
        error = raised(lambda: fit(trainer(ModelCheckpoint(root, "{step}", every_n_train_steps=2))))
        TorchCheckpointIO.remove_checkpoint = remove
        assert error is None, repr(error)
        kept, new = names(root)
        assert re.fullmatch(r"step=2\.ckpt\.\d+\.replaced", kept) and new == "step=4.ckpt", kept

    def failed_beside_another(root: Path) -> None:
        """A checkpoint stays until *its* successor is complete, not that of another callback."""
        write = LightningFiles.write

        def full(self: LightningFiles, state: dict, target: Target, *rest: object) -> None:
            name = Path(target.name).name
            if "whole" in name and "step=2" not in name:
                raise FULL
            write(self, state, target, *rest)

        LightningFiles.write = full
        whole = ModelCheckpoint(root, "whole-{step}", every_n_train_steps=2)
        small = ModelCheckpoint(root, "small", every_n_train_steps=1, save_weights_only=True)
        error = raised(lambda: fit(trainer(whole, small)))
        LightningFiles.write = write
        assert "No space left" in str(error), repr(error)
        assert "whole-step=2.ckpt" in names(root), names(root)

    class Average(Callback):
        def setup(self, trainer: recipe.Trainer, model: recipe.Model, stage: str) -> None:
            self.model = model

        def state_dict(self) -> dict:
            return {name: 0.9 * weight.detach() for name, weight in self.model.named_parameters()}

    def sharded_in_a_callback(root: Path) -> None:
        """Lightning writes what callbacks save of rank 0, and loads it on all ranks."""
        checkpoints = ModelCheckpoint(root, "last-{step}", every_n_train_steps=2)
        error = raised(lambda: fit(trainer(Average(), checkpoints)))
        assert isinstance(error, TypeError) and "full_tensor" in str(error), repr(error)

    class OfThisRank(Callback):
        """Something that is at another place on each rank."""

        def __init__(self) -> None:
            self.place = 10 + dist.get_rank()

        def state_dict(self) -> dict:
            return {"place": self.place}

        def load_state_dict(self, state: dict) -> None:
            self.place = state["place"]

    def each_rank_has_its_own(root: Path) -> None:
        """Lightning keeps the callbacks and loops of rank 0 alone, and gives them to all ranks."""
        fit(trainer(OfThisRank(), ModelCheckpoint(root, "{step}", every_n_train_steps=2)))
        again = OfThisRank()
        again.place = None
        fit(trainer(again), resume=str(root / "step=4.ckpt"))
        assert again.place == 10 + dist.get_rank(), f"resumed with {again.place}"

    recipe.start_rank("troubles")
    troubles = (
        *(first_save_is_prepared, each_rank_has_its_own, sharded_in_a_callback, one_name),
        *(closure_called_again, last_is_a_link, saved_on_exception, half_deleted),
        *(failed_deletion, failed_beside_another),
    )
    return {f.__name__: f for f in troubles}


def transformers() -> dict[str, Callable[[Path], None]]:
    import transformers_trainer as recipe
    from transformers import TrainerCallback

    from overlap_recipes.trainers.transformers import TrainerFiles, save_state

    recipe.transformers.logging.set_verbosity_error()
    logging.getLogger("overlap_recipes.checkpoint.saves").setLevel(logging.CRITICAL)
    recipe.STEPS = 4

    class At(TrainerCallback):
        """Call ``do`` at the end of step 3, or after each save."""

        def __init__(self, do: Callable[..., None], saves: bool = False) -> None:
            self.do, self.saves = do, saves

        def on_step_end(self, args, state, control, **kwargs) -> None:
            if not self.saves and state.global_step == 3:
                self.do()

        def on_save(self, args, state, control, **kwargs) -> None:
            if self.saves:
                self.do(Path(args.output_dir, f"checkpoint-{state.global_step}"))

    def stop() -> None:
        raise RuntimeError("stop")

    def build(
        root: Path,
        *callbacks: TrainerCallback,
        seed: int = 0,
        lora: bool = False,
        save: bool = True,
    ) -> recipe.Trainer:
        if lora:
            from peft import LoraConfig, get_peft_model

            def llama(config: object) -> torch.nn.Module:
                torch.manual_seed(0)  # the weights below the adapters come from elsewhere
                base = stock(config)
                torch.manual_seed(seed)
                return get_peft_model(base, LoraConfig(r=2, init_lora_weights=False))

        stock = recipe.LlamaForCausalLM
        recipe.LlamaForCausalLM = llama if lora else stock
        trainer = recipe.build_trainer(root, seed, save)
        recipe.LlamaForCausalLM = stock
        for callback in callbacks:
            trainer.add_callback(callback)
        return trainer

    def first_save_is_prepared(root: Path) -> None:
        for lora in False, True:
            with Plans() as plans:
                build(root, lora=lora).train()
            plans.were_made_beside_training()
        trainer = build(root)
        trainer.args.save_strategy = "no"
        with Plans() as plans:
            trainer.train()
        assert not plans.made_by, "memory for saves that do not come"

    def adapters(root: Path) -> None:
        """A model with LoRA resumes by ``resume_from_checkpoint=True``."""
        assert "stop" in str(raised(build(root, At(stop), lora=True).train))
        resumed = build(root, seed=1, lora=True)
        resumed.train(resume_from_checkpoint=True)
        expected = build(root, lora=True, save=False)
        expected.train()
        assert same(local(resumed.model), local(expected.model)), "another run"

    def trained_again(root: Path) -> None:
        """``train`` after one that raised, in the same folder: its saves replace the others.

        What a killed run has left does not take the place of a complete checkpoint.
        """
        mine = At(lambda folder: (folder.mkdir(exist_ok=True), (folder / "mine").touch()), True)
        assert "stop" in str(raised(build(root, At(stop)).train))
        trainer = build(root, mine, seed=1)
        trainer.args.save_total_limit = 1
        (root / "checkpoint-400.incomplete").mkdir(exist_ok=True)
        trainer.train()
        left = ["checkpoint-2", "checkpoint-4", "checkpoint-400.incomplete"]
        assert names(root) == left, names(root)
        assert (root / "checkpoint-2" / "mine").exists(), "a callback's file is gone"
        resumed = build(root, seed=2)
        resumed.train(resume_from_checkpoint=True)
        assert same(local(resumed.model), local(trainer.model)), "of the first run"

    def two_in_flight(root: Path) -> None:
        """Two calls of ``save_state`` in a row: each checkpoint has its own small files."""
        trainer = build(root, save=False)
        trainer.train()
        own = SimpleNamespace(state_dict=lambda: {"call": call}, load_state_dict=None)
        trainer.accelerator.register_for_checkpointing(own)  # into a small file
        gate, wait = threading.Event(), saves_module.wait

        class Late(TrainerFiles):
            def write(self, *args: object) -> None:
                assert gate.wait(60)
                super().write(*args)

        def open_and_wait(uploads: list) -> object:
            gate.set()
            return wait(uploads)

        saves_module.wait = open_and_wait
        block = Saves(trainer.args.device, writer=Late())
        with tempfile.TemporaryDirectory() as aside, block as saves:
            for call in 1, 2:
                parts = trainer.accelerator, saves, trainer.model, trainer.optimizer, aside
                save_state(*parts, root / f"{call}")
        saves_module.wait = wait
        for call in 1, 2:
            saved = torch.load(root / f"{call}" / "custom_checkpoint_0.pkl")["call"]
            assert saved == call, f"the small files of call {call} are those of {saved}"

    def refused(root: Path) -> None:
        """A checkpoint that accelerate would not find is refused before training."""
        trainer = build(root)
        plugin = trainer.accelerator.state.fsdp_plugin
        plugin.set_state_dict_type("FULL_STATE_DICT")
        error = raised(trainer.train)
        assert "SHARDED_STATE_DICT" in str(error), repr(error)
        trainer.accelerator.state.distributed_type = recipe.DistributedType.MULTI_CPU
        error = raised(trainer.train)
        assert "FSDP2" in str(error), repr(error)

    recipe.start_rank("troubles")
    troubles = (first_save_is_prepared, adapters, trained_again, two_in_flight, refused)
    return {f.__name__: f for f in troubles}


def main(trainer: str, *chosen: str) -> None:
    troubles = {f.__name__: f for f in (torchtitan, lightning, transformers)}[trainer]()
    shared = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(shared)
    for name in chosen or troubles:
        root = Path(shared[0], name)
        root.mkdir(exist_ok=True)
        dist.barrier()
        print(name, flush=True)
        troubles[name](root)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
