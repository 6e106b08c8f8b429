"""One contract of both stores: what is resumed, refused, pruned and set aside, and what never is.

``file://`` stands for an object store here: fsspec's objects appear whole or not at all, and a name
is given once. What only a server does is in ``test_object_storage``.
"""

import json
import os
import shutil
import signal
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import pytest
import torch
from kept_saves import KeptSaves, resume, steps_in

from overlap_recipes.checkpoint import DamagedCheckpoint
from overlap_recipes.checkpoint.kept import Checkpoint, left_out, prune, show
from overlap_recipes.checkpoint.stores import store_of
from overlap_recipes.checkpoint.stores.directory import Directory, Folder

KINDS = ["directory", "store"]
NUMBERS = 1000


@dataclass
class Place:
    """A root of one kind, and what lies there as files."""

    kind: str
    path: Path

    @property
    def root(self) -> str:
        return str(self.path) if self.kind == "directory" else f"file://{self.path}"

    def saves(self, **settings: int) -> KeptSaves:
        return KeptSaves(self.root, **settings)

    def save(self, *steps: int, **settings: int) -> None:
        with self.saves(**settings) as saves:
            for step in steps:
                saves.save(state_of(step), step).result()

    def files(self, step: int) -> Path:
        """The folder with the files of the checkpoint."""
        if self.kind == "directory":
            return self.path / f"step{step}"
        return self.path / json.loads(self.commit_of(step).read_text())["data"]

    def commit_of(self, step: int) -> Path:
        """What makes the files a checkpoint."""
        if self.kind == "directory":
            return self.path / f"step{step}" / "manifest.0.json"
        return self.path / f"step{step}.json"

    def aside(self, step: int, why: str) -> list[Path]:
        return [*self.path.glob(f"step{step}.{why}-*"), *self.path.glob(f"step{step}.json.{why}-*")]

    def resumed(self, step: int | None = None) -> int:
        """Resume; the bits must be those of the step."""
        state = state_of(-1)
        chosen = resume(state, self.root, step)
        expected = state_of(chosen) if chosen else state_of(-1)
        assert torch.equal(state["x"], expected["x"]) and state["n"] == expected["n"], chosen
        return chosen


@pytest.fixture(params=KINDS)
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    return Place(request.param, tmp_path / "root")


def state_of(step: int) -> dict:
    return {"x": torch.full((NUMBERS,), float(step)), "n": step}


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def test_the_newest_is_resumed(place: Place) -> None:
    assert place.resumed() == 0
    place.save(1, 2, 10)
    assert place.resumed() == 10
    assert show(store_of(place.root), every_byte=True)


@pytest.mark.parametrize("file", ["__0_0.distcp", ".metadata", "manifest.0.json"])
def test_a_bit_that_has_changed_is_found_and_the_one_before_is_resumed(
    place: Place, file: str
) -> None:
    place.save(1, 2)
    flip(place.files(2) / file)
    store = store_of(place.root)
    assert store.wrong(2, every_byte=True) and not store.wrong(1, every_byte=True)
    assert not show(store, every_byte=True)
    assert place.resumed() == 1
    assert place.aside(2, "set-aside") and steps_in(place.root) == [1]


def missing(file: Path) -> None:
    file.unlink()


def cut(file: Path) -> None:
    os.truncate(file, file.stat().st_size - 1)


def emptied(file: Path) -> None:
    file.write_bytes(b"")


@pytest.mark.parametrize("damage", [missing, cut, emptied])
@pytest.mark.parametrize("file", ["__0_0.distcp", ".metadata", "manifest.0.json"])
def test_a_file_that_is_short_is_seen_before_a_byte_is_read(
    place: Place, file: str, damage: Callable[[Path], None]
) -> None:
    place.save(1, 2)
    damage(place.files(2) / file)
    assert store_of(place.root).wrong(2), "sizes alone must tell"
    assert place.resumed() == 1


@pytest.mark.parametrize("damage", [cut, emptied])
def test_a_torn_commit_is_set_aside(place: Place, damage: Callable[[Path], None]) -> None:
    place.save(1, 2)
    damage(place.commit_of(2))
    assert place.resumed() == 1
    assert place.aside(2, "set-aside")


def test_a_file_of_another_step_is_not_taken_for_this_ones(place: Place) -> None:
    """It has the right name and size."""
    place.save(1, 2, 3)
    file = "__0_0.distcp"
    shutil.copy(place.files(1) / file, place.files(3) / file)
    assert place.resumed() == 2


