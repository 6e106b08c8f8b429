"""Run the recipes on their ranks and show on each page what every rank printed.

sphinx-gallery renders a recipe and executes nothing. When the builder starts, this extension runs
what is stale through the harness, which starts ranks as processes of their own: a recipe that
aborts or hangs takes neither Sphinx nor another page along. A page then gets

* under its title, with ``rankproof_header = True``: how to run it, the file to download, and an
  archive of it with all that it imports from its project;
* under its last code block: the output of every rank, the first one open;
* where its prose says ``.. recipe-controls::``: each negative control, the edit and the failure
  that was observed.

A run is kept in ``<outdir>/../recipe_runs/`` and is stale when the code, what it imports from its
project, the controls, the ranks, torch or the harness changes. A failed run is never kept. When a
recipe fails or a control is not caught, all pages are rendered, the page shows it, and the build
ends with an error. ``-D execute_recipes=0`` executes nothing, and the pages say so.
"""

import difflib
import json
import logging as python_logging
import os
import re
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from functools import cache, partial
from pathlib import Path

import torch
from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.errors import SphinxError
from sphinx.util import logging
from sphinx.util.console import bold
from sphinx.util.docutils import SphinxDirective

import rankproof
from rankproof.bundles import is_more_than_a_file, write_bundle
from rankproof.judge import KINDS, Failure
from rankproof.kept import KeptRun
from rankproof.recipe import Control, Recipe, Settings, find_recipes
from rankproof.report import Report

logger = logging.getLogger(__name__)

AT_A_TIME = 2  # recipes side by side; most of the ranks of each wait most of the time
LAST_LINES = 8  # of a failure's message, on its page

NOT_EXECUTED = (
    "Nothing was executed for this page. Built with “make html”, it shows here what every rank "
    "printed."
)
ANSI = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
# Where the packages and this project lie on the machine that builds; left out on the pages
DIRECTORIES = [f"{Path(module.__file__).parent.parent}{os.sep}" for module in (torch, rankproof)]

BUNDLES = "_downloads/bundles"  # below the site: an archive of each recipe that imports others

VERIFIED = Path("verified")  # of the project that is built


class RecipesFailed(SphinxError):
    """At least one recipe failed, or a negative control was not caught."""

    category = "Recipes failed"


@dataclass
class RecipeRuns:
    """One recipe and what was observed of it; reports are missing where nothing was executed."""

    recipe: Recipe
    report: Report | None = None
    controls: dict[str, Report] = field(default_factory=dict)
    executed: int = 0
    seconds: float = 0.0

    @property
    def fingerprint(self) -> str:
        """Changes when anything that the page shows of these runs changes."""
        reports = [asdict(report) for report in (self.report, *self.controls.values()) if report]
        says = [(control.name, control.says) for control in self.recipe.controls]
        return repr([reports, says, badge(self.recipe).astext()])

    def caught(self, control: Control) -> bool:
        report = self.controls.get(control.name)
        return report is not None and control.caught(report.failures)

    def problems(self) -> list[str]:
        """What must end the build, in words."""
        found = [self.report.describe()] if self.report and not self.report.ok else []
        for control in self.recipe.controls:
            report = self.controls.get(control.name)
            if report is not None and not self.caught(control):
                observed = ", ".join(f"{f.kind} ({f.text})" for f in report.failures)
                found.append(
                    f"{self.recipe.path.name}: the control {control.name!r} was not caught: "
                    f"{control.missed(report.failures)}: expected {control.expected}, observed "
                    f"{observed or 'no failure'}\nrun it again: {report.command}"
                )
        return found


# ---------------------------------------------------------------------------------------------
# Running what is stale


def page_ranks(recipe: Recipe) -> int:
    """The ranks of the page's run: ``RANKS`` if set, but never fewer than the recipe needs.

    Raises:
        SphinxError: ``RANKS`` is not a positive integer.
    """
    wanted = os.environ.get("RANKS", "")
    if not wanted:
        return recipe.page_ranks
    if not wanted.isdecimal() or int(wanted) < 1:
        raise SphinxError(f"RANKS={wanted!r}: give a number of ranks, for example RANKS=4")
    return max(int(wanted), recipe.min_ranks)


