"""How Sphinx makes the site of the pages in this folder.

``make docs`` builds it into build/docs. The source folder is the repository, because pages link to CONTRIBUTING.md and
to the plugins' own pages: so each link is right here, in a browser of the repository and on the site.
"""

from __future__ import annotations

import re
import shutil
import tomllib
from pathlib import Path
from typing import Any

from sphinx.application import Sphinx

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

#: The sections of the site, with their pages in order. Each page is a file of this folder, or of the repository if the
#: name begins with "/". The list is here and not in index.md, which has to be readable in a browser of the repository.
SECTIONS = {
    "Start": ("index", "first-hour", "command", "coming-from-elsewhere", "not-here", "errors", "environment-variables"),
    "Tutorials": (
        "tutorials/training-loop",
        "tutorials/packed-training",
        "tutorials/layers-in-a-scan",
        "tutorials/tuning-a-model",
        "writing-a-plugin",
        "writing-an-operation",
        "tutorials/publishing-records",
        "tutorials/several-devices",
        "tutorials/decoding-a-model",
    ),
    "Guides": (
        "tuning",
        "stores",
        "several-devices",
        "several-processes",
        "decoding",
        "serving",
        "mixture-of-experts",
        "triton",
        "pallas-tpu",
        "kernel-classes",
        "from-ejkernel",
    ),
    "Operations": tuple(f"operations/{page.stem}" for page in sorted(ROOT.glob("docs/operations/*.md"))),
    "Reference": (
        "hooks",
        *(f"reference/{page.stem}" for page in sorted(ROOT.glob("docs/reference/ejkernel_*.md"))),
        "reference/extend",
        "reference/configurations",
        "reference/refusals",
        "glossary",
    ),
    "Performance and design": ("performance", "measurements/index", "design"),
    "The project": ("/README", "/CHANGELOG", "distributions"),
    "For contributors": ("/CONTRIBUTING", "releasing"),
}
#: The pages of each card and day, and the log.
MEASUREMENTS = tuple(
    f"/docs/measurements/{page.stem}" for page in sorted(ROOT.glob("docs/measurements/*.md")) if page.stem != "index"
)
#: Each plugin's own page.
DISTRIBUTIONS = tuple(f"/{page.relative_to(ROOT).with_suffix('')}" for page in sorted(ROOT.glob("plugins/*/README.md")))

project = "ejkernel-core"
author = "the authors of ejkernel-core"
copyright = "the authors of ejkernel-core, Apache License 2.0"
release = version = PROJECT["version"]

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]
napoleon_numpy_docstring = False
root_doc = "docs/index"
include_patterns = ["docs/**", "README.md", "CONTRIBUTING.md", "CHANGELOG.md", "plugins/*/README.md"]
exclude_patterns = [".*", "build", "**/tests", "**/__pycache__", "ejkernel_core", "plugins/*/ejkernel_*"]

myst_heading_anchors = 4
myst_enable_extensions = ["attrs_inline"]
suppress_warnings = ["myst.header"]  # a page about one thing may begin its sections at any level

#: Every name in a signature or a docstring has a target, but for these.
nitpicky = True
nitpick_ignore_regex = [
    # Names of others: their inventories are on the network, and the site is made without it.
    (
        r"py:.*",
        r"(jax|numpy|collections|contextlib|inspect|os|pathlib|pytest|types)\..*|ArrayLike|PluginManager(\..*)?",
    ),
    # Our type variables, and aliases that a signature shows by name.
    (r"py:class", r"ejkernel_classes\._kernel\.(Cfg|Out)|ejkernel_tuning\._labels\.Function"),
    (
        r"py:class",
        r"Arguments|Fold|Format|Reduction|Restore|ejkernel_core\._scopes\.(HasItems|Overlay)|ejkernel_cache.*\.Document",
    ),
    # The pages of these operations have the fields of what they return.
    (r"py:class", r"ejkernel_ops\.(moe_route\.Routes|moe_order\.Order)"),
    # Our classes that users get, and never make or import: their pages would be longer than their use.
    (r"py:class", r"Division|Unfinished"),
    (r"py:class", r"ejkernel_core\._\w+\.(Layout|LoadedKernel|PartialSums|Plugins|Shards|Shortfall)"),
]

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_default_options = {"members": True, "undoc-members": True}
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 88
add_module_names = False
toc_object_entries = False
copybutton_exclude = ".linenos, .gp, .go"

html_theme = "furo"
html_title = f"{project} {version}"
html_copy_source = False
html_show_sphinx = False
html_theme_options = {"navigation_with_keys": True}
html_static_path = ["static"]
html_css_files = ["wide.css"]
html_favicon = "favicon.svg"
html_extra_path = ["site"]  # the first page of the folder, which leads to docs/index.html


def is_page(name: str) -> bool:
    page = name[1:] if name.startswith("/") else f"docs/{name}"
    return any((ROOT / f"{page}{suffix}").exists() for suffix in (".md", ".rst"))


def toctree(caption: str, pages: tuple[str, ...]) -> str:
    entries = "\n".join(page for page in pages if is_page(page) and page != "index")
    return f"```{{toctree}}\n:hidden:\n:caption: {caption}\n\n{entries}\n```\n"


def add_sections(app: Sphinx, page: str, source: list[str]) -> None:
    """Add the sections to the first page, and the pages of a list to the page that has the list."""
    if page == root_doc:
        source[0] += "\n" + "\n".join(toctree(caption, pages) for caption, pages in SECTIONS.items())
    if page == "docs/distributions":
        source[0] += "\n" + toctree("Distributions", DISTRIBUTIONS)
    if page == "docs/measurements/index":
        source[0] += "\n" + toctree("Measurements", MEASUREMENTS)


def with_plain_defaults(
    app: Sphinx, what: str, name: str, value: Any, options: Any, signature: str | None, returns: str | None
) -> tuple[str | None, str | None]:
    """Attrs shows NOTHING for a default that it computes."""
    return (signature and re.sub(r"\bNOTHING\b", "...", signature)), returns


class AttributeDocstrings:
    """Napoleon takes what an attribute's docstring has before a colon for its type: this keeps the docstrings as they
    are.
    """

    def __init__(self) -> None:
        self.lines: list[str] = []

    def keep(self, app: Sphinx, what: str, name: str, value: Any, options: Any, lines: list[str]) -> None:
        self.lines = list(lines)

    def restore(self, app: Sphinx, what: str, name: str, value: Any, options: Any, lines: list[str]) -> None:
        if what in ("attribute", "data", "property"):
            lines[:] = self.lines


def copy_pictures(app: Sphinx, fault: Exception | None) -> None:
    """Sphinx copies the pictures of Markdown. The README has some in HTML, which has others for dark screens."""
    if fault is None:
        shutil.copytree(ROOT / "docs/pictures", Path(app.outdir, "docs/pictures"), dirs_exist_ok=True)


def setup(app: Sphinx) -> None:
    app.connect("build-finished", copy_pictures)
    app.connect("source-read", add_sections)
    app.connect("autodoc-process-signature", with_plain_defaults)
    docstrings = AttributeDocstrings()
    app.connect("autodoc-process-docstring", docstrings.keep, priority=100)  # before Napoleon's
    app.connect("autodoc-process-docstring", docstrings.restore, priority=900)