def test_what_an_older_job_has_left_unfinished_is_none_and_in_nobodys_way(place: Place) -> None:
    place.save(1, 2, 3)
    if place.kind == "directory":
        place.files(3).rename(place.path / "step3.incomplete")
        (place.path / "step4.incomplete").touch()  # which nothing deletes as a tree
    else:
        place.commit_of(3).unlink()
    assert place.resumed() == 2
    place.save(3)
    assert place.resumed() == 3


def test_foreign_files_are_no_checkpoints_and_stay(place: Place) -> None:
    place.save(1)
    own = {"notes.txt": "mine", "step7.json": '{"loss": 1.0}', "step-9": "mine", "step08": "mine"}
    own |= {"notes.deleted": "mine", "data.incomplete/part": "mine", "step08.deleted/part": "mine"}
    for name, text in own.items():
        (place.path / name).parent.mkdir(exist_ok=True)
        (place.path / name).write_text(text)
    (place.path / "step6.json").mkdir()
    assert place.resumed() == 1
    place.save(2, keep_last=1)
    assert place.resumed() == 2 and steps_in(place.root) == [2]
    for name, text in own.items():
        assert (place.path / name).read_text() == text


def test_of_two_jobs_one_saves_and_the_other_is_told(place: Place) -> None:
    """A directory's lock keeps the newcomer out until somebody deletes its file; a store's claim,
    which outlives its job, does not. Then the older job's saves fail."""
    with place.saves() as older:
        older.save(state_of(1), 1).result()
        if place.kind == "directory":
            with pytest.raises(RuntimeError, match="another job writes to"):
                place.saves().__enter__()
            older.save(state_of(2), 2).result()
            (place.path / "lease").unlink()
        with place.saves() as newer:
            with pytest.raises(RuntimeError, match="another job has taken"):
                older.save(state_of(3), 3).result()
            newer.save(state_of(4), 4).result()
        older.latest = None
    assert place.resumed() == 4 and 3 not in steps_in(place.root)


def test_a_job_that_is_overtaken_while_it_writes_commits_nothing(place: Place) -> None:
    with place.saves() as older:
        settle = older.store.settle

        def settle_late(*arguments: object) -> None:
            settle(*arguments)
            (place.path / "lease").unlink(missing_ok=True)
            with place.saves() as newer:
                newer.save(state_of(7), 7).result()

        older.store.settle = settle_late
        failed = older.save(state_of(9), 9).exception()
        older.latest = None
    assert "another job has taken" in str(failed)
    assert place.resumed() == 7


def test_a_rank_that_outlives_its_job_changes_no_later_checkpoint(place: Place) -> None:
    """Its host was lost to the others, and its storage answers again when they have gone on."""
    place.save(1)
    nbytes = (place.files(1) / "__0_0.distcp").stat().st_size
    store = store_of(place.root)
    attempt = store.begin(3, 0)
    store.join(attempt)
    with place.saves() as saves:
        create = saves.store.create

        def create_late(there: str, name: str) -> object:
            if name == ".metadata":
                with suppress(FileNotFoundError), store.create(attempt, "__0_0.distcp") as sink:
                    sink.write(nbytes, [bytes(nbytes)])
            return create(there, name)

        saves.store.create = create_late
        saves.save(state_of(3), 3).result()
    assert place.resumed() == 3


def test_a_rank_that_does_not_see_what_rank_0_has_made_writes_nothing(tmp_path: Path) -> None:
    for target in (Folder(tmp_path / "step1"), Checkpoint(Directory(tmp_path), 1, 1, 0)):
        place = target.begin(0)
        shutil.rmtree(place, ignore_errors=True)  # as on a host that has another file system there
        with pytest.raises(FileNotFoundError, match="rank 0 has made"):
            target.join(place)
        assert not Path(place).exists()
        again = target.begin(0)
        assert again != place, "a rank of an earlier job could still write to it"


def test_a_root_is_free_again_when_its_job_has_ended_which_commits_no_more(place: Place) -> None:
    store = store_of(place.root)
    store.open()
    store.close()
    with pytest.raises(RuntimeError, match="is closed"):
        store.commit(3, store.begin(3, 0), {})
    for step in (1, 2, 3):
        place.save(step)
    assert place.resumed() == 3


