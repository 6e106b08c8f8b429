"""Formulas as MathML, converted by docutils when the page is built.

Sphinx's own renderer loads MathJax from a content network; MathML needs no script, no font and
no request, and current browsers draw it.
"""

import re

from docutils import nodes
from docutils.utils.math.latex2mathml import tex2mathml
from sphinx.application import Sphinx
from sphinx.util.math import get_node_equation_number


def mathml(tex: str, *, inline: bool) -> str:
    """MathML for a LaTeX formula.

    Raises:
        SyntaxError: docutils does not know a command in ``tex``.
    """
    markup = tex2mathml(tex, inline=inline)
    # A browser drops the spaces at the ends of <mtext>; LaTeX sets them.
    return re.sub(
        r"<mtext>(.*?)</mtext>",
        lambda match: match[0].replace(" ", "\N{NO-BREAK SPACE}"),
        markup,
    )


def visit_inline(translator, node: nodes.math) -> None:
    translator.body.append(mathml(node.astext(), inline=True))
    raise nodes.SkipNode


def visit_block(translator, node: nodes.math_block) -> None:
    translator.body.append(translator.starttag(node, "div", CLASS="math"))
    if node["number"]:
        number = get_node_equation_number(translator, node)
        translator.body.append(f'<span class="eqno">({number})</span>')
    translator.body.append(mathml(node.astext(), inline=False) + "</div>\n")
    raise nodes.SkipNode


def setup(app: Sphinx) -> dict:
    app.add_html_math_renderer("mathml", (visit_inline, None), (visit_block, None))
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
