"""Sphinx configuration of the Overlap Recipes pages.

sphinx-gallery turns each file of ``recipes_source/`` into a page and executes nothing. The
extension ``rankproof.sphinx_ext`` runs the recipes on their ranks, outside this process, and puts
what they printed on the pages. ``-D execute_recipes=0`` leaves that out.
"""

import os
import re
import subprocess
import sys
from importlib.metadata import version as installed
from pathlib import Path
from urllib.parse import urlsplit

import pytorch_sphinx_theme2

ROOT = Path(__file__).parent
sys.path[:0] = [str(ROOT), str(ROOT / "_ext")]
import harness  # noqa: E402, F401 (puts rankproof on the path)

# Where the pages will stand and where their source is, without a slash at the end. What needs one
# of them is left out where it is not set; a sitemap needs an address, so it has a neutral one.
SITE_URL = os.environ.get("SITE_URL", "")
REPO_URL = os.environ.get("REPO_URL", "")
SITE = (SITE_URL or "https://overlap-recipes.example") + "/"

project = "Overlap Recipes"
author = "the Overlap Recipes authors"
copyright = author

extensions = [
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_gallery.gen_gallery",
    "sphinx_design",
    "sphinx_copybutton",
    "pytorch_sphinx_theme2",
    "mathml",
    "assets",
    "lanes",
    "losses",
    "results",
    "timeline",
    "rankproof.sphinx_ext",
    "folded",
    "recipe_index",
    "markdown_code",
    "moved",
    "guide",
    "torch_names",
    "used_by",
    "surprises",
    "site_wheel",
    "kept_index",
    "notfound.extension",
    "sphinx_sitemap",
    "sphinxext.opengraph",
]

root_doc = "index"
include_patterns = ["index.rst", "guide/**", "recipes/**"]
exclude_patterns = ["_build", ".venv", ".git"]  # Sphinx need not walk through them
templates_path = ["_templates"]
nitpicky = True
nitpick_ignore_regex = [("py:.*", ".*")]  # types in signatures: most are torch's

# guide/reference.rst: the trainers' packages and the stores' need not be there.
autodoc_mock_imports = [
    "accelerate",
    "fsspec",
    "lightning",
    "obstore",
    "safetensors",
    "torchtitan",
    "transformers",
]
autodoc_member_order = "bysource"
toc_object_entries_show_parents = "hide"  # a method of a class stands below its class
add_module_names = False  # headings of the page say where a name is


sphinx_gallery_conf = {
    "examples_dirs": "recipes_source",
    "gallery_dirs": "recipes",
    "subsection_order": "recipe_index.section_order",
    "within_subsection_order": "recipe_index.reading_order",
    "ignore_pattern": r"(^|/)_",
    "plot_gallery": False,  # ranks run outside Sphinx: see rankproof.sphinx_ext
    "notebook_extensions": set(),  # a notebook has one rank
    "download_all_examples": False,
    "write_computation_times": False,
    "show_signature": False,
    "css": (),  # ours styles the pages: _static/css/theme.css
    "default_thumb_file": str(ROOT / "_static" / "thumb.svg"),
}
plot_gallery = False
rankproof_header = True
rank_launcher = "warm"  # a page costs a third of what fresh interpreters under torchrun cost

copybutton_selector = "div:not(.no-copy) > div.highlight pre"
copybutton_prompt_text = r"\$ "
copybutton_prompt_is_regexp = True