def test_what_neither_rule_keeps_goes(place: Place) -> None:
    place.save(*range(1, 10), keep_last=2, keep_every=4)
    assert steps_in(place.root) == [9, 8, 4]
    assert len([path for path in place.path.iterdir() if path.is_dir()]) == 3
    store = store_of(place.root)
    found = [left_out(store, last, every) for last, every in ((1, 0), (1, 8), (5, 0))]
    assert found == [[8, 4], [4], []]
    prune(store, 1, 0, dry_run=True)
    assert steps_in(place.root) == [9, 8, 4]
    if place.kind == "directory":  # as where a job has begun with a checkpoint of another root
        place.files(4).symlink_to(place.files(4).rename(place.path / "other"))
    prune(store, 1, 0, dry_run=False)
    assert steps_in(place.root) == [9] and not [*place.path.glob("step4*")]
    assert place.kind == "store" or (place.path / "other" / ".metadata").exists()


def test_a_damaged_one_counts_for_none_of_those_that_stay(place: Place) -> None:
    place.save(1, 2, 3)
    cut(place.files(3) / "__0_0.distcp")
    place.save(4, keep_last=2)
    assert steps_in(place.root) == [4, 3, 2]


def test_a_rollback_sets_newer_ones_aside_and_they_can_be_saved_again(place: Place) -> None:
    place.save(1, 2, 3)
    assert place.resumed(1) == 1
    assert steps_in(place.root) == [1]
    assert place.aside(2, "set-aside") and place.aside(3, "set-aside")
    place.save(2)
    assert place.resumed() == 2


def test_a_step_that_is_not_there_is_answered_with_those_that_are(place: Place) -> None:
    place.save(1, 2)
    with pytest.raises(RuntimeError, match=r"step 7 is not whole.*there is none, only \[2, 1\]"):
        place.resumed(7)
    assert steps_in(place.root) == [2, 1]


def test_a_step_that_was_asked_for_and_is_damaged_is_refused_and_all_stay(place: Place) -> None:
    place.save(1, 2, 3)
    flip(place.files(2) / "__0_0.distcp")
    with pytest.raises(DamagedCheckpoint, match="__0_0.distcp"):
        place.resumed(2)
    cut(place.files(2) / "__0_0.distcp")
    with pytest.raises(RuntimeError, match="step 2 is not whole"):
        place.resumed(2)
    assert steps_in(place.root) == [3, 2, 1], "a load that fails hides none that is newer"


@pytest.mark.parametrize("damage", [flip, cut, missing, emptied])
@pytest.mark.parametrize("file", ["__0_0.distcp", ".metadata", "manifest.0.json"])
def test_a_job_does_not_begin_anew_because_its_only_checkpoint_is_damaged(
    place: Place, file: str, damage: Callable[[Path], None]
) -> None:
    """Nor when a scheduler starts it once more behind the error."""
    place.save(2)
    damage(place.files(2) / file)
    for _ in range(2):
        with pytest.raises(DamagedCheckpoint, match="step2.*there is no older checkpoint"):
            place.resumed()
    assert steps_in(place.root) == [2]


def test_a_job_does_not_begin_anew_because_its_only_commit_is_torn(place: Place) -> None:
    place.save(2)
    emptied(place.commit_of(2))
    for _ in range(2):
        with pytest.raises(DamagedCheckpoint, match="step2.*there is no older checkpoint"):
            place.resumed()
    assert steps_in(place.root) == [2]


def test_what_cannot_be_listed_is_not_taken_for_empty(place: Place) -> None:
    place.save(1, 2)
    denied = mock.Mock(side_effect=PermissionError("denied"))
    with mock.patch.multiple(os, listdir=denied, scandir=denied):
        with pytest.raises(RuntimeError, match="cannot resume from .*denied"):
            place.resumed()
        if place.kind == "directory":
            with pytest.raises(PermissionError):
                store_of(place.root).wrong(2)


def test_a_step_below_a_newer_one_is_refused_and_not_saved_to_be_deleted(place: Place) -> None:
    place.save(8)
    before = sorted(path.name for path in place.path.iterdir() if path.is_dir())
    with place.saves() as saves:
        failed = saves.save(state_of(2), 2).exception()
        saves.latest = None
    assert "step8 is there: resume from it, or take another root" in str(failed)
    assert sorted(path.name for path in place.path.iterdir() if path.is_dir()) == before


