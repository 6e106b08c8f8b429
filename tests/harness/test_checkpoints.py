"""The harness judges every save: where it is, that it loads, and that it has what was passed."""

import re
import textwrap
from pathlib import Path

import pytest
from written_recipes import write

from rankproof.launch import load_back
from rankproof.report import Report
from rankproof.run import run

SAVES = """
    import torch
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp

    if __name__ == "__main__":
        dist.init_process_group("gloo")
        weight = torch.arange(8.0)
        dcp.save({"weight": weight}, checkpoint_id="step1")
        dist.barrier()
        dist.destroy_process_group()
"""


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


VIEWS = """
    import torch
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp

    if __name__ == "__main__":
        dist.init_process_group("gloo")
        numbers = torch.randn(3, 4, dtype=torch.complex64)
        views = numbers.conj(), numbers.conj().imag, torch._neg_view(torch.randn(4))
        for number, view in enumerate(views):
            dcp.save({"view": view}, checkpoint_id=f"step{number}")
        dist.destroy_process_group()
"""


def test_a_view_that_negates_is_right_when_its_elements_are(tmp_path) -> None:
    """What lies in its storage are other bits than a load gives back."""
    report = run(write(tmp_path, "views.py", VIEWS), 1, launcher="warm")
    assert report.ok, report.describe()


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
UNTIL_BEGUN = "[None for _ in iter(lambda: os.path.exists('step1'), True)]"
UNTIL_FINISHING = "[None for _ in iter(lambda: os.path.exists('finishing'), True)]"


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


@pytest.mark.parametrize(
    ("ending", "writer", "text"),
    [
        (f"saved.done(); {UNTIL_BEGUN}", "dcp.FileSystemWriter", "the directory is empty"),
        (f"{CALL_BACK}; time.sleep(0); {UNTIL_FINISHING}", "NeverFinished", "before it knew"),
    ],
)
def test_to_ask_once_or_to_be_called_back_is_not_to_wait(tmp_path, ending, writer, text) -> None:
    report = save_in_background(tmp_path, ending, writer)
    assert "checkpoint_missing" in report.kinds, report.describe()
    missing = [failure for failure in report.failures if failure.kind == "checkpoint_missing"]
    assert text in missing[0].text
    assert "never awaited" in missing[0].hint


def test_a_process_forked_meanwhile_does_not_end_a_save_in_its_ranks_name(tmp_path) -> None:
    text = """
        import os
        import torch
        import torch.distributed.checkpoint as dcp

        if __name__ == "__main__":
            saved = dcp.async_save({"weight": torch.ones(4)}, checkpoint_id="step1", no_dist=True)
            assert not saved.done()
            child = os.fork()
            if child:
                os.waitpid(child, 0)
                saved.result()
    """
    recipe = write(tmp_path, "forks.py", text)
    report = run(recipe, 1, launcher="warm", gate="hold_write", deadline_s=30)
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
FAILS_UNSEEN = (
    "dcp.async_save({}, storage_writer=FullDisk('step1'), "
    "process_group=dist.new_group(backend='gloo'))"
)


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


def test_what_was_moved_excuses_no_checkpoint_that_is_gone(tmp_path) -> None:
    loses = "subprocess.run(['rm', '-r', 'lost'], check=True)"
    does = f"save(1, 'lost')\nsave(1, 'aside')\n{MOVED_BY_ANOTHER}\n{loses}"
    report = save_and_move(tmp_path, does, ranks=1)
    assert "checkpoint_missing" in report.kinds, report.describe()


def test_a_checkpoint_of_other_leaves_is_not_one_that_was_moved(tmp_path) -> None:
    does = """
        save(1, 'aside')
        dcp.save({'other': torch.ones(1)}, checkpoint_id='step1')
        import subprocess
        subprocess.run(['mv', 'step1', 'step2'], check=True)
        subprocess.run(['rm', '-r', 'aside'], check=True)
    """
    report = save_and_move(tmp_path, textwrap.dedent(does).strip(), ranks=1)
    assert report.kinds == {"checkpoint_missing"}, report.describe()
    assert "aside: the directory does not exist" in report.failures[0].text


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


