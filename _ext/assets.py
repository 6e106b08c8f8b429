"""Few files for a page to load: stylesheets and scripts of several packages, joined.

A page of the theme asks for some thirty files, most of them small. Those of ``JOINED`` are written
one after the other into one file each. ``pygments.css`` stays by itself: the theme writes it after
the pages. Files that no page uses are left out.
"""

from pathlib import Path

from sphinx.application import Sphinx

JOINED = {  # in the order in which they were loaded
    "base.css": [
        "basic.css",
        "styles/bootstrap.css",
        "styles/pydata-sphinx-theme.css",
    ],
    "site.css": [
        "css/theme.css",
        "copybutton.css",
        "lanes.css",
        "results.css",
        "sphinx-design.min.css",
    ],
    "site.js": [
        "documentation_options.js",
        "doctools.js",
        "sphinx_highlight.js",
        "clipboard.min.js",
        "copybutton.js",
        "design-tabs.js",
    ],
    "pages.js": ["controls.js", "zoom.js", "copy_page.js"],  # run when the page is there
}
UNUSED = ("sg-tags.js", "js/search-tuning.js")  # tags of a gallery; the order that ours replaces


def join(app: Sphinx) -> None:
    """Write the joined files; Sphinx has copied the others before it writes a page."""
    static = Path(app.outdir, "_static")
    for joined, names in JOINED.items():
        texts = []
        for name in names:
            text = (static / name).read_text(encoding="utf-8")
            lines = text.splitlines()
            texts.append("\n".join(line for line in lines if "sourceMappingURL=" not in line))
        end = "\n;\n" if joined.endswith(".js") else "\n"
        (static / joined).write_text(end.join(texts) + "\n", encoding="utf-8")


def name_of(asset: object) -> str:
    return str(getattr(asset, "filename", asset) or "").removeprefix("_static/")


def load_joined(app: Sphinx, pagename: str, templatename: str, context: dict, doctree) -> None:
    """Put the joined files in place of their parts."""
    if not hasattr(app, "assets_are_joined"):
        join(app)
        app.assets_are_joined = True
    left_out = {name for names in JOINED.values() for name in names} | set(UNUSED)
    styles = [css for css in context["css_files"] if name_of(css) not in left_out]
    scripts = [js for js in context["script_files"] if name_of(js) not in left_out]
    context["css_files"] = styles
    context["script_files"] = scripts


def setup(app: Sphinx) -> dict:
    app.add_css_file("base.css", priority=1)
    app.add_css_file("site.css", priority=900)
    app.add_js_file("site.js", priority=1)
    app.add_js_file("pages.js", priority=900, defer="defer")
    app.connect("html-page-context", load_joined, priority=900)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
