"""A job on two hosts loses its link, then a host, and ends as if nothing had been."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from selection import REPO, with_library
from troubles import survives

from overlap_recipes.checkpoint import CheckpointManager, DamagedCheckpoint, TrainingState
from overlap_recipes.checkpoint.two_hosts import (
    LISTING,
    PartnerSaves,
    gather,
    held,
    ranks_of_a_host,
    whole_saves,
)

DATA = REPO / "tests" / "data"
NAMESPACES = ["unshare", "-nm" if os.geteuid() == 0 else "-Urnm"]


def why_not() -> str | None:
    if missing := [name for name in ("unshare", "nsenter", "ip") if not shutil.which(name)]:
        return f"{', '.join(missing)} not installed (util-linux, iproute2)"
    make = "mount -t tmpfs none /run && ip netns add a && ip link add type veth"
    tried = subprocess.run([*NAMESPACES, "sh", "-c", make], capture_output=True, text=True)
    return f"no network namespaces here: {tried.stderr.strip()}" if tried.returncode else None


@pytest.fixture
def host() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_a_gather_that_finds_nothing_leaves_no_process_group(host: None, tmp_path: Path) -> None:
    groups = dist.distributed_c10d._world.pg_map
    assert gather(tmp_path) is None
    assert list(groups) == [dist.group.WORLD]


def job(seed: int) -> TrainingState:
    torch.manual_seed(seed)
    model = torch.nn.Linear(3, 3)
    return TrainingState(model, torch.optim.AdamW(model.parameters()))


def test_a_resume_deletes_neither_what_is_kept_nor_what_is_no_checkpoint(
    host: None, tmp_path: Path
) -> None:
    (tmp_path / "step_logs").mkdir()
    for first in (1, 7):
        settings = {"on_each_host": True, "keep_last": 2, "keep_every": 3, "grace_s": None}
        with CheckpointManager(tmp_path, job(0), **settings) as checkpoints:
            assert checkpoints.resume() == first - 1
            for step in range(first, first + 6):
                checkpoints.save(step)
    kept = {f"step{step}" for step in (3, 6, 9, 11, 12)}
    assert {path.name for path in tmp_path.iterdir()} == kept | {"step_logs"}


def test_a_job_does_not_begin_anew_where_no_checkpoint_is_whole(host: None, tmp_path: Path) -> None:
    with PartnerSaves("cpu", per_host=1) as saves:
        saves.save({"app": job(0)}, tmp_path / "step5")
    (tmp_path / "step5" / LISTING).write_text("")  # as behind a power cut
    with pytest.raises(DamagedCheckpoint, match="by step: \\[5\\].*to begin anew, remove them"):
        gather(tmp_path)
    (tmp_path / "step5").rename(tmp_path / "other")
    assert gather(tmp_path) is None


def test_a_step_before_one_that_is_there_is_not_saved_to_be_deleted(
    host: None, tmp_path: Path
) -> None:
    with PartnerSaves("cpu", per_host=1) as saves:
        saves.save({"app": job(0)}, tmp_path / "step5").result()
        saves.save({"app": job(0)}, tmp_path / "step6").result()
        early = saves.save({"app": job(1)}, tmp_path / "step3")
        assert "step6 is there: resume from it" in str(early.exception())
        saves.failures.clear()
        saves.save({"app": job(1)}, tmp_path / "step7").result()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step6", "step7"]


@pytest.mark.parametrize(
    ("hosts", "per_host"), [("a", 1), ("ab", 1), ("aabb", 2), ("abab", 0), ("aab", 0), ("abba", 0)]
)
def test_ranks_are_counted_by_their_hosts_which_must_have_as_many(
    hosts: str, per_host: int
) -> None:
    if per_host:
        assert ranks_of_a_host(list(hosts)) == per_host
    else:
        with pytest.raises(ValueError, match="give PartnerSaves per_host"):
            ranks_of_a_host(list(hosts))


def test_of_two_saves_of_a_step_the_later_one_is_taken(host: None, tmp_path: Path) -> None:
    """A host was lost, and comes back with all of its step 5; the others have saved that anew."""
    listings = []
    for place in ("lost", "went_on"):
        with PartnerSaves("cpu", per_host=1) as saves:
            saves.save({"app": job(0)}, tmp_path / place / "step5").result()
        listings.append(held(tmp_path / place))
    lost, went_on = listings
    for hosts in (listings, listings[::-1]):
        assert [(5, whole.save) for whole in whole_saves(hosts)] == [*went_on, *lost]


def test_a_directory_of_others_stays_beside_what_is_gathered(host: None, tmp_path: Path) -> None:
    with PartnerSaves("cpu", per_host=1) as saves:
        saves.save({"app": job(0)}, tmp_path / "step5")
    (tmp_path / "step9").mkdir()  # as of ``Saves``: it has no listing
    assert gather(tmp_path) == 5
    assert (tmp_path / "step9").exists()


TROUBLES = ("two_saves_of_one_step", "older_timelines", "failed_saves", "power_cut", "one_host")


@pytest.mark.parametrize("trouble", TROUBLES)
def test_disks_of_hosts(trouble: str) -> None:
    """Nothing is mixed, a failed save leaves nothing, a listing that is lost stops nobody."""
    survives("host_troubles", trouble, ranks=3)


@pytest.mark.parametrize("way", ["own", "shared"])
def test_a_link_is_cut_in_a_save_and_a_host_is_lost(tmp_path: Path, way: str) -> None:
    """Two torchruns; the first goes on alone; then a host joins it, ``own``: with an empty disk."""
    if reason := why_not():
        pytest.skip(reason)
    command = [*NAMESPACES, sys.executable, DATA / "two_hosts.py", tmp_path, way]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, env=with_library())
    assert done.returncode == 0, done.stderr[:500] + done.stderr[-6000:]
    print(json.loads(done.stdout.splitlines()[-1]))

    logs = {host: (tmp_path / f"{host}.log").read_text() for host in "ab"}
    before, _, _ = logs["a"].partition("a: ended with")  # see below what may follow
    resumed = [(int(s), int(n)) for s, n in re.findall(r"a: resumed (\d+) on (\d) ranks", before)]
    assert [ranks for _, ranks in resumed][:1] == [2] and (resumed[-1][1], resumed[0][0]) == (2, 0)
    alone = [step for step, ranks in resumed if ranks == 1]
    assert alone and alone[0] >= 5, f"it began anew: {resumed}"
    assert resumed[-1][0] >= alone[0], f"the new host brought it back: {resumed}"

    alone_all_along = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "HOST": "c"}
    ended = subprocess.run(
        [sys.executable, DATA / "two_hosts_train.py", tmp_path / "c", way],
        env={**with_library(), **alone_all_along, "MASTER_PORT": "0"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    bits = {
        host: re.findall(r"ended with (.*)", text)
        for host, text in {**logs, "c": ended.stdout}.items()
    }
    assert len(bits["c"]) == 1, ended.stderr[-3000:]
    # torchrun starts a rank again that aborts while its interpreter ends; the other with it, or not
    aborted = sum(text.count("terminate called") for text in logs.values())
    for host in "ab":
        assert 1 <= len(bits[host]) <= 1 + aborted and set(bits[host]) == set(bits["c"]), bits
