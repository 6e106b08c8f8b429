"""Which rows a page has to show beside ours, and which figure may stand in a headline.

A *peer* is a row of somebody else's way. No page leaves out a peer that beats a row of ours that it
shows: not where it was measured at other tokens a step, in another run, or in another precision.
What is no peer is what others are compared with (``REFERENCES``). A headline that lies within the
interval of ``none``, the same measurement without a save, says that it is below the noise.
"""

from dataclasses import dataclass

from benchmarks.result_files import PARAMETERS, REFERENCES, SHOWN, Result, cell, known, written

LOWER = SHOWN["better"]["lower"].split()
HIGHER = SHOWN["better"]["higher"].split()
OWN = ("checkpoint",)  # parameters that each has for itself: what it loads


def is_peer(row: dict) -> bool:
    return not row["ours"] and row["name"] not in REFERENCES


def beats(one: dict, other: dict, field: str) -> bool:
    """Whether the figure of ``one`` is the better one; False where one of both has none."""
    if not known(one, field) or not known(other, field):
        return False
    if field in HIGHER:
        return one[field] > other[field]
    return field in LOWER and one[field] < other[field]


def same_case(one: dict, other: dict) -> bool:
    """Whether both were measured with the same parameters."""
    compared = [name for name in PARAMETERS if name not in OWN]
    return all(one.get(name) == other.get(name) for name in compared)


def better_peers(ours: dict, rows: list[dict], fields: list[str]) -> list[dict]:
    """The peers among ``rows`` that beat ``ours`` in one of ``fields``, in its case."""
    found = []
    for row in rows:
        if is_peer(row) and same_case(row, ours):
            if any(beats(row, ours, field) for field in fields):
                found.append(row)
    return found


def with_better_peers(shown: list[dict], asked: list[dict], result: Result) -> list[dict]:
    """``shown``, and peers that beat what is ``asked`` of ours, each with the row that it beats.

    ``asked`` may have rows, of other tokens a step, that are not shown where nobody beats them.
    """
    added = []
    for ours in asked:
        if ours["ours"]:
            peers = better_peers(ours, result.rows, result.benchmark.deciding.split())
            added += [ours, *peers] if peers else []
    return [row for row in result.rows if row in shown or row in added]


@dataclass(frozen=True)
class Column:
    """Our row at one number of tokens a step, and the others there, the best first."""

    ours: dict
    others: list[dict]
    better: list[dict]  # the peers that beat ours

    def named(self, asked: list[str]) -> list[dict]:
        """Of ``others``: those ``asked`` for, the best peer, all that beat ours; each name once."""
        peers = [row for row in self.others if is_peer(row)]
        found: dict[str, dict] = {}
        for row in self.others:
            if row in self.better or row["name"] in asked or row in peers[:1]:
                found.setdefault(row["name"], row)
        return list(found.values())

    def lead(self, field: str) -> float:
        """How far ours is ahead of the best peer for sure: above one, or below if it may not be.

        By the ends of the intervals that are the worse for ours.
        """
        peers = [
            interval(row, field) or (row[field], row[field]) for row in self.others if is_peer(row)
        ]
        if not peers:
            return 0.0
        low, high = interval(self.ours, field) or (self.ours[field], self.ours[field])
        if field in HIGHER:
            return low / max(best for _, best in peers)
        return min(best for best, _ in peers) / high


def columns(rows: list[dict], name: str, field: str) -> list[Column]:
    """A column for each row called ``name`` that has the field; that of the greatest lead first."""
    rows = [row for row in rows if known(row, field)]
    rows.sort(key=lambda row: row[field], reverse=field in HIGHER)
    found = []
    for ours in rows:
        if ours["name"] == name:
            others = [row for row in rows if row is not ours and same_case(row, ours)]
            found.append(Column(ours, others, better_peers(ours, rows, [field])))
    return sorted(found, key=lambda column: column.lead(field), reverse=True)


def interval(row: dict, field: str) -> tuple[float, float] | None:
    """The ends of the interval of a row's figure; None where it has none."""
    stem = field.removesuffix("_s")
    unit = field.removeprefix(stem)
    low = row.get(f"{stem}_low{unit}")
    high = row.get(f"{stem}_high{unit}")
    if low is None or high is None:
        return None
    return low, high


def headline(row: dict, field: str, rows: list[dict]) -> str:
    """The figure of ``row``, or that it is below the noise that ``none`` of its file has."""
    noise = next((each for each in rows if each["name"] == "none" and same_case(each, row)), None)
    if noise is None or not known(noise, field) or not known(row, field):
        return cell(row, field)
    ends = interval(noise, field)
    if ends is None:
        return f"{cell(row, field)} (noise not measured)"
    low, high = ends
    if row[field] > high:
        return cell(row, field)
    if field.endswith("_slowdown"):
        largest = max(abs(low - 1), abs(high - 1))
        return f"below noise (±{written(field, 1 + largest).lstrip('+')})"
    return f"below noise (±{written(field, max(abs(low), abs(high)))})"


def how(row: dict) -> str:
    """``does not clip, bfloat16 gradients``: what a row says of clipping and precision."""
    parts = []
    if "clips" in row:
        parts.append("clips" if row["clips"] else "does not clip")
    if "precision" in row:
        parts.append(row["precision"])
    return ", ".join(parts)
