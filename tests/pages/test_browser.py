"""The real pages in Chromium: what each promises, looked at in as few loads as it takes."""

import contextlib
import functools
import http.server
import os
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote, urlsplit

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Locator, Page, sync_playwright
from searches import FIRST_OF_ALL, IN_THE_FIRST_THREE
from small_site import ROOT

from rankproof.recipe import Recipe, discover

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


class Visit:
    """``visit(page)`` opens a page; what the browser complained about is in ``visit.seen``."""

    def __init__(self, chromium: Browser, served: str, theme: str = "light") -> None:
        self.served, self.seen = served, []
        self.context = chromium.new_context(
            viewport={"width": NARROW, "height": 900},
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
        self.tab.goto("about:blank")  # what the page before still asked for is not this one's
        self.seen.clear()
        self.tab.goto(f"{self.served}/{page}.html", wait_until="load")
        return self.tab

    def is_as_wide_as(self, width: int) -> bool:
        self.tab.set_viewport_size({"width": width, "height": 900})
        return self.tab.evaluate("document.documentElement.scrollWidth") <= width


@pytest.fixture(scope="session")
def light(chromium: Browser, served: str) -> Iterator[Visit]:
    """One tab for all that a page forgets when it is left; it keeps what all pages load."""
    visit = Visit(chromium, served)
    yield visit
    visit.context.close()


NARROW, TABLET, WIDE = 375, 768, 1280
HIGHEST_RECIPE = 10_000  # pixels, at ``WIDE``
UNFOLD = "for (const d of document.querySelectorAll('article details')) d.open = true"
FIRST = next(iter(RECIPES))
TABLES_CUT_OFF = """() => {
    const shown = [...document.querySelectorAll('article table')].filter((t) => t.checkVisibility())
    const sticksOut = (t) => t.getBoundingClientRect().right
        > t.closest('article').getBoundingClientRect().right + 1
    const scrollsByItself = (t) => t.scrollWidth > t.clientWidth + 1
    const cut = shown.filter((t) => sticksOut(t) || scrollsByItself(t))
    return cut.map((t) => t.innerText.slice(0, 80))
}"""


@pytest.mark.parametrize("page", PAGES)
def test_a_page_asks_nobody_complains_of_nothing_and_fits(light, page):
    """Narrow and wide; on a recipe's page ranks unfold, and what is copied is the source."""
    tab = light(page)
    assert light.is_as_wide_as(TABLET) and light.is_as_wide_as(NARROW)
    assert light.is_as_wide_as(WIDE)
    if page in RECIPES:
        assert tab.evaluate("document.documentElement.scrollHeight") <= HIGHEST_RECIPE
        ranks_unfold(tab)
    assert tab.evaluate(TABLES_CUT_OFF) == []
    if page in RECIPES:
        copies_its_source(tab, RECIPES[page])
    assert light.seen == []


def ranks_unfold(tab: Page) -> None:
    ranks = tab.locator(".sphx-glr-script-out details.rank")
    assert ranks.nth(0).locator("pre").is_visible()
    for number in range(1, ranks.count()):
        output = ranks.nth(number).locator("pre")
        assert not output.is_visible()
        ranks.nth(number).locator("summary").click()
        assert output.is_visible()


def copied_by(tab: Page, button: Locator) -> str:
    tab.evaluate("navigator.clipboard.writeText('')")
    button.click()
    return tab.evaluate(CLIPBOARD_ONCE_FILLED).strip()


def copies_its_source(tab: Page, recipe: Recipe) -> None:
    source = recipe.path.read_text()
    blocks = tab.locator("div.highlight-Python")
    assert blocks.count() > 0
    tab.evaluate(UNFOLD)
    for block in (blocks.nth(0), blocks.nth(blocks.count() - 1)):
        block.hover()
        copied = copied_by(tab, block.locator("button.copybtn"))
        assert copied == block.locator("pre").inner_text().strip()
        assert copied in source
    assert tab.locator(".no-copy button.copybtn").count() == 0
    copied = copied_by(tab, tab.locator(".recipe-header button.copybtn"))
    assert copied == f"torchrun --nproc-per-node={recipe.page_ranks} {recipe.path.name}"


def test_words_of_users_find_their_page(light):
    """A symptom's page comes first, a question's among three; each page once."""
    tab = light("index")
    tab.goto(f"{light.served}/search.html?q={quote('checkpoint wrong results')}")
    tab.get_by_text("Search finished").wait_for()
    links = tab.locator("ul.search li > a").all()
    found = [urlsplit(link.get_attribute("href")).path for link in links]
    assert len(found) > 3 and len(set(found)) == len(found)
    assert "guide/changelog.html" not in found[:3]
    missed = []
    for words, page in FIRST_OF_ALL + IN_THE_FIRST_THREE:
        ranked = tab.evaluate("(w) => Search.rank(w).slice(0, 3).map((p) => p[0])", words)
        if page not in (ranked[:1] if (words, page) in FIRST_OF_ALL else ranked):
            missed.append((words, page, ranked))
    assert missed == []
    assert light.seen == []


OF_EACH_KIND = ["index", "search", FIRST, "guide/gains", "guide/defects"]


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_axe_finds_nothing_wide_in_either_theme_and_sees_what_is_wrong(chromium, served, theme):
    """All of its rules, none switched off; whatever unfolds is unfolded."""
    visit = Visit(chromium, served, theme)
    for page in OF_EACH_KIND:
        tab = visit(page)
        visit.is_as_wide_as(WIDE)
        assert tab.evaluate("document.documentElement.dataset.theme") == theme
        tab.evaluate(UNFOLD)
        found = Axe().run(tab).response["violations"]
        assert [(page, rule["id"], rule["nodes"][0]["html"]) for rule in found] == []
    tab.evaluate("""document.querySelector('article').insertAdjacentHTML('beforeend',
        '<img src="_static/img/favicon.svg"><p style="color: #999; background: #fff">pale</p>')""")
    found = {rule["id"] for rule in Axe().run(tab).response["violations"]}
    assert found == {"image-alt", "color-contrast"}
    visit.context.close()
