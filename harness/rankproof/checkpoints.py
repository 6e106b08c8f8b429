"""Decide whether what is on disk is what was passed to each save."""

import json
from pathlib import Path

from rankproof.judge import LOST_PEER, Failure, Rank, some
from rankproof.saves import SavedState, is_unfinished, last_of

NOT_AWAITED_HINT = (
    "its future was never awaited: call result() on the last save's future before "
    "destroy_process_group()"
)
SHARED_GROUP_HINT = (
    "likely cause: async_save ran on the process group that training uses, and their collectives "
    'mixed; pass process_group=dist.new_group(backend="gloo")'
)
MOST_SHOWN = 80  # characters of a value that differs

Loaded = dict[int, dict[str, dict]]  # what load_back answered: by number of ranks and directory


def _found(run_dir: Path, name: str) -> set[str]:
    return {str(path.parent) for path in run_dir.rglob(name)}


def checkpoint_directories(run_dir: Path, saves: list[SavedState]) -> list[str]:
    """Every directory that should hold a checkpoint: named by a save, or with a shard in it.

    One that still has the name of an unfinished save is none.
    """
    wanted = _found(run_dir, "*.distcp") | _found(run_dir, ".metadata")
    wanted |= {s.directory for s in saves if not (s.failed and s.awaited)}
    for save in {s.directory: s for s in saves}.values():  # the last one to each
        if "removed" in save.events and not Path(save.directory).exists():
            wanted.discard(save.directory)
    wanted -= {s.directory for s in saves if s.unjudged}
    return sorted(directory for directory in wanted if not is_unfinished(directory))


def chunks_by_directory(directories: list[str], saves: list[SavedState]) -> dict[str, dict]:
    """What :mod:`rankproof.load_back` is to hash: by directory and leaf, the chunks passed."""
    request: dict[str, dict] = {directory: {} for directory in directories}
    for save in saves:
        for leaves in save.leaves.values():
            for name, leaf in leaves.items():
                if leaf.get("chunk") and save.directory in request:
                    chunks = request[save.directory].setdefault(leaf.get("of", name), [])
                    if leaf["chunk"] not in chunks:
                        chunks.append(leaf["chunk"])
    return request


def _differences(save: SavedState, found: dict) -> list[str]:
    """Leaves of a loaded checkpoint that are not what the ranks passed to the save."""
    differing = {}  # by leaf: the first rank's difference
    for rank, leaves in sorted(save.leaves.items()):
        for key, expected in leaves.items():
            name = expected.get("of", key)
            loaded = found.get(name)
            chunk = json.dumps(expected["chunk"]) if expected.get("chunk") else "whole"
            if "unjudged" in expected or ("pickle" in expected and loaded is not None):
                continue
            if loaded is None:
                difference = f"rank {rank}: not in the checkpoint"
            elif "value" in expected and loaded.get("value") != expected["value"]:
                values = loaded.get("value"), expected["value"]
                difference = " instead of ".join(str(value)[:MOST_SHOWN] for value in values)
            elif "sha256" in expected and loaded.get("sha256", {}).get(chunk) != expected["sha256"]:
                difference = f"rank {rank}"
            else:
                continue
            differing.setdefault(name, f"{name} ({difference})")
    return list(differing.values())


def hint_at_a_shared_group(saves: list[SavedState], ranks: int) -> str:
    """What is likely to stop ranks that save on the process group that they train on."""
    shared = any(save.shares_training_group and save.kind == "async_save" for save in saves)
    return SHARED_GROUP_HINT if shared and ranks > 1 else ""


def judge_checkpoints(
    saves: list[SavedState],
    directories: list[str],
    loaded: Loaded,
    elsewhere: tuple[str, ...] = (),
) -> list[Failure]:
    """Compare what was loaded with what was saved.

    What was written elsewhere, and is named as such, is not missing as well. Nor is what another
    process seems to have moved.
    """
    failures = []
    moved = moved_by_others(saves, directories, loaded)
    for directory in directories:
        if directory in moved:
            continue
        here = [save for save in saves if save.directory == directory]
        hint = "" if all(save.awaited for save in here) else NOT_AWAITED_HINT
        missing = _why_missing(Path(directory), here)
        if not missing:
            failures += _judge_loaded(directory, last_of(here), loaded, hint)
        elif not any(file.startswith(f"{directory}/") for file in elsewhere):
            text = f"{Path(directory).name}: {missing}"
            failures.append(Failure("checkpoint_missing", text, hint=hint))
    return failures


def _why_missing(path: Path, saves: list[SavedState]) -> str:
    """Why a directory, into which ``saves`` went, has no checkpoint; empty if it may have one."""
    if not path.exists():
        return "the directory does not exist"
    if not any(path.iterdir()):
        return "the directory is empty"
    if any("unfinished" in save.events for save in saves):
        return "the script ended before it knew that the save had"
    return ""


