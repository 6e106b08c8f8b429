"""Take the picture that a link to the site shows elsewhere: ``python tools/picture_of_a_page.py``.

Needs Chromium, and the pages that ``make html`` has built. The picture shows the end of a recipe's
code and what every rank printed.
"""

import shutil
import sys
from pathlib import Path

from playwright.sync_api import sync_playwright

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "_build" / "html" / "recipes" / "checkpoint" / "async_save.html"
PICTURE = ROOT / "_static" / "img" / "page.png"


def main() -> int:
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    if chromium is None or not PAGE.is_file():
        print("needs Chromium and the built pages: run make html first", file=sys.stderr)
        return 2
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        tab = browser.new_page(viewport={"width": 1280, "height": 860}, color_scheme="light")
        tab.goto(PAGE.as_uri())
        output = tab.locator(".sphx-glr-script-out")
        output.locator("details.rank summary").nth(1).click()
        top = output.evaluate("e => e.getBoundingClientRect().top + scrollY")
        tab.evaluate("top => window.scrollTo(0, top - 330)", top)
        tab.screenshot(path=PICTURE)
        browser.close()
    print(PICTURE.relative_to(ROOT))
    return 0


if __name__ == "__main__":
    sys.exit(main())
