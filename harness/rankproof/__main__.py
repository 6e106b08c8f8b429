"""``python -m rankproof``: run and judge recipes from the command line."""

import argparse
import sys
from pathlib import Path

from rankproof.recipe import GATES, RecipeError, Settings, load_recipe
from rankproof.run import COMMAND, run
from rankproof.verify import WORLD_SIZES, verify


def controls_for(recipe: Path) -> Path | None:
    """Where the recipe's controls are, by the settings of its project."""
    return Settings.of(recipe).controls_of(recipe)


def run_command(options: argparse.Namespace) -> int:
    recipe = load_recipe(options.recipe, controls_for(options.recipe))
    control = recipe.control(options.control) if options.control else None
    ranks, deadline_s = (
        (control.ranks, control.deadline_s) if control else (recipe.page_ranks, recipe.deadline_s)
    )
    report = run(
        recipe.path,
        ranks if options.ranks is None else options.ranks,
        launcher=options.launcher,
        control=control,
        gate=options.gate,
        order=options.order or recipe.order,
        deadline_s=deadline_s if options.deadline is None else options.deadline,
        args=tuple(options.args),
        keep=options.keep,
    )
    print(report.describe())
    if report.ok:
        for rank, output in enumerate(report.outputs):
            print(f"--- rank {rank}\n{output.rstrip()}")
    if control is None:
        return 0 if report.ok else 1
    caught = control.caught(report.kinds)
    verdict = "caught" if caught else f"NOT caught as expected: {sorted(control.fails)}"
    print(f"control '{control.name}': {verdict}")
    return 0 if caught else 1


def verify_command(options: argparse.Namespace) -> int:
    settings = Settings.of(options.recipes or Path.cwd())
    recipes = options.recipes or settings.root / settings.recipes
    out = options.out or settings.root / settings.verified
    controls = settings.controls_of(recipes)
    return verify(recipes, controls, out, tuple(options.ranks), options.stale)


def main() -> int:
    parser = argparse.ArgumentParser(prog=COMMAND, description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser(
        "run",
        help="run one recipe, or one of its negative controls",
        epilog="What follows -- is passed to the recipe.",
    )
    one.add_argument("recipe", type=Path)
    one.add_argument("--ranks", type=int, help="default: the control's, or the page's")
    one.add_argument("--control", help="the name of a control in the recipe's controls file")
    one.add_argument("--gate", choices=GATES, help="hold a background step, see rankproof/gates.py")
    one.add_argument("--order", action="store_true", help="record stream order (CPU)")
    one.add_argument("--launcher", choices=("torchrun", "warm"), default="torchrun")
    one.add_argument("--deadline", type=float, help="seconds")
    one.add_argument("--keep", type=Path, help="keep the run's files here (a new directory)")
    one.set_defaults(do=run_command)
    every = commands.add_parser("verify", help="run all recipes on the accelerators present")
    every.add_argument("--recipes", type=Path, help="default: by the project's settings")
    every.add_argument("--ranks", type=int, nargs="+", default=WORLD_SIZES, help="world sizes")
    every.add_argument("--out", type=Path, help="default: by the project's settings")
    every.add_argument("--stale", action="store_true", help="only what changed since it passed")
    every.set_defaults(do=verify_command)
    own, args = sys.argv[1:], []
    if "--" in own:
        at = own.index("--")
        own, args = own[:at], own[at + 1 :]
    options = parser.parse_args(own, argparse.Namespace(args=args))
    try:
        return options.do(options)
    except RecipeError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