def _judge_loaded(
    directory: str, last: SavedState | None, loaded: Loaded, hint: str
) -> list[Failure]:
    """What is wrong with a checkpoint, on the first number of ranks on which something is."""
    for world_size, answers in loaded.items():
        answer = answers.get(directory, {"error": "not tried"})
        where = f"{Path(directory).name}, loaded on {world_size} rank{'s' * (world_size > 1)}"
        if "unjudged" in answer:
            continue
        if "error" in answer:
            text = f"{where}: {answer['error']}"
            return [Failure("checkpoint_incomplete", text, hint=hint)]
        differing = _differences(last, answer["leaves"]) if last else []
        if differing:
            text = f"{where}: {len(differing)} of {len(answer['leaves'])} leaves are not what was "
            text += f"passed to {last.kind}: " + ", ".join(differing[:3])
            unequal = ranks_disagree_on(last)
            if unequal:
                text += f"; the ranks passed different values of {some(unequal)}"
            return [Failure("checkpoint_wrong", text)]
    return []


def moved_by_others(
    saves: list[SavedState], directories: list[str], loaded: dict[int, dict]
) -> dict[str, str]:
    """By directory of a save that is gone: the one that no rank named and that is there instead.

    It has the leaves that were saved, or is not loaded back.
    """
    named = {save.directory for save in saves}
    unnamed = [directory for directory in directories if directory not in named]
    moved = {}
    for directory in directories:
        last = last_of([save for save in saves if save.directory == directory])
        if last is None or not last.awaited or Path(directory).exists():
            continue
        for candidate in unnamed:
            answers = [by_directory.get(candidate, {}) for by_directory in loaded.values()]
            if all(_may_hold(answer, last) for answer in answers):
                moved[directory] = candidate
                unnamed.remove(candidate)  # it is what one of them has become
                break
    return moved


def _may_hold(answer: dict, save: SavedState) -> bool:
    if "error" in answer:
        return False
    return "unjudged" in answer or answer.get("leaves", {}).keys() == save.leaf_names


def ranks_disagree_on(save: SavedState) -> list[str]:
    """Leaves of which ranks passed different values for the same part: one of them is on disk."""
    passed: dict[tuple[str, str], set[str]] = {}  # by leaf and chunk
    for leaves in save.leaves.values():
        for name, leaf in leaves.items():
            value = leaf.get("sha256") or leaf.get("value")
            if value is not None:
                part = leaf.get("of", name), json.dumps(leaf.get("chunk"))
                passed.setdefault(part, set()).add(value)
    return sorted({name for (name, _), values in passed.items() if len(values) > 1})


def compared(saves: list[SavedState], loaded: dict[int, dict]) -> list[SavedState]:
    """The saves whose values were compared with what is on disk."""
    found = []
    for directory in dict.fromkeys(save.directory for save in saves):
        last = last_of([save for save in saves if save.directory == directory])
        answers = [by_directory.get(directory, {}) for by_directory in loaded.values()]
        if last and any("leaves" in answer for answer in answers):
            found.append(last)
    return found


def not_compared(saves: list[SavedState], directories: list[str]) -> list[str]:
    """What became of saves that nothing on disk is left of, for a person.

    What is on disk, or should be, is judged, or said not to be.
    """
    notes = []
    gone = []
    for save in saves:
        said_elsewhere = save.failed or save.unjudged or save.not_kept
        last = last_of([other for other in saves if other.directory == save.directory])
        is_removed = save.directory not in directories and not Path(save.directory).exists()
        if not said_elsewhere and (save is not last or is_removed):
            gone.append(save)
    if gone:
        names = some([save.name for save in gone])
        notes.append(f"removed or replaced before the end, so not compared: {names}")
    return notes


def judge_replaced(saves: list[SavedState]) -> list[Failure]:
    """Leaves that a directory held and lost, when a later save of other leaves replaced them."""
    failures = []
    complete = [save for save in saves if not save.failed and "removed" not in save.events]
    for number, save in enumerate(complete):
        later = [other for other in complete[number + 1 :] if other.called == save.called]
        gone = sorted(save.leaf_names - later[0].leaf_names) if later else []
        if gone and "renamed" not in save.events:
            text = f"{Path(save.called).name}: a later save into it replaced {some(gone)}"
            hint = "pass all of a checkpoint's state to one save, or save to two directories"
            failures.append(Failure("checkpoint_wrong", text, hint=hint))
    return failures