def test_a_save_that_fails_before_its_first_file_costs_no_other(place: Place) -> None:
    """As where ranks differ: each rank but the first has not heard of its place yet."""
    place.save(1)
    with place.saves() as saves:
        failing = Checkpoint(saves.store, 2, keep_last=2, keep_every=0)
        failing.begin(1)
        failing.abort()
        assert not saves.store.unfinished()
    assert place.resumed() == 1
    if place.kind == "store":
        with pytest.raises(ValueError, match="is no attempt below"):
            store_of(place.root).drop("")


def test_a_whole_checkpoint_is_not_replaced(place: Place) -> None:
    place.save(5)
    with place.saves() as saves:
        failed = saves.save(state_of(6), 5).exception()
        saves.latest = None
    assert "step5 is there and whole" in str(failed)
    assert place.resumed() == 5
    assert len([path for path in place.path.iterdir() if path.is_dir()]) == 1, "it left its files"


def test_a_step_that_is_damaged_time_and_again_is_saved_again(place: Place) -> None:
    for number in range(3):
        place.save(5)
        if number < 2:
            flip(place.files(5) / "__0_0.distcp")
    assert place.resumed() == 5
    assert len(place.aside(5, "damaged")) == 2


def test_a_save_that_fails_leaves_nothing_and_costs_no_other(place: Place) -> None:
    class Breaks:
        def __deepcopy__(self, memo: dict) -> "Breaks":
            return self

        def __reduce__(self) -> tuple:
            raise OSError("no more")

    with place.saves() as saves:
        saves.save(state_of(1), 1).result()
        failed = saves.save({**state_of(2), "n": Breaks()}, 2).exception()
        folders = [path for path in place.path.iterdir() if path.is_dir()]
        saves.save(state_of(3), 3).result()
    assert "no more" in str(failed) and len(folders) == 1, folders
    assert place.resumed() == 3 and steps_in(place.root) == [3, 1]


def test_a_save_ends_though_nothing_can_be_written_or_deleted(place: Place) -> None:
    with place.saves() as saves:
        saves.store.create = saves.store.drop = None
        assert "rank 0: TypeError" in str(saves.save(state_of(1), 1).exception(30))
        saves.latest = None


# -- killed


EVENTS = ("open", "os.mkdir", "os.rename", "os.truncate")  # of paths below the root
DELETIONS = ("os.remove", "os.rmdir")  # of names alone, where a tree is deleted
KILLS = 24  # for each store; spread over all events of three saves and two deletions


def killed_job(place: Place, at: int, told: int) -> None:
    """In a fork: save three steps, and be killed before the event ``at``; tell what is durable."""
    count = 0

    def hook(event: str, arguments: tuple) -> None:
        nonlocal count
        is_below = event in EVENTS and str(place.path) in str(arguments[0])
        if is_below or event in DELETIONS:
            count += 1
            if count == at:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)
    torch.set_num_threads(1)
    code = 1
    try:
        with place.saves(keep_last=1) as saves:
            for step in (1, 2, 3):
                saves.save(state_of(step), step).result()
                os.write(told, bytes([step]))
        os.write(told, bytes([100, min(count, 255)]))
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def run_killed(place: Place, at: int) -> list[int]:
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        killed_job(place, at, writing)
    os.close(writing)
    told = b""
    while part := os.read(reading, 100):
        told += part
    os.close(reading)
    os.waitpid(child, 0)
    return list(told)


def test_a_kill_at_any_event_loses_nothing_that_was_durable(place: Place) -> None:
    events = run_killed(place, at=0)[-1]
    assert events > 15, events
    came = set()
    for number in range(KILLS):
        at = 1 + number * events // KILLS
        shutil.rmtree(place.path, ignore_errors=True)
        durable = run_killed(place, at)
        assert 100 not in durable, "it was not killed"
        store = store_of(place.root)
        assert not any(store.wrong(step) for step in store.steps()), (at, "half of one counts")
        chosen = place.resumed()
        assert chosen >= max(durable, default=0), (at, durable, chosen)
        place.save(10, keep_last=1)
        assert place.resumed() == 10 and steps_in(place.root) == [10]
        if place.kind == "directory":  # in a store an attempt without a commit stays
            assert not store.unfinished()
        came.add(chosen)
    assert came == {0, 1, 2, 3}, came
