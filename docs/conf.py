"""Settings of the site, which `make docs` builds."""

import re
from pathlib import Path

import torchcaps

ROOT = Path(__file__).parents[1]
REPOSITORY = "https://github.com/torchcaps/torchcaps"

project = "torchcaps"
author = copyright = "The torchcaps authors"
version = release = torchcaps.__version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
]
html_theme = "furo"
html_title = f"torchcaps {version}"
html_theme_options = {
    "source_repository": REPOSITORY,
    "source_branch": "main",
    "source_directory": "docs/",
}
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True

# Pages are Markdown that GitHub shows too: its anchors of headings, and formulas between dollars.
myst_heading_anchors = 4
myst_enable_extensions = ["dollarmath"]

# Docstrings: single backticks are code, and links where a public name has them.
default_role = "py:obj"
napoleon_custom_sections = [("Shape", "notes_style")]
napoleon_use_ivar = True
autodoc_default_options = {"members": True, "member-order": "bysource", "show-inheritance": True}
autodoc_preserve_defaults = True
autodoc_typehints_format = "short"
python_maximum_signature_line_length = 88
python_use_unqualified_type_names = True


def resolve_links_out_of_the_folder(app, docname, source):
    """Let links to files beside `docs` go to their page here, or else to the repository."""

    def target(match: re.Match) -> str:
        path, anchor = match[1], match[2]
        if path in ("CHANGELOG.md", "CONTRIBUTING.md"):
            return f"](project/{path.lower()}{anchor})"
        kind = "tree" if (ROOT / path).is_dir() else "blob"
        return f"]({REPOSITORY}/{kind}/main/{path}{anchor})"

    source[0] = re.sub(r"\]\(\.\./([^)#\s]+)(#[^)\s]*)?\)", lambda m: target(m), source[0])


def shorten_annotations(app, what, name, obj, options, signature, returns):
    """Show `int` for a number with a range: the check of the argument says the range."""

    def plain(text):
        return text and re.sub(r"(?:typing\.)?~?Annotated\[([\w.~]+), [^\[\]]*\]", r"\1", text)

    return plain(signature), plain(returns)


def skip_fields(app, what, name, obj, skip, options):
    """Leave out the fields of named tuples, which have no text of their own."""
    return True if type(obj).__name__ == "_tuplegetter" else None


def setup(app):
    app.connect("source-read", resolve_links_out_of_the_folder)
    app.connect("autodoc-process-signature", shorten_annotations)
    app.connect("autodoc-skip-member", skip_fields)