def judge_failed_saves(saves: list[SavedState], ranks: list[Rank]) -> list[Failure]:
    """Saves that failed where no later one into the same directory made up for it.

    One under the name of an unfinished save does not pass for a checkpoint: whoever names it so
    knows that it may fail. What a writer for other places than a directory has tried is not judged.
    """
    failures = []
    by_number = {rank.number: rank for rank in ranks}
    for number, save in enumerate(saves):
        later = [other for other in saves[number + 1 :] if other.called == save.called]
        made_up_for = any(not other.failures for other in later)
        if is_unfinished(save.directory) or made_up_for or save.unjudged or not save.awaited:
            continue
        for rank, error in sorted(save.failures.items()):
            what_then = _what_then(by_number[rank], error)
            if what_then:
                text = f"{save.name}: {error}, and {what_then}"
                hint = "let it raise, or save again"
                failures.append(Failure("save_failed", text, rank, hint))
                break
    return failures


def _what_then(rank: Rank, error: str) -> str:
    """What a rank did after a save had failed there; empty if that may be what it failed by."""
    if rank.record is None:
        return "" if LOST_PEER.search(error) else "the script did not end"
    return "the script went on" if rank.record.finished else ""


def judge_saves(
    run_dir: Path, saves: list[SavedState], ranks: list[Rank], went_well: bool
) -> list[Failure]:
    """Saves that failed, that nobody awaited, that overlap, or that are left half done.

    A run that went well leaves no save under its unfinished name, unless that save failed.
    """
    failures = []
    if went_well:
        failures += _judge_unfinished_names(run_dir, saves)
    failures += judge_failed_saves(saves, ranks)
    if went_well:
        failures += judge_replaced(saves)
    for save in saves:
        failures += _judge_waiting(save)
    return failures


def _judge_unfinished_names(run_dir: Path, saves: list[SavedState]) -> list[Failure]:
    failures = []
    known = {save.directory for save in saves if save.failed and save.awaited}
    left = _found(run_dir, "*.distcp") | {save.directory for save in saves}
    for directory in sorted(left - known):
        if is_unfinished(directory) and Path(directory).exists():
            text = "it still has the name of an unfinished save, and the run went well"
            failures.append(Failure("checkpoint_incomplete", f"{Path(directory).name}: {text}"))
    return failures


def _judge_waiting(save: SavedState) -> list[Failure]:
    """Two uploads at a time share a group, a writer or a stager, and damage each other unseen."""
    failures = []
    if "never_awaited" in save.events and not save.awaited:
        text = f"{save.name}: the script ended without having waited for it"
        failures.append(Failure("never_awaited", text, hint=NOT_AWAITED_HINT))
    if save.beside:
        other = Path(min(save.beside)).name
        text = f"{save.name}: its upload began while that of {other} was in flight"
        hint = "await each upload before the next one begins"
        failures.append(Failure("overlapping_saves", text, hint=hint))
    return failures


def unjudged(saves: list[SavedState], directories: list[str], loaded: Loaded) -> list[str]:
    """What was not compared, and why."""
    found = [f"{save.name}: {save.unjudged}" for save in saves if save.unjudged]
    found += [f"{save.name}: {save.not_kept}" for save in saves if save.not_kept]
    moved = moved_by_others(saves, directories, loaded)
    for old, new in moved.items():
        to = Path(new).name
        found.append(f"{Path(old).name}: another process seems to have moved it to {to}")
    named = {save.directory for save in saves}
    for directory in directories:
        is_accounted_for = directory in named or directory in moved.values()
        found += _unjudged_directory(directory, loaded, is_accounted_for)
    for save in saves:
        found += _unjudged_leaves(save, loaded)
    return list(dict.fromkeys(found))


def _unjudged_directory(directory: str, loaded: Loaded, is_accounted_for: bool) -> list[str]:
    """Why a checkpoint was not loaded back, or that nobody saw what was passed to its save."""
    name = Path(directory).name
    answers = [by_directory.get(directory, {}) for by_directory in loaded.values()]
    found = [f"{name}: {answer['unjudged']}" for answer in answers if "unjudged" in answer]
    does_load = any("leaves" in answer for answer in answers)
    if does_load and not is_accounted_for:
        found.append(f"{name}: it loads; what was passed to its save was not seen")
    return found


def _unjudged_leaves(save: SavedState, loaded: Loaded) -> list[str]:
    found = []
    answers = [by_directory.get(save.directory, {}) for by_directory in loaded.values()]
    for leaves in save.leaves.values():
        for name, leaf in leaves.items():
            where = f"{save.name}: {name}"
            if "unjudged" in leaf:
                found.append(f"{where} is not compared: {leaf['unjudged']}")
            elif "pickle" in leaf and _other_pickles(name, leaf, answers):
                found.append(f"{where}, a {leaf['type']}, does not compare by its pickle")
    return found


def _other_pickles(name: str, leaf: dict, answers: list[dict]) -> set[str]:
    """What else a leaf was pickled as, by the processes that loaded it."""
    pickles = set()
    for answer in answers:
        if name in answer.get("leaves", {}):
            pickles.add(answer["leaves"][name].get("pickle"))
    return pickles - {leaf["pickle"]}
