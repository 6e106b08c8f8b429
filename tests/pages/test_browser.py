"""The real pages in Chromium: wide and narrow, light and dark."""

import contextlib
import functools
import gzip
import http.server
import os
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote, unquote, urlsplit

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Page, sync_playwright
from searches import SEARCHES
from small_site import ROOT

from rankproof.recipe import discover

pytestmark = pytest.mark.browser

FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
RECIPES = {
    f"recipes/{recipe.folder}/{recipe.name}": recipe
    for recipe in discover(ROOT / "recipes_source", ROOT / "tests" / "controls")
}
SECTIONS = sorted({f"recipes/{recipe.folder}/index" for recipe in RECIPES.values()})
GUIDE = sorted(f"guide/{path.stem}" for path in (ROOT / "guide").glob("*.rst"))
PAGES = ["index", "search", "recipes/index", *GUIDE, *SECTIONS, *RECIPES]
CLIPBOARD_ONCE_FILLED = """async () => {
    for (let look = 0; look < 500; look++) {
        const text = await navigator.clipboard.readText();
        if (text) return text;
        await new Promise((resolve) => setTimeout(resolve, 10));
    }
    return "";
}"""


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *args: object) -> None:
        """Say nothing: the tests look at what the browser saw."""

    def copyfile(self, source, outputfile) -> None:
        """Send the file; a page that is left while it loads takes the connection with it."""
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            super().copyfile(source, outputfile)


@pytest.fixture(scope="session")
def served(built_site: Path) -> Iterator[str]:
    """The address of the pages, served from this machine on a free port."""
    handler = functools.partial(Quiet, directory=str(built_site))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.fixture(scope="session")
def chromium() -> Iterator[Browser]:
    path = shutil.which("chromium") or shutil.which("chromium-browser")
    if path is None:
        missing = "no Chromium: install it (Debian, Ubuntu: apt-get install chromium)"
        if os.environ.get("CI") == "true":
            pytest.fail(missing)
        pytest.skip(missing)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=FLAGS)
        yield browser
        browser.close()


@pytest.fixture
def theme() -> str:
    return "light"


@pytest.fixture
def width() -> int:
    return 375


class Visit:
    """``visit(page)`` opens a page; what the browser complained about is in ``visit.seen``."""

    def __init__(self, chromium: Browser, served: str, theme: str, width: int) -> None:
        self.served, self.seen = served, []
        self.context = chromium.new_context(
            viewport={"width": width, "height": 900},
            color_scheme=theme,
            permissions=["clipboard-read", "clipboard-write"],
        )
        self.tab = tab = self.context.new_page()
        tab.on("request", lambda r: r.url.startswith((served, "data:")) or self.note(r.url))
        tab.on("response", lambda r: r.status < 400 or self.note(f"{r.status} {r.url}"))
        tab.on("console", lambda m: m.type in ("error", "warning") and self.note(m.text))
        tab.on("pageerror", lambda error: self.note(f"error {error}"))

    def note(self, complaint: str) -> None:
        self.seen.append(complaint)

    def __call__(self, page: str) -> Page:
        self.tab.goto(f"{self.served}/{page}.html", wait_until="load")
        return self.tab


@pytest.fixture
def visit(chromium: Browser, served: str, theme: str, width: int) -> Iterator[Visit]:
    """A browser that has seen nothing yet, for a test that leaves something behind."""
    visit = Visit(chromium, served, theme, width)
    yield visit
    visit.context.close()


@pytest.fixture(scope="session")
def tabs() -> Iterator[dict]:
    """One tab for each look, which keeps what all pages load."""
    tabs: dict[tuple[str, int], Visit] = {}
    yield tabs
    for visit in tabs.values():
        visit.context.close()


@pytest.fixture
def look(chromium: Browser, served: str, theme: str, width: int, tabs: dict) -> Visit:
    """The tab of this look, for a test that a page forgets when it is left."""
    if (theme, width) not in tabs:
        tabs[theme, width] = Visit(chromium, served, theme, width)
    visit = tabs[theme, width]
    visit.tab.goto("about:blank")  # what the page before still asked for is not this one's
    visit.seen.clear()
    return visit


TABLET = 768
LOOKS = [("light", 1280), ("dark", 1280), ("dark", 375)]
FIRST = next(iter(RECIPES))
ONE_OF_EACH = ["index", "search", "recipes/index", SECTIONS[0], FIRST, *GUIDE]
NARROW = [pytest.param(page, "light", 375, id=page) for page in PAGES]
OTHERS = [
    pytest.param(page, *look, id=f"{page}-{look[0]}-{look[1]}")
    for page in ONE_OF_EACH
    for look in LOOKS
]


