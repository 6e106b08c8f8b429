"""The harness judges every save: where it is, that it loads, and that it has what was passed."""

import re
import textwrap
from pathlib import Path

import pytest
from written_recipes import write

from rankproof.report import Report
from rankproof.run import run

LISTS = """
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.staging import AsyncStager

    class LaterStager(AsyncStager):
        _synchronize_after_execute = False

        def stage(self, state_dict):
            state_dict["losses"] = [1, 2.5, None, 3]
            state_dict["shape"] = (1, 'b')
            state_dict["random"] = b'other'
            return state_dict

        def close(self):
            pass

    if __name__ == "__main__":
        dist.init_process_group("gloo")
        state = {"losses": [1, 2.5, None], "shape": (1, "a"), "random": b"state", "same": (1, [2])}
        dcp.async_save(state, checkpoint_id="step1", async_stager=LaterStager()).result()
        dist.destroy_process_group()
"""


def test_lists_tuples_and_bytes_are_compared_too(tmp_path) -> None:
    report = run(write(tmp_path, "later.py", LISTS), 1, launcher="warm")
    assert report.kinds == {"checkpoint_wrong"}, report.describe()
    said = report.failures[0].text
    for found in ("losses ([1, 2.5, None, 3] instead", "shape ((1, 'b') ", "random (b'other' "):
        assert found in said, said
    assert "3 of 4 leaves" in said


SAVES_IN_BACKGROUND = """
    import asyncio, concurrent.futures, os, threading, time
    import torch
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp

    class NeverFinished(dcp.FileSystemWriter):
        def finish(self, *args, **kwargs):
            open("finishing", "w").close()
            threading.Event().wait()

    async def until_done(future):
        await asyncio.wrap_future(future)

    if __name__ == "__main__":
        dist.init_process_group("gloo")
        group = dist.new_group(backend="gloo")
        ended = threading.Event()
        writer = {writer}("step1")
        saved = dcp.async_save(
            {{"weight": torch.ones(4)}}, storage_writer=writer, process_group=group
        )
        {ending}
        dist.destroy_process_group()
"""
CALL_BACK = "saved.add_done_callback(lambda _: ended.set())"


def save_in_background(folder: Path, ending: str, writer: str = "dcp.FileSystemWriter") -> Report:
    text = SAVES_IN_BACKGROUND.format(writer=writer, ending=ending)
    recipe = write(folder, "saves_in_background.py", text)
    return run(recipe, 1, launcher="warm", gate="hold_write", deadline_s=30)


@pytest.mark.parametrize(
    "ending",
    [
        "while not saved.done(): pass",
        "for future in concurrent.futures.as_completed([saved]): future.result()",
        f"{CALL_BACK}\n        while not ended.is_set(): pass",
        "asyncio.run(until_done(saved))",
    ],
)
def test_a_recipe_may_learn_of_the_end_of_a_held_write_in_any_way(tmp_path, ending: str) -> None:
    report = save_in_background(tmp_path, ending)
    assert report.ok, report.describe()


SAVES_AND_MOVES = """
    import os, shutil
    import torch
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp

    class FullDisk(dcp.FileSystemWriter):
        def prepare_local_plan(self, plan):
            raise OSError("No space left on device")

    def save(value, directory, **settings):
        dcp.save({{"weight": torch.full((4,), float(value))}}, checkpoint_id=directory, **settings)

    if __name__ == "__main__":
        dist.init_process_group("gloo")
        rank = dist.get_rank()
        {does}
        dist.barrier()
        dist.destroy_process_group()
"""


def save_and_move(folder: Path, does: str, ranks: int = 2) -> Report:
    text = SAVES_AND_MOVES.format(does=does.replace("\n", "\n        "))
    return run(write(folder, "saves_and_moves.py", text), ranks, launcher="warm")


RENAMES = """
save(1, 'aside')
if rank == 0: os.replace('aside', 'step1')
dist.barrier()
save(2, 'aside')
if rank == 0: os.rename('aside', 'step2')
os.makedirs('folder', exist_ok=True)
save(3, 'folder/step3')
if rank == 0: shutil.move('folder', 'published')
"""


def test_a_checkpoint_is_judged_where_it_was_renamed_to(tmp_path) -> None:
    report = save_and_move(tmp_path, RENAMES)
    assert report.ok, report.describe()
    assert sorted(report.checkpoints) == ["step1", "step2", "step3"]


@pytest.mark.parametrize("lost", [".metadata", "__0_0.distcp"])
def test_a_renamed_checkpoint_must_still_load(tmp_path, lost: str) -> None:
    does = f"save(1, 'aside')\nos.remove('aside/{lost}')\nos.rename('aside', 'step1')"
    report = save_and_move(tmp_path, does, ranks=1)
    assert report.kinds == {"checkpoint_incomplete"}, report.describe()


ALONE = """
save(rank, f'rank{rank}', no_dist=True)
if rank == 0: save(7, 'vocabulary', no_dist=True)
dist.barrier()
save(1, 'step1')
"""


def test_ranks_may_save_alone(tmp_path) -> None:
    report = save_and_move(tmp_path, ALONE)
    assert report.ok, report.describe()
    assert len(report.checkpoints) == 4


MOVED_BY_ANOTHER = "import subprocess; subprocess.run(['mv', 'aside', 'step1'], check=True)"


def test_a_checkpoint_that_another_process_moved_is_not_judged_and_said_to_be_moved(
    tmp_path,
) -> None:
    does = f"save(1, 'aside')\ndist.barrier()\nif rank == 0: {MOVED_BY_ANOTHER}"
    report = save_and_move(tmp_path, does)
    assert report.verdict == "not judged", report.describe()
    assert report.unjudged == ["aside: another process seems to have moved it to step1"]
    assert "removed or replaced" not in report.describe()


@pytest.mark.parametrize(
    ("defines", "makes", "named"),
    [
        ("class Own(torch.Tensor): pass", "torch.ones(3).as_subclass(Own)", "Own"),
        ("from own_classes import Own", "Own()", "Own|own_classes"),
    ],
    ids=["a class of its own file", "a class of a module beside it"],
)
def test_what_only_the_script_can_load_is_not_judged_and_named(
    tmp_path, defines, makes, named
) -> None:
    write(tmp_path, "own_classes.py", "class Own: pass\n")
    does = f"dcp.save({{'own': {makes}}}, checkpoint_id='step1')"
    text = textwrap.dedent(SAVES_AND_MOVES).format(does=does)
    script = write(tmp_path, "saves_own.py", f"import torch\n{defines}\n{text}")
    report = run(script, 1, launcher="warm")
    assert report.verdict == "not judged", report.describe()
    assert re.search(rf"step1: it holds objects .*({named})", report.unjudged[0])
    assert "removed or replaced" not in report.describe()


def test_a_checkpoint_removed_after_its_save_is_not_missed(tmp_path) -> None:
    does = "for n in range(3):\n    save(n, f'step{n}')\nif rank == 0: shutil.rmtree('step0')"
    report = save_and_move(tmp_path, does)
    assert report.ok, report.describe()
    assert report.checkpoints == ["step1", "step2"]
    assert "removed or replaced before the end, so not compared: step0" in report.notes
