"""No table, card or line leaves out a measured peer that beats ours: pages against raw rows."""

import json
import re

import pytest
from bs4 import BeautifulSoup
from results_site import REPO, render

from benchmarks.first_tables import HEADLINES
from benchmarks.result_files import API_NAMES

PAGES = ("index.rst", "guide/*.rst", "recipes_source/*/*.py")
SHOWN = ("first-table", "result-gain", "result-table")
COLUMNS = {  # that decide; the others of a row are in its file
    "checkpoint_stall": ("staging_cost_s", "cost_s", "upload_slowdown"),
    "restart": ("load_s", "total_s", "load_bytes_per_s"),
    "offload_step": ("step_s", "kept"),
    "activation_offload": ("step_s", "peak_allocated_bytes"),
    "fsdp_overlap": ("step_s", "efficiency"),
    "save_faults": ("lost", "cannot_resume", "training_ended"),
}
HIGHER = ("kept", "efficiency", "load_bytes_per_s")
NO_PEERS = ("none", "no_communication", "fsdp2_no_collectives", "resident", "plain_read")
NO_PEERS += ("plain_read_to_device",)
SAME = ("model", "loop", "compiled", "reduce_dtype", "activation_checkpointing", "storage", "step")
SAME += ("tokens", "layers", "saved_ranks", "every", "point")


def places() -> list[tuple[str, str]]:
    """Pages and the text of each directive on them."""
    found = []
    for pattern in PAGES:
        for path in sorted(REPO.glob(pattern)):
            lines = path.read_text(encoding="utf-8").splitlines()
            lines = [re.sub(r"^# ?", "", line).strip() for line in lines] + [""]
            for number, line in enumerate(lines):
                if re.match(rf"\.\. ({'|'.join(SHOWN)}):: \w+$", line):
                    options = []
                    while lines[number + 1 + len(options)].startswith(":"):
                        options.append(f"   {lines[number + 1 + len(options)]}")
                    found.append((path.relative_to(REPO).as_posix(), "\n".join([line, *options])))
    return found


PLACES = places()


@pytest.fixture(scope="module")
def shown(tmp_path_factory) -> list[BeautifulSoup]:
    """What each of ``PLACES`` shows."""
    repo = tmp_path_factory.mktemp("fair")
    for folder in ("benchmarks", "guide"):
        (repo / folder).symlink_to(REPO / folder)
    page = ""
    for number, (_, directive) in enumerate(PLACES):
        title = f"Place {number}"
        page += f"{title}\n{'-' * len(title)}\n\n{directive}\n\n"
    html, warnings = render(repo, page)
    assert warnings == ""
    sections = BeautifulSoup(html, "html.parser").select("section > section[id^=place-]")
    assert len(sections) == len(PLACES) > 20
    return sections


def beats(peer: dict, ours: dict, field: str) -> bool:
    if peer.get(field) is None or ours.get(field) is None:
        return False
    if field in HIGHER:
        return peer[field] > ours[field]
    return peer[field] < ours[field]


def better_peers(directive: str, names: set[str], section: str) -> set[str]:
    """The peers that beat a row of ours in ``names``, in the files of the machines shown."""
    benchmark = re.search(r":: (\w+)", directive)[1]
    where = dict(re.findall(r"(\w+)=(\S+)", re.sub(r":rows:.*", "", directive)))
    field = re.search(r":field: (\w+)", directive)
    fields = [field[1]] if field else COLUMNS.get(benchmark, ())
    where.pop("tokens", None)
    where.pop("checkpoint", None)  # each reads its own
    found = set()
    for path in (REPO / "benchmarks" / "results").glob(f"{benchmark}.*.json"):
        data = json.loads(path.read_text())
        if f"{data['ranks']} × {data['device']}" not in section:
            continue
        rows = [row for row in data["rows"] if row["name"] not in NO_PEERS]
        rows = [row for row in rows if all(plain(row.get(k)) == v for k, v in where.items())]
        if "first-table" in directive:  # of stock models
            rows = [row for row in rows if row.get("model") != "synthetic"]
        for ours in rows:
            if not ours["ours"] or ours["name"] not in names:
                continue
            for peer in rows:
                same = all(peer.get(key) == ours.get(key) for key in SAME)
                if not peer["ours"] and same and any(beats(peer, ours, f) for f in fields):
                    found.add(peer["name"])
    return found


def plain(value: object) -> str:
    return {True: "yes", False: "no"}.get(value, str(value)) if value is not None else ""


@pytest.mark.parametrize("number", range(len(PLACES)), ids=lambda number: PLACES[number][0])
def test_no_place_leaves_out_a_peer_that_beats_ours(shown, number):
    section = shown[number]
    names = rows_named(section)
    left_out = better_peers(PLACES[number][1], names, section.text) - names
    assert not left_out, f"{PLACES[number]}: {sorted(left_out)}"


def rows_named(section: BeautifulSoup) -> set[str]:
    """The rows that a page names, by themselves or in the API's words."""
    codes = {code.text for code in section.select("code")}
    return codes | {row for row, words in API_NAMES.items() if words in codes}


def test_no_headline_leaves_out_a_peer_that_beats_ours(repo):
    for folder in ("benchmarks/results", "guide/changelog.rst"):
        (repo / folder).unlink() if (repo / folder).is_file() else (repo / folder).rmdir()
        (repo / folder).symlink_to(REPO / folder)
    html, warnings = render(repo, ".. headline-table::")
    assert warnings == ""
    page = BeautifulSoup(html, "html.parser").select_one("section")
    names = rows_named(page)
    found = set()
    for line in HEADLINES:
        where = " ".join(f"{name}={value}" for name, value in line.where.items())
        directive = f"x:: {line.benchmark}\n   :field: {line.field}\n   :where: {where}"
        found |= better_peers(directive, {line.ours}, page.text)
    assert found and found <= names
    readme = (REPO / "README.md").read_text()
    assert all(f"`{API_NAMES.get(name, name)}`" in readme for name in found)