@pytest.mark.parametrize(("page", "theme", "width"), [*NARROW, *OTHERS])
def test_a_page_asks_nobody_complains_of_nothing_and_fits(look, page, width, theme):
    """Every page narrow and light, one of each kind in every look; a recipe's ranks unfold."""
    tab = look(page)
    assert look.seen == []
    for wide in (TABLET, width):
        tab.set_viewport_size({"width": wide, "height": 900})
        assert tab.evaluate("document.documentElement.scrollWidth") <= wide
    shown = tab.evaluate("document.documentElement.dataset.theme")
    assert shown == theme
    background = tab.evaluate("getComputedStyle(document.body).backgroundColor")
    brightness = sum(map(int, background.removeprefix("rgb(").removesuffix(")").split(","))) / 3
    assert brightness > 200 if theme == "light" else brightness < 60
    if page not in RECIPES:
        return
    ranks = tab.locator(".sphx-glr-script-out details.rank")
    assert ranks.nth(0).locator("pre").is_visible()
    for number in range(1, ranks.count()):
        output = ranks.nth(number).locator("pre")
        assert not output.is_visible()
        ranks.nth(number).locator("summary").click()
        assert output.is_visible()
    assert look.seen == []


@pytest.mark.parametrize("width", [1280])
@pytest.mark.parametrize("page", RECIPES)
def test_the_copy_button_copies_the_source(look, page, width):
    tab = look(page)
    recipe = RECIPES[page]
    source = recipe.path.read_text()

    def copied_by(button) -> str:
        tab.evaluate("navigator.clipboard.writeText('')")
        button.click()
        return tab.evaluate(CLIPBOARD_ONCE_FILLED).strip()

    blocks = tab.locator("div.highlight-Python")
    assert blocks.count() > 0
    first, last = blocks.nth(0), blocks.nth(blocks.count() - 1)
    for block in (first, last):
        block.hover()
        copied = copied_by(block.locator("button.copybtn"))
        assert copied == block.locator("pre").inner_text().strip()
        assert copied in source
    assert tab.locator(".no-copy button.copybtn").count() == 0
    command = tab.locator(".recipe-header")
    copied = copied_by(command.locator("button.copybtn"))
    assert copied == f"torchrun --nproc-per-node={recipe.page_ranks} {recipe.path.name}"


CONTROLS_SHOWN = """() => [...document.querySelectorAll("nav, header, footer, button")]
    .filter((part) => part.getBoundingClientRect().height && !part.closest("article"))
    .map((part) => part.outerHTML.slice(0, 80))"""
CUT_OFF = """() => [...document.querySelectorAll("article .highlight pre")]
    .filter((code) => code.scrollWidth > code.clientWidth).length"""
FOLDED = """() => [...document.querySelectorAll("article details > :not(summary)")]
    .filter((part) => !part.checkVisibility()).length"""


@pytest.mark.parametrize("width", [800])
def test_paper_has_all_of_the_article_and_nothing_to_click(visit, width):
    tab = visit(FIRST)
    for look in (CONTROLS_SHOWN, CUT_OFF, FOLDED):
        assert tab.evaluate(look), "this look sees nothing"
    tab.emulate_media(media="print")
    assert tab.evaluate(CONTROLS_SHOWN) == []
    assert tab.evaluate(CUT_OFF) == 0
    assert tab.evaluate(FOLDED) == 0


def test_the_search_finds_a_recipe_without_asking_anybody(visit):
    tab = visit("search")
    tab.goto(tab.url + "?q=checkpoint")
    tab.locator("ul.search li a").first.wait_for()
    assert visit.seen == []


@pytest.mark.parametrize(("words", "page", "heading"), SEARCHES)
def test_a_first_search_finds_the_symptom(look, words, page, heading):
    look.tab.goto(f"{look.served}/search.html?q={quote(words)}")
    first = look.tab.locator("ul.search li a").first
    first.wait_for()
    assert urlsplit(first.get_attribute("href")).path == f"{page}.html"
    first.click()
    look.tab.wait_for_url(f"**/{page}.html*")
    headings = look.tab.locator("article :is(h1, h2)").all_text_contents()
    assert [text for text in headings if heading in text]


def test_the_menu_of_a_narrow_page_leads_to_a_recipe(visit):
    first, *_, last = RECIPES
    tab = visit(first)
    tab.locator("button.primary-toggle").click()
    tab.locator(f".bd-sidebar-primary a[href$='{Path(last).name}.html']").first.click()
    tab.wait_for_url(f"**/{Path(last).name}.html")


# -- for everybody, and light -------------------------------------------------------------------

LARGEST_PAGE = 250_000  # bytes of HTML
RESULTS, LARGEST_RESULTS = "guide/results", 400_000  # every measured row
LARGEST_VISIT = 1_000_000  # bytes, packed, of a page and all that it loads
OF_EACH_FOLDER = list({recipe.folder: page for page, recipe in RECIPES.items()}.values())


@pytest.mark.parametrize("width", [1280])
@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("page", [*ONE_OF_EACH, *OF_EACH_FOLDER])
def test_axe_finds_nothing(look, page, theme, width):
    """All of its rules, none switched off; whatever unfolds is unfolded."""
    tab = look(page)
    tab.evaluate("for (const d of document.querySelectorAll('article details')) d.open = true")
    found = Axe().run(tab).response["violations"]
    assert [(rule["id"], rule["nodes"][0]["html"]) for rule in found] == []


