"""Settings of the site, which `make docs` builds."""

import importlib
import inspect
import pydoc
import re
from pathlib import Path

from docutils import nodes
from latex2mathml.converter import convert
from sphinx.util.nodes import make_refnode

import torchcaps

DOCS = Path(__file__).resolve().parent
ROOT = DOCS.parent
REPOSITORY = "https://github.com/torchcaps/torchcaps"
SITE = "https://torchcaps.github.io/torchcaps"

project = "torchcaps"
author = copyright = "The torchcaps authors"
version = release = torchcaps.__version__

extensions = [
    "myst_nb",  # which includes myst_parser
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
]
html_theme = "furo"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_search_scorer = str(DOCS / "scorer.js")
html_title = f"torchcaps {version}"
html_theme_options = {
    "source_repository": REPOSITORY,
    "source_branch": "main",
    "source_directory": "docs/",
}
html_math_renderer = "mathml"
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True

# Notebooks have their outputs, which notebooks.py makes.
nb_execution_mode = "off"

# Pages are Markdown that GitHub shows too: its anchors of headings, and formulas between dollars.
myst_heading_anchors = 4
myst_enable_extensions = ["dollarmath"]

smartquotes_action = "D"  # dashes alone: text such as init="paper" is to be copied

# Docstrings: single backticks are code, and links where a public name has them.
default_role = "py:obj"
nitpicky = True  # a name of torchcaps that a docstring refers to must exist
nitpick_ignore_regex = [(f"py:{kind}", r"(?s)(?!torchcaps\.).*") for kind in ("attr", "class", "exc", "obj")]
napoleon_custom_sections = [("Shape", "notes_style"), ("Fields", "params_style")]
napoleon_use_ivar = True
autodoc_default_options = {"members": True, "member-order": "bysource", "show-inheritance": True}
autodoc_inherit_docstrings = False
autodoc_preserve_defaults = True
autodoc_typehints_format = "short"
python_maximum_signature_line_length = 88
python_use_unqualified_type_names = True


def resolve_links_out_of_the_folder(app, docname, source):
    """Let links to files beside `docs` go to their page here, or else to the repository."""

    folder = (DOCS / docname).parent

    def target(match: re.Match) -> str:
        path, anchor = (folder / match[1]).resolve(), match[2] or ""
        if path.is_relative_to(DOCS):
            return match[0]
        name = path.relative_to(ROOT).as_posix()
        if name in ("CHANGELOG.md", "CONTRIBUTING.md"):
            return f"](/project/{name.lower()}{anchor})"
        return f"]({REPOSITORY}/{'tree' if path.is_dir() else 'blob'}/main/{name}{anchor})"

    source[0] = re.sub(r"\]\((\.\./[^)#\s]+)(#[^)\s]*)?\)", target, source[0])
    if docname.startswith("notebooks/"):  # whose links name the site, because Colab knows no other page
        source[0] = re.sub(rf"\]\({SITE}/([^)#\s]+)\.html(#[^)\s]*)?\)", r"](/\1.md\2)", source[0])


def list_every_name(app, docname, source):
    """Add to the index of the API, for each of its pages, the names with the first sentence of their description."""
    if docname != "api/index":
        return
    for part in re.findall(r"(?m)^   (\w+)$", source[0]):
        page = (DOCS / "api" / f"{part}.rst").read_text(encoding="utf-8")
        title = page.partition("\n")[0]
        source[0] += (
            f"\n\n:doc:`{title} <{part}>`\n{'-' * (len(title + part) + 10)}\n\n.. list-table::\n   :widths: 25 75\n\n"
        )
        module = ""
        for directive, name, text in re.findall(r"(?m)^\.\. ([\w:]+):: (\S+)$(?:\n\n   (\w.*))?", page):
            if directive in ("automodule", "currentmodule"):
                module = name
                continue
            text = text or inspect.getdoc(getattr(importlib.import_module(module), name))
            sentence = re.split(r"(?<=\.)\s+(?=[A-Z])|\n\n", text)[0].replace("\n", " ")
            source[0] += f"   * - :py:obj:`~{module}.{name}`\n     - {sentence}\n"


def shorten_annotations(app, what, name, obj, options, signature, returns):
    """Show `int` for a number with a range: the check of the argument says the range."""

    def plain(text):
        return text and re.sub(r"(?:typing\.)?~?Annotated\[([\w.~]+), [^\[\]]*\]", r"\1", text)

    return plain(signature), plain(returns)


def write_as_restructured_text(app, what, name, obj, options, lines):
    """Mark what Markdown does without a mark, and docstrings too: code that is indented, and tables."""
    text = "\n".join(lines)
    text = re.sub(r"(?m)^((?!\.\.|- )\S.*[^:\n])\n\n(?=    )", r"\1\n\n::\n\n", text)
    text = re.sub(r"(?m)^((?!\.\.|- )\S.*[^:\n]):\n\n(?=    )", r"\1::\n\n", text)

    def table(match: re.Match) -> str:
        rows = [re.findall(r"[^|]+", line) for line in match[0].strip().splitlines()]
        cells = ["\n".join(f"   {'  ' if i else '* '}- {cell.strip()}" for i, cell in enumerate(row)) for row in rows]
        return "\n".join([".. list-table::", "   :header-rows: 1", "", cells[0], *cells[2:], "\n"])

    if what in ("attribute", "property"):
        text = "..\n\n" + text  # or else Napoleon takes what stands before a colon for a type
    lines[:] = re.sub(r"(?m)^\|.*\n\|[-|]+\n(\|.*\n)+", table, text + "\n").splitlines()


