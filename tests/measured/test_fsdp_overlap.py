"""What the benchmark of sharded training writes down, rehearsed on two ranks of a CPU."""

import json
import subprocess
import sys
from pathlib import Path

from benchmarks import join_rows
from benchmarks.code_versions import code_of_today

ROOT = Path(__file__).resolve().parents[2]
# Names of rates in the file
LINK = frozenset({"nccl_gather_bytes_per_s", "copy_engine_gather_bytes_per_s"})


def rows_of(folder: Path, *arguments: str, link: frozenset = frozenset()) -> dict:
    """The rows of a rehearsal by name, model and tokens; none may have failed."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", "2", "benchmarks/fsdp_overlap.py", "--small"]
    command += ["--out", str(folder), *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr[-3000:]
    (path,) = (folder / "results").glob("*.json")
    data = json.loads(path.read_text())
    assert data["not_run"] == {}, done.stdout[-3000:]
    assert set(data["link"]) == link
    return {(row["name"], row["model"], row["tokens"]): row for row in data["rows"]}


def test_windows_of_all_ways_become_rows_and_every_bit_is_compared(tmp_path: Path) -> None:
    rows = rows_of(tmp_path, "--tasks", "link,eager,chooses_1024,bitwise,losses,sums", link=LINK)
    ways = {"no_communication", "fsdp2_no_collectives", "fsdp2", "fsdp2_in_place"}
    assert {name for name, *_ in rows} == ways | {"fsdp2_faster_way"}
    assert rows["fsdp2_faster_way", "llama-tiny", 64]["note"].startswith("use_peer_copies")
    row = rows["fsdp2_in_place", "llama-tiny", 64]
    assert len(row["samples"]["window_s"]) == row["pairs"] == 2
    assert row["efficiency"] > 0 and row["speed_over_fsdp2"] > 0
    assert row["speed_over_no_collectives"] > 0
    code = code_of_today()
    assert row["ours"] and (row["version"], row["commit"]) == (code["version"], code["commit"])
    assert not rows["fsdp2", "llama-tiny", 64]["ours"]
    assert row["bitwise_steps"] == 5
    assert row["loss_difference"] == 0 and row["losses_steps"] == 20
    assert 0 <= row["sum_error"] < 1e-6


def test_rows_that_are_joined_leave_the_others_as_old_as_they_are(tmp_path) -> None:
    def write(folder: Path, commit: str, *tokens: int, **more: int) -> Path:
        row = {"name": "fsdp2_in_place", "version": "0.2.1", "commit": commit} | more
        rows = [row | {"tokens": number} for number in tokens]
        path = folder / "results" / "fsdp_overlap.h200-x2.json"
        path.parent.mkdir(parents=True)
        path.write_text(json.dumps({"rows": rows, "date": commit}))
        return path

    ours = write(tmp_path / "benchmarks", "old", 1024, 4096, peak_device_bytes=1)
    write(tmp_path / "elsewhere", "new", 4096, 8192)
    join_rows.join(tmp_path / "elsewhere", {}, tmp_path)
    commits = {row["tokens"]: row["commit"] for row in json.loads(ours.read_text())["rows"]}
    assert commits == {1024: "old", 4096: "old", 8192: "new"}, "at 4096 the memory is older"
