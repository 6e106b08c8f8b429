"""The real pages in Chromium: wide and narrow, light and dark."""

import contextlib
import functools
import http.server
import os
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, sync_playwright
from small_site import ROOT

from harness.recipe import discover

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
PAGES = ["index", "search", "recipes/index", *SECTIONS, *RECIPES]
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


@pytest.fixture
def visit(chromium: Browser, served: str, theme: str, width: int) -> Iterator:
    """``visit(page)`` opens a page; what the browser complained about is in ``visit.seen``."""
    context = chromium.new_context(
        viewport={"width": width, "height": 900},
        color_scheme=theme,
        permissions=["clipboard-read", "clipboard-write"],
    )
    tab = context.new_page()

    def visit(page: str) -> Page:
        tab.goto(f"{served}/{page}.html", wait_until="load")
        return tab

    visit.seen = []
    note = visit.seen.append
    tab.on("request", lambda r: r.url.startswith((served, "data:")) or note(f"request {r.url}"))
    tab.on("response", lambda r: r.status < 400 or note(f"{r.status} {r.url}"))
    tab.on("console", lambda m: m.type not in ("error", "warning") or note(f"{m.type} {m.text}"))
    tab.on("pageerror", lambda error: note(f"error {error}"))
    yield visit
    context.close()


LOOKS = [("light", 1280), ("dark", 1280), ("dark", 375)]
FIRST = next(iter(RECIPES))
ONE_OF_EACH = ["index", "search", "recipes/index", SECTIONS[0], FIRST]
NARROW = [pytest.param(page, "light", 375, id=page) for page in PAGES]
OTHERS = [
    pytest.param(page, *look, id=f"{page}-{look[0]}-{look[1]}")
    for page in ONE_OF_EACH
    for look in LOOKS
]


@pytest.mark.parametrize(("page", "theme", "width"), [*NARROW, *OTHERS])
def test_a_page_asks_nobody_complains_of_nothing_and_fits(visit, page, width, theme):
    """Every page narrow and light, one of each kind in every look; a recipe's ranks unfold."""
    tab = visit(page)
    assert visit.seen == []
    assert tab.evaluate("document.documentElement.scrollWidth") <= width
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
    assert visit.seen == []


@pytest.mark.parametrize("width", [1280])
@pytest.mark.parametrize("page", RECIPES)
def test_the_copy_button_copies_the_source(visit, page, width):
    tab = visit(page)
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


def test_the_search_finds_a_recipe_without_asking_anybody(visit):
    tab = visit("search")
    tab.goto(tab.url + "?q=checkpoint")
    tab.locator("ul.search li a").first.wait_for()
    assert visit.seen == []


def test_the_menu_of_a_narrow_page_leads_to_a_recipe(visit):
    first, *_, last = RECIPES
    tab = visit(first)
    tab.locator("button.primary-toggle").click()
    tab.locator(f".bd-sidebar-primary a[href$='{Path(last).name}.html']").first.click()
    tab.wait_for_url(f"**/{Path(last).name}.html")