def test_axe_sees_what_is_wrong(visit):
    tab = visit("index")
    tab.evaluate("""document.querySelector('article').insertAdjacentHTML('beforeend',
        '<img src="_static/img/favicon.svg"><p style="color: #999; background: #fff">pale</p>')""")
    found = {rule["id"] for rule in Axe().run(tab).response["violations"]}
    assert found == {"image-alt", "color-contrast"}


@pytest.mark.parametrize("width", [1280])
def test_a_first_visit_is_light_and_soon_ready(visit, built_site, width):
    asked: set[str] = set()

    def note(request) -> None:
        asked.add(unquote(urlsplit(request.url).path))

    tab = visit("search")  # the browser has started
    tab.wait_for_load_state("networkidle")  # what this page still asks for is not weighed
    tab.on("request", note)
    visit("index")
    tab.wait_for_load_state("networkidle")
    tab.remove_listener("request", note)
    sizes = {path: len(gzip.compress((built_site / path[1:]).read_bytes())) for path in asked}
    assert "/index.html" in sizes and len(sizes) > 10
    assert sum(sizes.values()) <= LARGEST_VISIT
    ready = "performance.getEntriesByType('navigation')[0].domContentLoadedEventEnd"
    assert min(visit(FIRST).evaluate(ready) for _ in range(3)) < 1000
    heavy = {p: (built_site / f"{p}.html").stat().st_size for p in PAGES}
    assert heavy.pop(RESULTS) <= LARGEST_RESULTS
    assert {page: size for page, size in heavy.items() if size > LARGEST_PAGE} == {}


TABLES_CUT_OFF = """() => {
    const shown = [...document.querySelectorAll('article table')].filter((t) => t.checkVisibility())
    const sticksOut = (t) => t.getBoundingClientRect().right
        > t.closest('article').getBoundingClientRect().right + 1
    const scrollsByItself = (t) => t.scrollWidth > t.clientWidth + 1
    const cut = shown.filter((t) => sticksOut(t) || scrollsByItself(t))
    return cut.map((t) => t.innerText.slice(0, 80))
}"""


@pytest.mark.parametrize("width", [1280])
def test_no_column_of_a_table_is_cut_off(look, width):
    found = {page: look(page).evaluate(TABLES_CUT_OFF) for page in PAGES}
    assert {page: tables for page, tables in found.items() if tables} == {}


@pytest.mark.parametrize("width", [1280])
@pytest.mark.parametrize("page", ["guide/gains", RESULTS])
def test_a_cell_that_is_too_wide_is_seen(visit, page, width):
    tab = visit(page)
    tab.evaluate("""document.querySelector('article table td').insertAdjacentHTML('beforeend',
        '<div style="width: 3000px">wide</div>')""")
    assert tab.evaluate(TABLES_CUT_OFF)


# -- what moves ---------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [1280])
@pytest.mark.parametrize("question", range(3))
def test_from_the_landing_page_to_copied_code_in_two_clicks(visit, question, width):
    tab = visit("index")
    tab.locator(".questions .sd-card").nth(question).click()
    tab.wait_for_url("**/recipes/**")
    tab.evaluate("navigator.clipboard.writeText('')")
    code = "article div[class*='highlight-']:not(.highlight-bash):not(.no-copy)"
    block = tab.locator(code).first
    block.hover()
    block.locator("button.copybtn").click()
    assert tab.evaluate(CLIPBOARD_ONCE_FILLED).strip() == block.locator("pre").inner_text().strip()


TIMELINES = [p for p, r in RECIPES.items() if ".. timeline::" in r.path.read_text()]


def test_a_trace_is_drawn_larger_and_small_again(visit):
    tab = visit(TIMELINES[0])
    svg = tab.locator("figure.lanes:has(.zoom) svg:visible").first
    width = svg.evaluate("e => e.getBoundingClientRect().width")
    tab.get_by_role("button", name="Larger").first.click()
    assert svg.evaluate("e => e.getBoundingClientRect().width") > 1.8 * width
    assert tab.evaluate("document.documentElement.scrollWidth") <= 375
    tab.get_by_role("button", name="Smaller").first.click()
    assert svg.evaluate("e => e.getBoundingClientRect().width") == pytest.approx(width)
    assert visit.seen == []


def test_a_line_is_toggled_and_its_failure_is_beside_the_code(visit):
    tab = visit(FIRST)
    button = tab.get_by_role("button", name="Show it in the code").first
    removed = button.locator("xpath=ancestor::*[contains(@class, 'recipe-control')]")
    lines = removed.locator(".highlight-diff pre").inner_text().splitlines()
    button.click()
    shown = tab.locator(".toggled")
    assert [f"-{line}" for line in shown.locator("del").inner_text().splitlines()] == [
        line for line in lines if line.startswith("-")
    ]
    recorded = removed.locator(".failure p").first.inner_text()
    assert recorded in shown.locator("figcaption").inner_text()
    assert tab.get_by_role("button", name="Put the line back").evaluate(
        "e => e === document.activeElement"
    )
    tab.keyboard.press("Enter")
    assert shown.count() == 0
    assert button.evaluate("e => e === document.activeElement")
    assert visit.seen == []
