"""Check every internal link of built pages: the file is there, and the anchor in it. No network.

``python tools/check_links.py _build/html``
"""

import sys
from functools import cache
from pathlib import Path
from urllib.parse import unquote, urlsplit

from bs4 import BeautifulSoup

REFERENCES = {"a": "href", "link": "href", "img": "src", "script": "src", "source": "src"}


@cache
def parse(page: Path) -> BeautifulSoup:
    return BeautifulSoup(page.read_text(encoding="utf-8"), "html.parser")


@cache
def anchors(page: Path) -> frozenset[str]:
    """The ids in ``page``, and "" for its top."""
    return frozenset(element["id"] for element in parse(page).find_all(id=True)) | {""}


def broken_links(root: Path) -> list[str]:
    """``page: link: what is wrong``, for each internal link below ``root`` that leads nowhere."""
    broken = []
    for page in sorted(root.rglob("*.html")):
        if "_static" in page.relative_to(root).parts:
            continue
        for tag, attribute in REFERENCES.items():
            for element in parse(page).find_all(tag, attrs={attribute: True}):
                link = element[attribute]
                parts = urlsplit(link)
                if parts.scheme or parts.netloc:
                    continue
                base = root if parts.path.startswith("/") else page.parent  # 404.html's do
                path = unquote(parts.path).lstrip("/")
                target = (base / path).resolve() if parts.path else page
                if target.is_dir():
                    target /= "index.html"
                where = f"{page.relative_to(root)}: {link}"
                if not target.is_file():
                    broken.append(f"{where}: no such file")
                elif target.suffix == ".html" and unquote(parts.fragment) not in anchors(target):
                    broken.append(f"{where}: no such anchor")
    return broken


def main() -> int:
    root = Path(sys.argv[1])
    pages = list(root.rglob("*.html"))
    if not pages:
        print(f"{root}: no pages; build them first", file=sys.stderr)
        return 2
    broken = broken_links(root)
    print(*broken, sep="\n")
    print(f"{len(pages)} pages, {len(broken)} broken internal links")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