def link_to_the_page_that_has_a_name(app, env, node, text):
    """Resolve names without their module, or with another module than the page's; let inner names stand as text."""
    target = node["reftarget"].removesuffix("()")
    ours = target.startswith("torchcaps.")
    if node.get("refdomain") != "py" or not (ours or target[:1].isupper() or node["reftype"] != "obj"):
        return None
    ending = "." + (target.rpartition(".")[2] if ours else target)
    places = [x for name, x in env.domains.python_domain.objects.items() if name.endswith(ending) and not x.aliased]
    if len(places) != 1:
        owner = target.rpartition(".")[0] if node["reftype"] == "attr" else target  # only instances have the attribute
        return text if ours and pydoc.locate(owner) else None
    return make_refnode(app.builder, node["refdoc"], places[0].docname, places[0].node_id, text, target)


def skip_fields(app, what, name, obj, skip, options):
    """Leave out the fields of named tuples, which have no text of their own."""
    return True if type(obj).__name__ == "_tuplegetter" else None


def write_formula(translator, node):
    """Write a formula as MathML, which browsers show without a script from elsewhere."""
    formula, is_block = node.astext(), node.tagname == "math_block"
    if r"\\" in formula and r"\begin" not in formula:
        formula = rf"\begin{{aligned}}{formula}\end{{aligned}}"
    formula = re.sub(r"\\text\{[^}]*\}", lambda text: text[0].replace(r"\_", "_"), formula)
    html, tag = convert(formula, display="block" if is_block else "inline"), "div" if is_block else "span"
    translator.body.append(f'<{tag} class="formula">{html}</{tag}>')
    raise nodes.SkipNode


def hide_private_bases(app, name, obj, options, bases):
    """Name the public classes that a private base is made of."""
    bases[:] = [public for base in bases for public in (base.__bases__ if base.__name__.startswith("_") else [base])]


MOST_OF_NUMBERS = 18  # characters of a cell in a table of numbers; the first two columns may have words


def fit_tables_to_phones(app, pagename, templatename, context, doctree):
    """Make tables fit a phone (`site.css`): one of numbers scrolls to the side, and the rows of another one stand as
    cards, with the name of the column above each cell, and what is left empty below the cell above."""

    def text_of(html: str) -> str:
        return re.sub(r"<[^>]*>", "", html).strip()

    def fitted(table: re.Match) -> str:
        html = table[0]
        names = [text_of(head).replace('"', "&quot;") for head in re.findall(r"(?s)<th[ >].*?</th>", html)]
        rows = [re.findall(r"(?s)<td.*?</td>", row) for row in re.findall(r"(?s)<tr.*?</tr>", html)]
        if not names:  # rows without a header have nothing to name their cells by
            return html
        if len(names) > 3 and all(len(text_of(cell)) <= MOST_OF_NUMBERS for row in rows for cell in row[2:]):
            return html.replace('class="docutils', 'class="numbers docutils', 1)
        last = ""

        def card(row: re.Match) -> str:
            nonlocal last
            cells = re.findall(r"(?s)<td.*?</td>", row[0])
            if cells and not text_of(cells[0]):
                cells[0] = last.replace("<td", '<td class="again"', 1)
            last = cells[0].replace('<td class="again"', "<td", 1) if cells else ""
            named = (x.replace("<td", f'<td data-column="{name}"', 1) for name, x in zip(names, cells, strict=False))
            return f"{row[0].partition('>')[0]}>{''.join(named)}</tr>"

        head, body = html.split("<tbody>", 1) if "<tbody>" in html else ("", html)
        return head + "<tbody>" * bool(head) + re.sub(r"(?s)<tr.*?</tr>", card, body)

    context["body"] = re.sub(r'(?s)<table class="docutils.*?</table>', fitted, context.get("body", ""))


def keep_numbers_with_percent_signs(app, doctree, docname):
    """Let no line of the site begin with the percent sign of a number."""
    if app.builder.format != "html":
        return
    for text in list(doctree.findall(nodes.Text)):
        if not isinstance(text.parent, nodes.FixedTextElement | nodes.literal):
            text.parent.replace(text, nodes.Text(re.sub(r"(?<=\d)\s%", "\N{NO-BREAK SPACE}%", text)))


def setup(app):
    app.add_html_math_renderer("mathml", (write_formula, None), (write_formula, None))
    app.connect("source-read", resolve_links_out_of_the_folder)
    app.connect("source-read", list_every_name)
    app.connect("autodoc-process-signature", shorten_annotations)
    app.connect("autodoc-process-bases", hide_private_bases)
    app.connect("autodoc-process-docstring", write_as_restructured_text, priority=400)  # before Napoleon
    app.connect("autodoc-skip-member", skip_fields)
    app.connect("missing-reference", link_to_the_page_that_has_a_name)
    app.connect("doctree-resolved", keep_numbers_with_percent_signs)
    app.connect("html-page-context", fit_tables_to_phones)
