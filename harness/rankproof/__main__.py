"""Run scripts on several ranks and judge them by what they did: the command line.

Exit status: 0 passed, or nothing to judge; 1 judged bad; 2 not judged, or a bad option or file.
"""

import argparse
import json
import signal
import sys
from pathlib import Path
from xml.etree import ElementTree

from rankproof import __version__
from rankproof.recipe import (
    GATES,
    Recipe,
    RecipeError,
    Settings,
    find_recipes,
    load_module,
    why_skipped,
)
from rankproof.report import COMMAND, Report
from rankproof.run import LAUNCHERS, OPTIONAL, run
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
    ranks = settings.ranks if is_folder else [scripts[0].page_ranks]
    counts = options.ranks or ([control.ranks] if control else ranks)
    refuse_outputs(options, runs=len(scripts) * len(counts))
    if is_folder:
        for file, why in why_skipped(options.path, settings).items():
            say(options, f"skips {file}: {why}")
    reports = []
    for script in scripts:
        for count in counts:
            if is_folder:
                say(options, f"runs {script.path} on {count} rank{'s' * (count > 1)}")
            report = run(
                Path.cwd() if options.module else script.path,
                count,
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
            reports.append(report)
    status = tell(reports, options, outputs=not is_folder)
    if control is None:
        return status
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


def tell(reports: list[Report], options: argparse.Namespace, outputs: bool) -> int:
    """Print the reports, with what ranks printed, write what was asked for, return the status."""
    if options.json:
        print(json.dumps([r.to_dict() | {"verdict": r.verdict} for r in reports], indent=1))
    else:
        for report in reports:
            print(report.describe())
            shown = report.outputs if outputs and not report.failures else []
            for rank, output in enumerate(shown):
                print(f"--- rank {rank}\n{output.rstrip()}")
    if options.junit:
        options.junit.write_text(junit(reports), encoding="utf-8")
    codes = {report.exit_code for report in reports}
    return 1 if 1 in codes else max(codes)


def junit(reports: list[Report]) -> str:
    """The reports as JUnit's XML: what failed is a failure, what was not judged is skipped."""
    suite = ElementTree.Element("testsuite", name="rankproof", tests=str(len(reports)))
    for report in reports:
        name = f"{report.recipe}-{report.ranks}"
        case = ElementTree.SubElement(suite, "testcase", classname=report.path, name=name)
        case.set("time", f"{report.seconds:.1f}")
        said = "; ".join(report.unjudged) or "; ".join(f.text for f in report.failures)
        if report.verdict != "passed":
            kind = "failure" if report.failures else "skipped"
            ElementTree.SubElement(case, kind, message=said).text = report.describe()
    return ElementTree.tostring(suite, encoding="unicode")


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
    one.add_argument("--ranks", type=world_sizes, metavar="N,N", help="default: 2; folder: as set")
    one.add_argument("--control", help="the name of a control in the recipe's controls file")
    one.add_argument("--gate", help=f"hold a background step: {', '.join(GATES)}, FILE.py:FUNCTION")
    one.add_argument("--order", action="store_true", help="record stream order (CPU)")
    starts = "auto: python if the script starts its ranks itself, else torchrun; warm: forks them"
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