def kept_run(runs: RecipeRuns, kept: KeptRun) -> Report:
    """The report of one run, as it is kept if that is fresh, else by running it now."""
    report = kept.report()
    if report:
        return report
    started = time.monotonic()
    report = kept.run()
    seconds = time.monotonic() - started
    if kept.control:
        what = f"with the edit {kept.control.name!r}"
        verdict = "caught"
    else:
        what = f"on {kept.ranks} rank{'s' * (kept.ranks > 1)}"
        verdict = "passed, judged in part" if report.unjudged else "passed"
    if not kept.as_it_must(report):
        verdict = "FAILED"
    logger.info(f"  {runs.recipe.name} {what}: {bold(verdict)} in {seconds:.1f} s")
    runs.executed += 1
    runs.seconds += seconds
    return report


def galleries(app: Sphinx) -> list[tuple[Path, str]]:
    """Each folder of scripts and the folder of its pages, as sphinx-gallery is told them."""
    sources = app.config.sphinx_gallery_conf["examples_dirs"]
    pages = app.config.sphinx_gallery_conf["gallery_dirs"]
    if isinstance(sources, str):  # one folder
        sources = [sources]
    if isinstance(pages, str):
        pages = [pages]
    return [(Path(app.srcdir, s), p) for s, p in zip(sources, pages, strict=True)]


def run_stale_recipes(app: Sphinx) -> None:
    """Fill ``app.recipe_runs``, a dict from page name to :class:`RecipeRuns`."""
    global VERIFIED
    settings = Settings.of(Path(app.srcdir))
    VERIFIED = settings.root / settings.verified
    DIRECTORIES.append(f"{Path(app.srcdir).resolve()}{os.sep}")
    app.recipe_runs = {}
    if app.builder.format != "html":
        return
    store = Path(app.outdir).parent / "recipe_runs"
    if app.config.execute_recipes:
        logger.info(bold("running recipes that are not up to date..."))
    for source, pages in galleries(app):
        for recipe in find_recipes(source, settings):
            if app.config.rankproof_ranks:
                recipe = replace(recipe, page_ranks=app.config.rankproof_ranks)
            page = recipe.path.relative_to(source.resolve()).with_suffix("").as_posix()
            app.recipe_runs[f"{pages}/{page}"] = RecipeRuns(recipe)
    if app.config.execute_recipes:
        started = time.monotonic()
        with ThreadPoolExecutor(AT_A_TIME) as pool:
            run = partial(run_stale, store=store, launcher=app.config.rank_launcher)
            list(pool.map(run, app.recipe_runs.values()))
        app.recipe_runs_seconds = time.monotonic() - started


def run_stale(runs: RecipeRuns, store: Path, launcher: str) -> None:
    """Run one recipe and, if it passes, its negative controls, as far as they are stale."""
    ranks = page_ranks(runs.recipe)
    runs.report = kept_run(runs, KeptRun(store, runs.recipe, ranks, None, launcher))
    if not runs.report.ok:
        return
    for control in runs.recipe.controls:
        kept = KeptRun(store, runs.recipe, control.ranks, control)
        runs.controls[control.name] = kept_run(runs, kept)


def outdated_pages(app: Sphinx, env, added, changed, removed) -> list[str]:
    """Read a page again when the runs that it shows have changed."""
    seen = getattr(env, "recipe_fingerprints", {})
    env.recipe_fingerprints = {page: runs.fingerprint for page, runs in app.recipe_runs.items()}
    differing = dict(env.recipe_fingerprints.items() - seen.items())
    return sorted(differing.keys() & env.found_docs)


def summarize(app: Sphinx, exception: Exception | None) -> None:
    """Say what ran; end the build with an error if something failed."""
    all_runs = getattr(app, "recipe_runs", {}).values()
    if exception is not None or not all_runs:
        return
    if not app.config.execute_recipes:
        logger.info(bold(f"{len(all_runs)} recipes, nothing executed"))
        return
    executed = [runs for runs in all_runs if runs.executed]
    done = (
        f"{len(executed)} of {len(all_runs)} recipes ran ({sum(r.executed for r in executed)} runs "
        f"with their negative controls) in {app.recipe_runs_seconds:.0f} s"
    )
    logger.info(bold(done if executed else f"{len(all_runs)} recipes, all unchanged: none ran"))
    for runs in sorted(executed, key=lambda runs: -runs.seconds):
        logger.info(f"  {runs.seconds:6.1f} s  {runs.executed:2} runs  {runs.recipe.name}")
    problems = []
    for runs in all_runs:
        problems += runs.problems()
    if problems:
        raise RecipesFailed("\n\n".join(problems))


