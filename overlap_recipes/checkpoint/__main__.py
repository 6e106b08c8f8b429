# SPDX-License-Identifier: BSD-3-Clause
# Overlap Recipes 0.3.0, overlap_recipes/checkpoint/__main__.py
"""``python -m overlap_recipes.checkpoint``: list, verify, prune or export checkpoints."""

import argparse
import sys
from pathlib import Path

from .export import convert
from .kept import prune, show
from .stores import store_of
from .stores.directory import Directory


def _options_of(words: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m overlap_recipes.checkpoint")
    commands = parser.add_subparsers(dest="command", required=True)
    lists = commands.add_parser("list", help="names and sizes of the checkpoints below ROOT")
    verifies = commands.add_parser("verify", help="read every byte; exit code 1: changed, or none")
    prunes = commands.add_parser("prune", help="delete old checkpoints")
    prunes.add_argument("--keep-last", type=int, default=3, help="default: 3")
    prunes.add_argument("--keep-every", type=int, default=0, help="keep steps that this divides")
    prunes.add_argument("--dry-run", action="store_true", help="only say what would be deleted")
    for command in lists, verifies, prunes:
        command.add_argument("root", help="a directory, or a URL that fsspec knows")
    exports = commands.add_parser("export", help="a DCP checkpoint as safetensors")
    exports.add_argument("root", metavar="checkpoint")
    exports.add_argument("directory", type=Path)
    exports.add_argument("--prefix", default="app.model.", help="of the names that are exported")
    options = parser.parse_args(words)
    is_url = "://" in options.root and options.command != "export"
    if not is_url and not Path(options.root).is_dir():
        parser.error(f"no directory {options.root}")
    return options


def main(words: list[str]) -> int:
    """Do what ``words`` ask for; return the exit code."""
    options = _options_of(words)
    if options.command == "prune":
        store = store_of(options.root)
        if isinstance(store, Directory) and not options.dry_run:
            store.lock()  # until this process ends; below a URL a job goes on, and prunes alike
        prune(store, options.keep_last, options.keep_every, options.dry_run)
        return 0
    if options.command == "export":
        convert(Path(options.root), options.directory, options.prefix)
        return 0
    all_are_whole = show(store_of(options.root), every_byte=options.command == "verify")
    return 0 if all_are_whole else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
