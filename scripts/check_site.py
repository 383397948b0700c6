"""Checks the pages of a built site: ``python scripts/check_site.py build/site``.

Each page loads nothing from outside, each link to a page of the site leads to a file, and each link to a place to an id
on that page. What is made of docstrings is checked here only, because it is in no page before the site is built.
"""

from __future__ import annotations

import re
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

LOADED = {
    "script": "src",
    "img": "src",
    "iframe": "src",
    "source": "src",
    "video": "src",
    "link": "href",
    "object": "data",
}
"""What a browser fetches by itself, and the attribute that says from where."""
SAID = {"canonical", "next", "prev", "alternate"}
"""Kinds of ``link`` that nobody fetches."""
FETCHING = {"mermaid", "glightbox", "pyodide"}
"""Classes for which the theme's script fetches a library from elsewhere."""
OUTSIDE = re.compile(r"""url\(\s*["']?(?:https?:)?//[^)]+\)|@import[^;]*//[^;]+""")


class Page(HTMLParser):
    """What one page loads, what it links to, and which places it has."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.loads: list[str] = []
        self.links: list[str] = []
        self.places: set[str] = set()
        self.classes: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Note what a tag loads, links to, or names."""
        found = {name: value or "" for name, value in attrs}
        self.places.add(found.get("id", ""))
        self.classes |= set(found.get("class", "").split())
        if tag == "a" and found.get("href"):
            self.links.append(found["href"])
        if tag in LOADED and found.get(LOADED[tag]) and not set(found.get("rel", "").split()) & SAID:
            self.loads.append(found[LOADED[tag]])


def is_outside(url: str) -> bool:
    """Say whether a URL leads to another host."""
    return bool(urlsplit(url).netloc) or urlsplit(url).scheme in ("http", "https")


def problems(site: Path) -> list[str]:
    """Return one sentence for each thing that is wrong with the site."""
    pages = {path: Page(path.read_text(encoding="utf-8")) for path in sorted(site.rglob("*.html"))}
    if not pages:
        return [f"there is no page in {site}"]
    found = [
        f"{path}: loads {url} from outside" for path, page in pages.items() for url in page.loads if is_outside(url)
    ]
    for path, page in pages.items():
        found += [f"{path}: the class '{name}' has the theme load from outside" for name in page.classes & FETCHING]
    for style in sorted(site.rglob("*.css")):
        found += [f"{style}: loads {url}" for url in OUTSIDE.findall(style.read_text(encoding="utf-8"))]
    for path, page in pages.items():
        if path.name != "404.html":  # its links begin at the root of the server
            found += [f"{path}: {said}" for link in page.links if (said := dead(path, link, pages))]
    return found


def dead(path: Path, link: str, pages: dict[Path, Page]) -> str | None:
    """Say what is wrong with a link on a page of the site, or None."""
    if is_outside(link) or urlsplit(link).scheme:
        return None
    where, place = unquote(urlsplit(link).path), unquote(urlsplit(link).fragment)
    target = (path.parent / where).resolve() if where else path.resolve()
    if target.is_dir():
        target /= "index.html"
    if not target.is_file():
        return f"the link '{link}' leads to no file"
    known = {other.resolve(): page for other, page in pages.items()}.get(target) if place else None
    return f"the link '{link}' leads to no place on its page" if known and place not in known.places else None


def main(site: Path) -> int:
    """Print what is wrong; return the exit code."""
    found = problems(site)
    for problem in found:
        print(problem, file=sys.stderr)
    print(f"{len(list(site.rglob('*.html')))} pages, {len(found)} problems")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
