"""A job on two hosts loses its link, then a host, and ends as if nothing had been."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist
from selection import REPO, with_library
from troubles import survives

from overlap_recipes.checkpoint.two_hosts import gather

DATA = REPO / "tests" / "data"
NAMESPACES = ["unshare", "-nm" if os.geteuid() == 0 else "-Urnm"]


def why_not() -> str | None:
    if missing := [name for name in ("unshare", "nsenter", "ip") if not shutil.which(name)]:
        return f"{', '.join(missing)} not installed (util-linux, iproute2)"
    make = "mount -t tmpfs none /run && ip netns add a && ip link add type veth"
    tried = subprocess.run([*NAMESPACES, "sh", "-c", make], capture_output=True, text=True)
    return f"no network namespaces here: {tried.stderr.strip()}" if tried.returncode else None


def test_a_gather_that_finds_nothing_leaves_no_process_group(tmp_path: Path) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        groups = dist.distributed_c10d._world.pg_map
        assert gather(tmp_path) is None
        assert list(groups) == [dist.group.WORLD]
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("trouble", ["two_saves_of_one_step", "failed_saves", "power_cut"])
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