html_baseurl = SITE_URL and SITE
site_url = SITE
sitemap_url_scheme = "{link}"
sitemap_excludes = ["search.html", "genindex.html", "404.html"]
notfound_urls_prefix = urlsplit(SITE).path
NOT_FOUND = """
<h1>Page not found</h1>
<p>Nothing is at this address. A page that has moved leads on by itself, so it may never have been
here. Search for what you looked for:</p>
<form class="search-here" action="{top}search.html" method="get" role="search">
  <input type="search" name="q" class="form-control" aria-label="Search the recipes">
  <button type="submit">Search</button>
</form>
<p>Or begin at one of these:</p>
<ul>
  <li><a href="{top}index.html">The start</a>: what it is, how to install it, every recipe</li>
  <li><a href="{top}guide/symptoms.html">Symptoms</a>: the error that you see, and what helps</li>
  <li><a href="{top}guide/reference.html">Reference</a>: the library's names</li>
  <li><a href="{top}guide/what_to_use.html">What to use when</a></li>
</ul>
"""
notfound_context = {
    "title": "Page not found",
    "body": NOT_FOUND.format(top=notfound_urls_prefix),
}
ogp_site_url = SITE
ogp_image = "_static/img/page.png"
ogp_social_cards = {"enable": False}  # one picture for all pages

html_theme = "pytorch_sphinx_theme2"
html_title = project
html_static_path = ["_static", "benchmarks/results"]  # result files to download
html_favicon = "_static/img/favicon.svg"
html_use_index = False
html_copy_source = False
html_show_sourcelink = False
html_show_sphinx = False
html_sidebars = {
    "recipes/**": ["recipe-nav.html"],
    "guide/**": ["recipe-nav.html"],
    "index": [],
    "search": [],
    "genindex": [],
}
html_theme_options = {
    "navbar_start": ["wordmark.html"],
    "navbar_center": ["navbar-nav.html"],
    "navbar_end": ["theme-switcher.html"],
    "navbar_persistent": ["search-button-field.html"],
    "search_bar_text": "Search the recipes",
    "show_nav_level": 2,
    "show_toc_level": 2,
    "article_header_start": ["breadcrumbs.html"],
    "article_header_end": ["copy-page.html"],
    "article_footer_items": [],
    "secondary_sidebar_items": ["page-toc"],
    "primary_sidebar_end": [],
    "footer_start": ["site-footer.html"],
    "footer_end": [],
    "show_prev_next": True,
    "use_edit_page_button": False,
    "pygments_light_style": "a11y-high-contrast-light",
    "pygments_dark_style": "a11y-high-contrast-dark",
    "llm_description": (
        "Executable PyTorch recipes that hide data movement behind compute, "
        "each one run on several ranks and proven before it is published."
    ),
}


def commit() -> str:
    """The commit of these pages, empty outside a clone."""
    command = ["git", "-C", str(ROOT), "rev-parse", "HEAD"]
    try:
        return subprocess.run(command, capture_output=True, text=True).stdout.strip()
    except OSError:
        return ""


html_context = {
    "default_mode": "auto",
    "repo_url": REPO_URL,
    "commit": commit() or "main",
    "versions": f"torch {installed('torch')}, Python {sys.version.split()[0]}",
}


def remove_theme_pictures(app, exception):
    """Leave the theme's logos and icons out of the pages: none is used, and they are not ours."""
    theirs = Path(pytorch_sphinx_theme2.get_html_theme_path(), "static", "img")
    for picture in theirs.iterdir():
        Path(app.outdir, "_static", "img", picture.name).unlink(missing_ok=True)


def write_feed(app, exception):
    """The changelog as an Atom feed, ``changelog.xml``, beside the pages."""
    from recipe_index import JINJA

    log = ROOT / "guide" / "changelog.rst"
    if exception is None and app.builder.format == "html" and log.exists():
        entry = re.compile(r"^(\d{4}-\d\d-\d\d)[^\n]*\n-+\n\n(.*?)(?=\n\d{4}-|\Z)", re.S | re.M)
        found = entry.findall(log.read_text(encoding="utf-8"))
        feed = JINJA.get_template("changelog.xml").render(entries=found, site=SITE)
        Path(app.outdir, "changelog.xml").write_text(feed, encoding="utf-8")


def setup(app):
    app.connect("build-finished", write_feed)
    app.connect("build-finished", remove_theme_pictures)