def test_a_directory_emptied_before_the_save_excuses_nothing(tmp_path) -> None:
    does = f"shutil.rmtree('step1', ignore_errors=True)\n{FAILS_UNSEEN}"
    report = save_and_move(tmp_path, does, ranks=1)
    assert report.kinds == {"checkpoint_missing", "never_awaited"}, report.describe()


def test_a_checkpoint_removed_after_its_save_is_not_missed(tmp_path) -> None:
    does = "for n in range(3):\n    save(n, f'step{n}')\nif rank == 0: shutil.rmtree('step0')"
    report = save_and_move(tmp_path, does)
    assert report.ok, report.describe()
    assert report.checkpoints == ["step1", "step2"]
    assert "removed or replaced before the end, so not compared: step0" in report.notes


def test_a_checkpoint_that_takes_too_long_to_load_says_so(tmp_path, monkeypatch) -> None:
    waits = write(tmp_path, "waits.py", "import threading\nthreading.Event().wait()\n")
    monkeypatch.setattr("rankproof.launch.LOAD_BACK", waits)
    answer = load_back({"step1": {}}, 1, tmp_path, deadline_s=0.5)
    assert answer == {"step1": {"error": "did not load within 0.5 s"}}


@pytest.mark.parametrize(("deadline_s", "loads_within_s"), [(30, 120), (300, 300)])
def test_a_checkpoint_has_as_long_to_load_as_its_recipe(
    tmp_path, monkeypatch, deadline_s: float, loads_within_s: float
) -> None:
    limits = []

    def record(request: dict, world_size: int, parent: Path, deadline_s: float) -> dict:
        limits.append(deadline_s)
        return {}

    monkeypatch.setattr("rankproof.verdict.load_back", record)
    recipe = write(tmp_path, "saves.py", SAVES)
    run(recipe, 1, launcher="warm", deadline_s=deadline_s)
    assert set(limits) == {loads_within_s}


MOVES_ALL_BUT_METADATA = """
    import shutil
    from pathlib import Path
    import torch
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp

    dist.init_process_group("gloo")
    dcp.save({"w": torch.ones(4)}, checkpoint_id="step1.partial")
    if dist.get_rank() == 0:
        Path("step1").mkdir()
        for file in Path("step1.partial").glob("[!.]*"):
            shutil.move(str(file), Path("step1") / file.name)
        shutil.rmtree("step1.partial")
    dist.destroy_process_group()
"""


def test_it_is_never_said_to_load_what_does_not(tmp_path) -> None:
    report = run(write(tmp_path, "moves.py", MOVES_ALL_BUT_METADATA), 1, launcher="warm")
    assert report.kinds == {"checkpoint_incomplete"}, report.describe()
    assert report.unjudged == []


FAILS_ONE_SAVE = """
    from concurrent.futures import ThreadPoolExecutor
    from pathlib import Path
    import threading
    import torch
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp

    dist.init_process_group("gloo")
    Path("step1").write_text("a log file of that name")
    with ThreadPoolExecutor(1) as pool:
        pool.submit(dcp.save, {"w": torch.ones(4)}, checkpoint_id="step1")
"""


@pytest.mark.parametrize(
    ("end", "kinds"),
    [
        ("threading.Event().wait()", {"save_failed", "hung"}),
        ("raise ValueError('the loss is not finite')", {"raised"}),
    ],
)
def test_a_failed_save_that_nobody_saw_is_told_with_another_failure(
    tmp_path, end: str, kinds: set
) -> None:
    """Where the script raised, that may be what it raised of."""
    script = write(tmp_path, "saves.py", FAILS_ONE_SAVE + f"    {end}\n")
    report = run(script, 1, launcher="warm", deadline_s=5)
    assert report.kinds == kinds, report.describe()
