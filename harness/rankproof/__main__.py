"""Run scripts on several ranks and judge them by what they did: the command line.

Exit status: 0 passed, or nothing to judge; 1 judged bad; 2 not judged, or a bad option or file.
"""

import argparse
import signal
import sys
from pathlib import Path

from rankproof import __version__
from rankproof.outputs import annotations, as_json, as_text, junit, status_of
from rankproof.recipe import (
    GATES,
    Control,
    Recipe,
    RecipeError,
    Settings,
    find_recipes,
    load_module,
    why_skipped,
)
from rankproof.report import COMMAND, Report
from rankproof.run import LAUNCHERS, OPTIONAL, is_run_once, run
from rankproof.sources import SourceError


def scripts_of(options: argparse.Namespace, settings: Settings) -> list[Recipe]:
    """The script, the module or the scripts of the folder that are to run."""
    if options.module:
        return [load_module(options.module, Path.cwd())]
    if options.path.is_dir():
        return find_recipes(options.path, settings)
    return [settings.load(options.path)]


def judge(options: argparse.Namespace) -> int:
    """Judge the script, or every script of the folder, as the settings of its project say."""
    settings = Settings.of(options.path or Path.cwd())
    is_folder = options.path is not None and options.path.is_dir()
    scripts = scripts_of(options, settings)
    control = scripts[0].control(options.control) if options.control else None
    runs = []
    for script in scripts:
        counts = options.ranks or ([control.ranks] if control else settings.ranks_of(script))
        runs += [(script, count) for count in counts]
    refuse_outputs(options, runs=len(runs))
    if is_folder:
        for file, why in why_skipped(options.path, settings).items():
            say(options, f"skips {file}: {why}")
    reports = []
    for script, count in runs:
        ranks = f"{count} rank{'s' * (count > 1)}"
        if is_run_once(script, options.launcher):
            if reports and reports[-1].path == str(script.path):
                continue
            ranks = "its own ranks"
        if is_folder:
            say(options, f"runs {script.path} on {ranks}")
        report = judge_one(script, count, control, options)
        reports.append(report)
        if not options.json:
            print(as_text(report, shows_outputs=not is_folder), flush=True)
        for line in annotations(report):
            say(options, line)
    if options.json:
        print(as_json(reports))
    if options.junit:
        options.junit.write_text(junit(reports), encoding="utf-8")
    if control is None:
        return status_of(reports)
    return tell_of_control(control, reports, options)


def judge_one(
    script: Recipe, ranks: int, control: Control | None, options: argparse.Namespace
) -> Report:
    return run(
        Path.cwd() if options.module else script.path,
        ranks,
        module=options.module,
        launcher=options.launcher,
        control=control,
        gate=options.gate,
        order=options.order or script.order,
        deadline_s=options.deadline or (control or script).deadline_s,
        args=tuple(options.args) or script.args,
        keep=options.keep,
        through=tuple(options.allow),
        cwd=options.cwd,
        off=tuple(options.off) or script.off,
    )


def tell_of_control(control: Control, reports: list[Report], options: argparse.Namespace) -> int:
    """Say whether a control was caught, which is what counts then."""
    missed = [why for report in reports if (why := control.missed(report.failures))]
    verdict = f"NOT caught: {missed[0]}; expected {control.expected}" if missed else "caught"
    say(options, f"control '{control.name}': {verdict}")
    return 1 if missed else 0


def refuse_outputs(options: argparse.Namespace, runs: int) -> None:
    """Raise a RecipeError for what could not be written when all has run."""
    if options.keep and runs > 1:
        raise RecipeError(f"--keep is for one run, and these are {runs}")
    if options.junit and options.junit.is_dir():
        raise RecipeError(f"--junit {options.junit}: a folder is there")
    if options.junit and not options.junit.parent.is_dir():
        raise RecipeError(f"--junit {options.junit}: no folder {options.junit.parent}")


def say(options: argparse.Namespace, line: str) -> None:
    """Tell how far it is, as it goes; programs that read JSON find none of it there."""
    print(line, file=sys.stderr if options.json else sys.stdout, flush=True)


def end_by_signal(number: int, _: object) -> None:
    """End as Python ends: what was begun is taken down on the way."""
    sys.exit(128 + number)


def world_sizes(text: str) -> list[int]:
    sizes = [int(part) for part in text.split(",")]
    if min(sizes) < 1:
        raise argparse.ArgumentTypeError(f"{text} ranks: pass a number of 1 or more")
    return sizes


def main() -> int:
    parser = argparse.ArgumentParser(
        prog=COMMAND, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--version", action="version", version=f"rankproof {__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser(
        "run",
        help="run one script, one of its negative controls, or all scripts of a folder",
        epilog="What follows -- is passed to the script.",
    )
    one.add_argument("path", type=Path, nargs="?", help="a script or a folder")
    one.add_argument("-m", dest="module", help="a module, from here, in place of a path")
    one.add_argument(
        "--ranks",
        type=world_sizes,
        metavar="N,N",
        help="default: as set, or 2; and as the script says that it is started",
    )
    one.add_argument("--control", help="the name of a control in the recipe's controls file")
    one.add_argument("--gate", help=f"hold a background step: {', '.join(GATES)}, FILE.py:FUNCTION")
    one.add_argument("--order", action="store_true", help="record stream order (CPU)")
    starts = "auto: python if the script starts its ranks itself, else warm, which forks them"
    one.add_argument("--launcher", choices=LAUNCHERS, default="auto", help=starts)
    one.add_argument("--deadline", type=float, metavar="SECONDS", help="from the first line on")
    one.add_argument("--keep", type=Path, help="keep the files of one run here (a new directory)")
    may = "it may write here, a directory that is there or that it makes"
    one.add_argument("--allow", type=Path, action="append", default=[], help=may)
    where = "its working directory, for a script that reads files beside itself"
    one.add_argument("--cwd", type=Path, metavar="DIR", help=where)
    one.add_argument(
        "--off",
        action="append",
        default=[],
        choices=OPTIONAL,
        metavar="KIND",
        help=f"do not count it, tell it as a note: {', '.join(OPTIONAL)}",
    )
    one.add_argument("--json", action="store_true", help="print the reports as JSON")
    one.add_argument("--junit", type=Path, metavar="FILE", help="write JUnit's XML")
    at = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    options = parser.parse_args(sys.argv[1:at], argparse.Namespace(args=sys.argv[at + 1 :]))
    if (options.path is None) == (options.module is None):
        one.error("pass a script, a folder or -m MODULE")
    signal.signal(signal.SIGTERM, end_by_signal)
    try:
        return judge(options)
    except SourceError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