# ---------------------------------------------------------------------------------------------
# Parts of a page


def html(markup: str) -> nodes.raw:
    return nodes.raw("", markup, format="html")


def code(text: str, language: str = "text", *, copy: bool = False) -> nodes.literal_block:
    return nodes.literal_block(text, text, language=language, classes=[] if copy else ["no-copy"])


def plain(text: str) -> str:
    """``text`` of a run as a page shows it: no colours, no machine's directories."""
    text = ANSI.sub("", text)
    for directory in DIRECTORIES:
        text = text.replace(directory, "")
    return text.rstrip()


def div(css: str, *children: nodes.Node) -> nodes.container:
    return nodes.container("", *children, classes=css.split())


def paragraph(text: str, css: str = "") -> nodes.paragraph:
    return nodes.paragraph("", text, classes=css.split())


def conditions(report: Report) -> str:
    """Where and how long a run took, in one line; ranks that all died left no device."""
    parts = [f"{report.ranks} rank{'s' * (report.ranks > 1)}"]
    if report.device:
        parts.append(report.device)
    if report.torch:
        parts.append(f"torch {report.torch}")
    parts.append(f"{report.seconds:.1f} s")
    return " · ".join(parts)


def rank_blocks(report: Report, opened: set[int]) -> list[nodes.Node]:
    blocks: list[nodes.Node] = []
    for rank, output in enumerate(report.outputs):
        text = plain(output) or "(no output)"
        state = " open" if rank in opened else ""
        blocks += [
            html(f'<details class="rank"{state}><summary><strong>Rank {rank}</strong></summary>'),
            code(text),
        ]
        if rank < len(report.stacks) and report.stacks[rank]:
            blocks += [paragraph("Stacks at the deadline:"), code(plain(report.stacks[rank]))]
        blocks.append(html("</details>"))
    return blocks


def output_of(report: Report | None) -> nodes.Node:
    """What stands under the last code block of a page."""
    if report is None:
        return div("sphx-glr-script-out not-executed", paragraph(NOT_EXECUTED))
    failed_on = {failure.rank for failure in report.failures} - {None}
    title = "Output" if report.ok else "This recipe failed"
    shown: list[nodes.Node] = [paragraph(f"{title} · {conditions(report)}", "output-conditions")]
    shown += [failure_block(failure) for failure in report.failures]
    if not report.conclusive:
        shown += [paragraph(f"Not judged: {plain(reason)}") for reason in report.unjudged]
    shown += rank_blocks(report, opened=failed_on or {0})
    if report.ok:
        return div("sphx-glr-script-out", *shown)
    shown += [paragraph("Reproduce it:", "output-reproduce")]
    block = div(
        "sphx-glr-script-out recipe-failed", *shown, code(report.command, "bash", copy=True)
    )
    block["ids"].append("recipe-failed")
    return block


def failure_block(failure: Failure) -> nodes.Node:
    where = "" if failure.rank is None else f" (rank {failure.rank})"
    children: list[nodes.Node] = [
        nodes.paragraph("", "", nodes.strong("", KINDS[failure.kind]), nodes.Text(where))
    ]
    text = plain(failure.text)
    if text:
        children.append(code("\n".join(text.splitlines()[-LAST_LINES:])))
    if failure.hint:
        children.append(paragraph(failure.hint, "failure-hint"))
    return div("failure", *children)


@cache
def verified_records() -> list[dict]:
    return [json.loads(path.read_text("utf-8")) for path in sorted(VERIFIED.glob("*.json"))]


def badge(recipe: Recipe) -> nodes.Node:
    """Where the recipe ran on an accelerator, of which version it was then, and how it ended."""
    lines = []
    for record in verified_records():
        mine = record["recipes"].get(recipe.name)
        if mine is None:
            continue
        where = f"{record['ranks']} × {record['device']}, torch {record['torch']}"
        commit = f" ({mine['commit']})" if mine["commit"] else ""
        ran = f"{where}, version {mine['version']}{commit}, {mine['date']}"
        if mine["ok"]:
            lines.append(("verified", f"Verified on {ran}"))
        else:
            lines.append(("failed", f"Fails on {ran}"))
    unseen = "Not yet verified: “make verify” has not run it on an accelerator"
    lines = lines or [("unverified", unseen)]
    return div("verification", *(paragraph(text, f"badge badge-{css}") for css, text in lines))


