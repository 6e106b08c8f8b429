"""Memory: which storage lies where, who touched it last, and which storages share bytes."""

import weakref
from collections.abc import Callable

import torch

from rankproof.streams.accesses import Access, Place, bytes_in_common
from rankproof.streams.lanes import Stream

PAGE_BITS = 16  # storages are looked up by the pages of 64 KiB that they lie in


NO_LANES: frozenset[int] = frozenset()


def pages_of(start: int, end: int) -> range:
    """The pages that the addresses from ``start`` to before ``end`` lie in."""
    return range(start >> PAGE_BITS, ((end - 1) >> PAGE_BITS) + 1)


class StorageRef(weakref.ref):
    """A weak reference to a storage, which knows the region that ends with it."""

    __slots__ = ("region",)


class Region:
    """The memory of one storage, as long as it stays where it is, and who touched it last."""

    __slots__ = ("storage", "key", "start", "end", "nbytes", "pages", "whole", "accesses", "home")
    __slots__ += ("aliases", "used_by", "on_host", "is_presumed", "made_by_host")

    def __init__(self, storage: torch.UntypedStorage, when_gone: Callable) -> None:
        self.storage = StorageRef(storage, when_gone)
        self.storage.region = self
        self.key = storage._cdata
        self.start = storage.data_ptr()
        self.nbytes = storage.nbytes()
        self.end = self.start + self.nbytes
        self.pages = pages_of(self.start, self.end)
        self.whole: Place = (self.start, ((0, self.nbytes),))
        self.accesses: list[Access] = []
        self.home: Stream | None = None  # where it was allocated: what is freed goes back there
        self.aliases: tuple[Region, ...] = ()
        self.on_host = False  # host memory on any machine
        self.is_presumed = False  # to be host memory: it may turn out to be none
        self.made_by_host = False  # by the script, and no device named: see ``places``
        self.used_by: frozenset[int] = (
            NO_LANES  # lanes that record_stream names: freed behind their work
        )

    @property
    def may_be_host(self) -> bool:
        return self.on_host or self.made_by_host

    def is_host_after_all(self) -> None:
        """What was done there so far the host did, and had done when it returned."""
        self.on_host = True
        self.is_presumed = True
        self.made_by_host = False
        self.accesses = []

    def is_device_after_all(self) -> None:
        """Unless it is the host's for certain."""
        self.made_by_host = False
        if self.is_presumed:
            self.on_host = False
            self.is_presumed = False

    def arrives_in(self, place: Place) -> bool:
        """Whether what was written there last was brought by a copy that need not wait."""
        for access in reversed(self.accesses):
            if access.writes and bytes_in_common(access.place, place):
                return access.arrives
        return False

    def alive(self) -> bool:
        storage = self.storage()
        return storage is not None and storage.data_ptr() == self.start

    def add(self, access: Access) -> list[Access]:
        """Keep ``access``, which begins now; returns those before it that nothing orders with it.

        An older one that is in order, of the same bytes, goes: all that must come after it must
        come after ``access`` anyway, unless that only reads what it wrote.
        """
        lane = access.on
        if len(self.accesses) == 1:  # as of most memory, which one lane uses as a whole
            (earlier,) = self.accesses
            as_strict = access.writes or not earlier.writes
            if as_strict and earlier.on is lane and earlier.place == access.place:
                self.accesses = [access]
                return []
        kept = []
        unordered = []
        known = lane.clock
        for earlier in self.accesses:
            if earlier.on is lane or earlier.before(known):
                as_strict = access.writes or not earlier.writes
                if as_strict and earlier.place == access.place:
                    continue
            else:
                unordered.append(earlier)
            kept.append(earlier)
        kept.append(access)
        self.accesses = kept
        return unordered


class Memory:
    """The regions that were touched. ``when_freed`` is called with each whose storage is gone."""

    def __init__(self, when_freed: Callable[[Region], None]) -> None:
        self.when_freed = when_freed
        self.regions: dict[int, Region] = {}  # by the address of torch's object for a storage
        self.pages: dict[int, set[Region]] = {}

    def known(self, storage: torch.UntypedStorage) -> Region | None:
        """The region of ``storage``, unless it is new or has moved."""
        region = self.regions.get(storage._cdata)
        if region is None:
            return None
        if region.storage() is not storage:
            self.forget(region)
            return None
        if region.start != storage.data_ptr():  # what it has left was given back then
            self.storage_is_gone(region.storage)
            return None
        return region

    def region_of(self, storage: torch.UntypedStorage) -> Region:
        """The region of ``storage``, a new one if it is new or has moved."""
        region = self.known(storage)
        if region is not None:
            return region
        region = Region(storage, self.storage_is_gone)
        for other in self.overlapping(region.start, region.end, region.pages):
            region.aliases += (other,)
            other.aliases += (region,)
        self.regions[region.key] = region
        for page in region.pages:
            residents = self.pages.get(page)
            if residents is None:
                self.pages[page] = {region}
            else:
                residents.add(region)
        return region

    def storage_is_gone(self, storage: StorageRef) -> None:
        region = storage.region
        if region is not None:
            storage.region = None  # which refers to the reference
            self.when_freed(region)
            self.forget(region)

    def overlapping(self, start: int, end: int, pages: range) -> list[Region]:
        """The living regions that share an address with ``start`` to before ``end``."""
        found = []
        for page in pages:
            residents = self.pages.get(page)
            if not residents:
                continue
            for region in tuple(residents):  # one may go meanwhile
                if region.start < end and start < region.end and region not in found:
                    found.append(region)
        if not found:
            return found
        living = []
        for region in found:
            if region.alive():
                living.append(region)
            else:
                self.forget(region)
        return living

    def forget_all(self) -> None:
        """Nobody is to be told any more of what is gone."""
        for region in list(self.regions.values()):
            region.storage.region = None
            self.forget(region)

    def forget(self, region: Region) -> None:
        if self.regions.get(region.key) is region:
            del self.regions[region.key]
        for page in region.pages:
            residents = self.pages.get(page)
            if residents is not None:
                residents.discard(region)
        for other in region.aliases:
            other.aliases = tuple(alias for alias in other.aliases if alias is not region)
