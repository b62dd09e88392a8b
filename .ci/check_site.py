"""Checks the pages of a built site: ``check_site.py build/docs``.

Every link inside of the site has a target, every anchor exists, no id is twice on a page, and the search index has the
words that a reader would look for. ``site_in_browser.py`` looks at the same pages in a browser.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

#: Words that the search has to find. Sphinx indexes their stems in lower case.
WORDS = ("sliding_window", "heuristic_cfg", "ejkernel_triton_smem_limit")
#: What Sphinx generates without a page of its own.
GENERATED = ("genindex.html", "py-modindex.html", "search.html")


@dataclass
class Page(HTMLParser):
    """The ids and links of one page."""

    file: Path
    ids: Counter[str] = field(default_factory=Counter)
    links: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()
        self.feed(self.file.read_text())

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        for name, value in attributes:
            if name == "id" and value:
                self.ids[value] += 1
            elif name in ("href", "src") and value:
                self.links.append(value)


@cache
def page(file: Path) -> Page:
    return Page(file)


def faults_of_page(root: Path, file: Path) -> Iterator[str]:
    """What is wrong with the links and ids of one page, in words."""
    for identifier, count in page(file).ids.items():
        if count > 1:
            yield f"the id {identifier!r} is there {count} times"
    for link in dict.fromkeys(page(file).links):
        parts = urlsplit(link)
        if parts.scheme or parts.netloc:
            continue
        target = (file.parent / unquote(parts.path)).resolve() if parts.path else file
        if not target.is_relative_to(root):
            yield f"{link} leaves the site"
        elif not target.is_file():
            yield f"{link} has no target"
        elif parts.fragment and target.suffix == ".html" and unquote(parts.fragment) not in page(target).ids:
            yield f"{link} has no such anchor"


def faults_of_search(root: Path) -> Iterator[str]:
    text = (root / "searchindex.js").read_text()
    index = json.loads(text[text.index("(") + 1 : text.rindex(")")])
    for word in WORDS:
        if word not in index["terms"] and word not in index["titleterms"]:
            yield f"the search does not find {word!r}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("root", type=Path)
    root = parser.parse_args().root.resolve()
    pages = [file for file in sorted(root.rglob("*.html")) if file.name not in GENERATED]
    if not pages:
        raise SystemExit(f"{root} has no pages: run `make docs`")
    faults = [f"{file.relative_to(root)}: {fault}" for file in pages for fault in faults_of_page(root, file)]
    faults += faults_of_search(root)
    if faults:
        raise SystemExit("\n".join(faults))
    print(f"{len(pages)} pages, {sum(len(page(file).links) for file in pages)} links: all have targets")


if __name__ == "__main__":
    main()
