"""Mend the code blocks of the theme's Markdown twins.

The theme writes each page as Markdown too, beside the HTML and in ``llms-full.txt``, and squeezes
every run of spaces into one: Python without indentation. This puts the code of the HTML page back
and names its language.
"""

import re
from html import unescape
from pathlib import Path

from sphinx.application import Sphinx
from sphinx.util import logging

logger = logging.getLogger(__name__)

FENCE = re.compile(r"^```\w*\n.*?\n```$", re.MULTILINE | re.DOTALL)
BLOCK = re.compile(
    r'<div class="[^"]*\bhighlight-(?P<language>\w+)[^"]*"><div class="highlight"><pre>'
    r"(?P<code>.*?)</pre>",
    re.DOTALL,
)
NO_LANGUAGE = {"default", "none", "text"}
TAG = re.compile(r"<[^>]*>")


def code_blocks(html: str) -> list[str]:
    """The code blocks of a page as fenced Markdown, in their order.

    Read as Sphinx writes them; parsing the pages as HTML takes seconds in every build.
    """
    blocks = []
    for block in BLOCK.finditer(html):
        language = "" if block["language"] in NO_LANGUAGE else block["language"].lower()
        code = unescape(TAG.sub("", block["code"])).strip("\n")
        blocks.append(f"```{language}\n{code}\n```")
    return blocks


def mend(app: Sphinx, exception: Exception | None) -> None:
    full = Path(app.outdir, "llms-full.txt")
    if exception is not None or app.builder.format != "html":
        return
    everything = full.read_text(encoding="utf-8")
    for page in app.env.all_docs:
        twin = Path(app.outdir, f"{page}.md")
        text = twin.read_text(encoding="utf-8")
        blocks = code_blocks(twin.with_suffix(".html").read_text(encoding="utf-8"))
        if len(FENCE.findall(text)) != len(blocks):
            logger.warning("the code of its Markdown twin cannot be mended", location=page)
            continue
        replacements = iter(blocks)
        mended = FENCE.sub(lambda _, blocks=replacements: next(blocks), text)
        twin.write_text(mended, encoding="utf-8")
        everything = everything.replace(text, mended)
    full.write_text(everything, encoding="utf-8")


def setup(app: Sphinx) -> dict:
    app.connect("build-finished", mend, priority=600)  # the theme writes them at 500
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