class BuildSummary(SphinxDirective):
    """``.. build-summary::`` says what this build executed and what came of it."""

    def run(self) -> list[nodes.Node]:
        self.env.note_reread()  # other runs, another summary, without an edit of this page
        all_runs = list(self.env.app.recipe_runs.values())
        reports = [runs.report for runs in all_runs if runs.report is not None]
        if not reports:
            return [paragraph("Nothing was executed for these pages.", "build-summary")]
        passed = sum(report.ok for report in reports)
        caught = []
        for runs in all_runs:
            caught += [runs.caught(control) for control in runs.recipe.controls]
        ranks = " or ".join(str(n) for n in sorted({report.ranks for report in reports}))
        devices = {report.device.partition(",")[0] for report in reports}  # without the backend
        torches = {report.torch and f"torch {report.torch}" for report in reports}
        text = (
            f"For these pages {passed} of {len(all_runs)} recipes passed on {ranks} ranks, and "
            f"their checks caught {sum(caught)} of {len(caught)} deliberate faults in them "
            f"({', '.join(sorted(filter(None, devices | torches)))})."
        )
        in_part = [report for report in reports if report.ok and report.unjudged]
        if in_part:
            text += f" In {len(in_part)} of these recipes the checks leave out a part of a save."
        css = "build-summary" if passed == len(all_runs) and all(caught) else "bad"
        return [paragraph(text, f"build-summary {css}")]


class RecipeDirective(SphinxDirective):
    """A directive about the recipe whose page it stands on."""

    def runs(self) -> RecipeRuns:
        runs = self.env.app.recipe_runs.get(self.env.docname)
        if runs is None:
            raise self.error(f"“{self.name}” belongs on the page of a recipe.")
        return runs


class VerificationBadge(RecipeDirective):
    """``.. verification-badge::`` says on which accelerators this very code has passed."""

    def run(self) -> list[nodes.Node]:
        return [badge(self.runs().recipe)]


class RecipeControls(RecipeDirective):
    """``.. recipe-controls::`` shows each negative control: the edit and the failure observed."""

    def run(self) -> list[nodes.Node]:
        runs = self.runs()
        if not runs.recipe.controls:
            raise self.error(f"{runs.recipe.name} has no controls to show.")
        self.env.metadata[self.env.docname]["shows_controls"] = True
        return [self.control(control, runs) for control in runs.recipe.controls]

    def control(self, control: Control, runs: RecipeRuns) -> nodes.Node:
        says, messages = self.state.inline_text(control.says, self.lineno)
        report = runs.controls.get(control.name)
        if report is None:
            observed = [paragraph("Not executed for this page.", "verdict")]
        elif runs.caught(control):
            title = f"Caught on {conditions(report)}"
            observed = [paragraph(title, "verdict"), failure_block(report.failures[0])]
        else:
            missed = "Not caught: the recipe does not need this line, or its checks are blind."
            observed = [paragraph(missed, "verdict verdict-missed")]
            observed += [failure_block(failure) for failure in report.failures]
        return div(
            "recipe-control",
            nodes.paragraph("", "", nodes.strong("", "", *says), classes=["control-says"]),
            *messages,
            code(diff(runs.recipe, control), "diff"),
            *observed,
        )


def diff(recipe: Recipe, control: Control) -> str:
    """The edit of a control as changed lines with one line around them.

    Another file than the recipe's own is named above them.
    """
    path = control.file or recipe.path
    before = path.read_text(encoding="utf-8")
    after = before.replace(control.find, control.replace, 1)
    lines = difflib.unified_diff(before.splitlines(), after.splitlines(), lineterm="", n=1)
    shown = [line for line in lines if not line.startswith(("---", "+++", "@@"))]
    if path != recipe.path:
        shown.insert(0, f"# {os.path.relpath(path, recipe.root)}")
    return "\n".join(shown)


# ---------------------------------------------------------------------------------------------
# Placing them


