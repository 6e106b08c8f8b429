"""What several ranks hold is read once in all, by ranks that read about as much as each other."""

from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import LoadPlan

from overlap_recipes.checkpoint import shared_reads
from overlap_recipes.checkpoint.shared_reads import Bundle, Sent, SharedReads
from rankproof.run import run

DATA = Path(__file__).parents[1] / "data"
MIB = 1 << 20


@pytest.mark.parametrize(
    "ranks, what",
    [
        (2, ("ddp", "mixed", "targets", "damage")),
        (3, ("trouble", "others", "unlike")),
        (4, ("hsdp",)),
    ],
)
def test_each_byte_is_read_once_and_every_rank_has_it(ranks: int, what: tuple[str, ...]) -> None:
    report = run(DATA / "shared_loads.py", ranks, launcher="warm", args=what, deadline_s=200)
    assert report.ok, report.describe()


@pytest.fixture
def rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def sent(name: str, mib: int, device: str = "cuda", part: int = 0) -> Sent:
    offset = torch.Size([part])
    return Sent(MetadataIndex(name), offset, torch.Size([mib * MIB]), device, torch.uint8)


def told(wanted: list[list[Sent | None]], all_ranks: int) -> list[shared_reads.Shares]:
    """What each rank is told, of ``all_ranks`` that the job has."""
    planner = SharedReads(None)
    in_file = {}
    for item in sum(wanted, []):
        if item is not None:
            index = item.storage_index
            in_file[index] = _StorageInfo("__0_0.distcp", offset=len(index.fqn), length=1)
    planner.metadata = Metadata({}, storage_data=in_file)
    plans = [LoadPlan([], planner_data=items) for items in wanted]
    with mock.patch.object(dist, "get_world_size", return_value=all_ranks):
        return [plan.planner_data for plan in planner.create_global_plan(plans)]


def reads(shares: list[shared_reads.Shares]) -> list[int]:
    """MiB that each rank reads for others."""
    found = []
    for rank, own in enumerate(shares):
        owned = [bundle.nbytes for bundle in own.bundles if bundle.owner == rank]
        found.append(sum(owned) // MIB)
    return found


def test_ranks_read_about_as_much_as_each_other(rank: None) -> None:
    whole = [sent(f"w{n}", 100 + n) for n in range(32)]
    shares = told([whole] * 4, 4)
    assert sum(reads(shares)) == sum(range(100, 132))
    assert max(reads(shares)) - min(reads(shares)) <= 16
    assert not shares[0].groups
    order = [bundle.numbers for bundle in shares[0].bundles]
    for own in shares:
        assert [bundle.numbers for bundle in own.bundles] == order


def test_replicate_groups_share_among_themselves_in_one_order(rank: None) -> None:
    """HSDP of two shards: ranks 0 and 2 hold the one, ranks 1 and 3 the other."""
    shards = [[sent(f"w{n}", 300, part=part) for n in range(8)] for part in (0, 1)]
    plain = sent("plain", 2000)
    wanted = [[*shards[rank % 2], plain] for rank in range(4)]
    shares = told(wanted, 4)
    assert [own.groups for own in shares] == [[(0, 2), (1, 3)]] * 4
    for one, other in ((0, 2), (1, 3)):
        assert shares[one].bundles == shares[other].bundles
    assert sum(reads(shares)) == 2 * 8 * 300 + 2000
    assert all(own.bundles for own in shares)
    assert {bundle.ranks for bundle in shares[0].bundles} == {(0, 2), (0, 1, 2, 3)}
    of_a_part = told(wanted, 8)  # other ranks of the job do not load: they would not make groups
    assert [own.groups for own in of_a_part] == [[]] * 4
    assert {bundle.ranks for own in of_a_part for bundle in own.bundles} == {(0, 1, 2, 3)}


def test_what_would_not_pay_for_its_group_is_read_by_each(rank: None) -> None:
    """A GiB that the same ranks hold, on devices of one type."""
    large = [sent("a", 600), sent("b", 424)]
    assert sum(reads(told([large] * 2, 2))) == 1024
    assert not any(reads(told([large[:1]] * 2, 2)))
    on_both = [sent("a", 600), sent("b", 424, "cpu")]
    assert not any(reads(told([on_both] * 2, 2)))
    with_others = [[*large, None], [None, *large], [None]]
    shares = told(with_others, 3)
    assert sum(reads(shares)) == 1024 and not shares[2].bundles
    assert shares[0].bundles[0].numbers == [0] and shares[1].bundles[0].numbers == [1]


def test_packed_parts_begin_where_any_dtype_may() -> None:
    odd = Sent(MetadataIndex("odd"), torch.Size(), torch.Size([3]), "cpu", torch.uint8)
    wide = Sent(MetadataIndex("wide"), torch.Size(), torch.Size([2]), "cpu", torch.complex128)
    ((bundle, inside),) = shared_reads.in_bundles(Bundle((0, 1), "cpu"), [odd, wide, odd])
    assert inside == [odd, wide, odd] and bundle.nbytes == 16 + 32 + 3