def place(app: Sphinx, doctree: nodes.document) -> None:
    """Put the run under the title and the output under the last code block of a recipe's page."""
    page = app.env.docname
    runs = app.recipe_runs.get(page)
    if runs is None:
        return
    title_section = next(doctree.findall(nodes.section))  # sphinx-gallery demands a title
    own = [block for block in doctree.findall(nodes.literal_block) if is_own_code(block)]
    written = [block for block in own if block["language"] == "Python"]  # as sphinx-gallery has it
    last = (written or own)[-1]  # a block of the page's text is "python", and may come later
    last.parent.insert(last.parent.index(last) + 1, output_of(runs.report))
    if app.config.rankproof_header:
        add_header(runs.recipe, page, doctree, title_section, Path(app.srcdir))
    if runs.report is not None and not runs.report.ok:
        link = nodes.reference("", "what every rank printed", refid="recipe-failed", internal=True)
        text = nodes.Text("This recipe failed when this page was built: see ")
        title_section.insert(1, nodes.danger("", nodes.paragraph("", "", text, link)))
    if runs.recipe.controls and not app.env.metadata[page].get("shows_controls"):
        text = "%s has controls that its page does not show: place “.. recipe-controls::”"
        logger.warning(text, runs.recipe.name, location=page)


def is_own_code(block: nodes.literal_block) -> bool:
    """Whether a block is code of the recipe itself; a literalinclude names its source."""
    return block.get("language", "").lower() == "python" and "source" not in block


def add_header(
    recipe: Recipe, page: str, doctree: nodes.document, title_section: nodes.section, root: Path
) -> None:
    """Put command and files under the title, and sphinx-gallery's own links away.

    sphinx-gallery copies the recipe beside its page, and leaves files that are no pages where they
    are: these are named from ``root``, the site's source.
    """
    downloads = list(doctree.findall(addnodes.download_reference))
    own = next(node for node in downloads if node["reftarget"].endswith(".py"))
    link = own.deepcopy()
    link.children = [nodes.inline("", f"Download {recipe.path.name}", classes=["download"])]
    line = nodes.paragraph("", "", link, classes=["recipe-files"])
    beside = [path for path in recipe.flat_files if path != recipe.path]
    before = " and put next to it "
    for path in beside:
        line += nodes.Text(before)
        link = own.deepcopy()
        link["reftarget"] = f"/{os.path.relpath(path, root)}"
        link.children = [nodes.literal("", path.name)]
        line += link
        before = ", "
    if beside:
        line += nodes.Text(", which it imports")
    for package in recipe.packages:
        line += nodes.Text("; it imports the package ")
        line += nodes.literal("", package.name)
        line += nodes.Text(": install it, or put its folder next to the file")
    if is_more_than_a_file(recipe):
        archive = f"{recipe.path.stem}.zip"
        up = "../" * page.count("/")
        line += nodes.Text(". All in one archive: ")
        line += nodes.reference("", archive, refuri=f"{up}{BUNDLES}/{archive}")
    command = f"torchrun --nproc-per-node={page_ranks(recipe)} {recipe.path.name}"
    title_section.insert(1, div("recipe-header", code(command, "bash", copy=True), line))
    for node in list(doctree.findall(nodes.Element)):
        if {"sphx-glr-download-link-note", "sphx-glr-download-zip"} & set(node.get("classes", ())):
            node.parent.remove(node)


def write_bundles(app: Sphinx, exception: Exception | None) -> None:
    """Put the archives that pages lead to beside the pages."""
    if exception is not None or app.builder.format != "html" or not app.config.rankproof_header:
        return
    folder = Path(app.outdir, BUNDLES)
    folder.mkdir(parents=True, exist_ok=True)
    for runs in getattr(app, "recipe_runs", {}).values():
        if is_more_than_a_file(runs.recipe):
            write_bundle(runs.recipe, folder)


def setup(app: Sphinx) -> dict:
    # sphinx-gallery would say at the end that nothing was executed; summarize() tells what was.
    python_logging.getLogger("sphinx.sphinx-gallery").addFilter(
        lambda record: "no examples were executed" not in record.getMessage()
    )
    app.add_config_value("execute_recipes", True, "env")
    app.add_config_value("rankproof_ranks", None, "env")  # of recipes without settings: 2
    app.add_config_value("rankproof_header", False, "env")  # how to run it, the file, its imports
    # Or "warm": forks, much sooner; "auto": scripts may start their ranks themselves.
    app.add_config_value("rank_launcher", "torchrun", "env")
    app.add_directive("build-summary", BuildSummary)
    app.add_directive("recipe-controls", RecipeControls)
    app.add_directive("verification-badge", VerificationBadge)
    app.connect("builder-inited", run_stale_recipes, priority=600)  # after sphinx-gallery: 500
    app.connect("env-get-outdated", outdated_pages)
    app.connect("doctree-read", place, priority=400)  # before Sphinx collects downloads: 500
    app.connect("build-finished", write_bundles)
    app.connect("build-finished", summarize, priority=900)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
