"""Records from folders of plain text, Markdown, HTML and PDF files.

HTML and PDF need optional libraries.
"""

from __future__ import annotations

import codecs
import importlib.util
import logging
import os
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from hce.data.records import USUAL, Bad, Reading, Record, format_suffix, read_lines, refuse, refuse_endless, unreadable
from hce.errors import InputError, one_line

logger = logging.getLogger(__name__)

TEXT_SUFFIXES = (".txt", ".md")
HTML_SUFFIXES = (".html", ".htm", ".xhtml")
LIBRARIES = {**dict.fromkeys(HTML_SUFFIXES, "selectolax"), ".pdf": "pypdf"}
INSTALL = {
    "selectolax": "pip install 'hierarchical-corpus-encoder[html]'",
    "pypdf": "pip install 'hierarchical-corpus-encoder[pdf]'",
}
LARGEST = 200_000_000  # bytes of an HTML or PDF file
DEEPEST = 10_000  # levels of nested elements; the parser's time grows with their square

HEADING = re.compile(r" {0,3}#{1,6}[ \t]+(?P<title>.*?)(?:[ \t]+#+)?[ \t]*")
UNDERLINE = re.compile(r" {0,3}(?:=+|-{2,})[ \t]*")
FENCE = re.compile(r" {0,3}(?:```|~~~)")

UNSEEN = "script, style, noscript, template, svg, head, [hidden], .headerlink"  # browsers do not show these as text
# Navigation and controls repeat on each page of a site. As in screen readers, a header or footer is navigation unless
# it lies inside an article, aside, main or section element.
NAVIGATION = (
    "nav, button, [role=navigation], [role=search], [role=banner], [role=contentinfo], "
    ":is(header, footer):not(:is(article, aside, main, section) *)"
)
BLOCKS = (
    "address, article, aside, blockquote, br, dd, div, dl, dt, fieldset, figcaption, figure, footer, form, h1, h2, h3, "
    "h4, h5, h6, header, hr, li, main, nav, ol, option, p, pre, section, table, td, th, tr, ul"
)
CHARSET = re.compile(rb"<meta[^>]{0,200}?charset\s*=\s*[\"']?\s*([\w.:-]{1,40})", re.IGNORECASE)
TAG = re.compile(rb"<(/?)([a-zA-Z][a-zA-Z0-9]*)")
UNCLOSED = frozenset(  # elements that a browser closes on its own
    b"area base br col colgroup dd dt embed hr img input li link meta option p param source tbody td tfoot th thead tr "
    b"track wbr".split()
)
MARKS = ((codecs.BOM_UTF8, "utf-8-sig"), (codecs.BOM_UTF16_LE, "utf-16"), (codecs.BOM_UTF16_BE, "utf-16"))


def text_suffix(path: Path) -> str | None:
    """Return the suffix of a text, HTML or PDF file; None for other files."""
    suffix = path.suffix.lower() if path.suffix.lower() in LIBRARIES else format_suffix(path)
    return suffix if suffix in (*TEXT_SUFFIXES, *LIBRARIES) else None


def is_readable(suffix: str) -> bool:
    """Return whether the library for files of this suffix is installed."""
    return importlib.util.find_spec(LIBRARIES[suffix]) is not None


def read_text_folder(folder: str | Path, reading: Reading = USUAL, bad: Bad = refuse) -> Iterator[Record]:
    """Stream texts, HTML pages and PDF files of a folder, in sorted order.

    Hidden files and folders, links that lead out of the folder, and files whose library is not installed are skipped
    and reported. The id is the path below the folder, with forward slashes. A Markdown file's title is its first
    heading.
    """
    folder, within = Path(folder), os.path.realpath(folder)
    left_out: dict[str, list[str]] = {}
    for directory, subfolders, names in os.walk(folder, onerror=_refuse_folder):
        for name in subfolders:
            if name.startswith("."):
                left_out.setdefault("hidden folder", []).append(name)
        subfolders[:] = sorted(name for name in subfolders if not name.startswith("."))
        for path in (Path(directory) / name for name in sorted(names)):
            suffix = text_suffix(path)
            if suffix is None:
                continue
            if reason := _reason_to_skip(path, suffix, within):
                left_out.setdefault(reason, []).append(str(path) if reason == "link" else path.name)
                continue
            try:
                yield _text_record(path, path.relative_to(folder).as_posix(), reading)
            except InputError as error:
                bad(error if reading.skip_bad else InputError(f"{error}; --skip-bad leaves such files out"))
    _report(folder, left_out)


def _reason_to_skip(path: Path, suffix: str, within: str) -> str | None:
    """Return why a file is left out of a folder, or None."""
    if path.name.startswith("."):
        return "hidden text file"
    if path.is_symlink() and not Path(os.path.realpath(path)).is_relative_to(within):
        return "link"
    return suffix if suffix in LIBRARIES and not is_readable(suffix) else None


def _report(folder: Path, left_out: dict[str, list[str]]) -> None:
    """Log how many files were left out of a folder, by kind."""
    for suffix in sorted(LIBRARIES.keys() & left_out):
        count, install = len(left_out[suffix]), INSTALL[LIBRARIES[suffix]]
        logger.warning("%s: left out %d %s files; %s reads them", folder, count, suffix, install)
    if links := left_out.get("link"):
        logger.warning("left out %d links that lead out of %s: %s …", len(links), folder, links[0])
    hidden = [
        f"{len(names):,} {kind}{'s' * (len(names) > 1)} ({min(names)}{' …' * (len(names) > 1)})"
        for kind in ("hidden folder", "hidden text file")
        if (names := left_out.get(kind))
    ]
    if hidden:
        logger.info("%s: left out %s", folder, " and ".join(hidden))


def _refuse_folder(error: OSError) -> None:
    raise unreadable(error.filename, error) from error


def _text_record(path: Path, doc_id: str, reading: Reading) -> Record:
    if path.suffix.lower() in LIBRARIES:
        return Record(str(path), {"id": doc_id, **read_page(path, reading.encoding)._asdict()})
    lines, size = [], 0
    for line in read_lines(path, reading):
        size += line.size
        refuse_endless(size, str(path))
        lines.append(line.text)
    title, text = "", "\n".join(lines)
    if format_suffix(path) == ".md":
        title, text = split_heading(text)
    return Record(str(path), {"id": doc_id, "text": text} | ({"title": title} if title else {}))


def split_heading(text: str) -> tuple[str, str]:
    r"""Return a Markdown text's first heading, and the text without a heading on top.

    >>> split_heading("# Red shoes\n\nAre red.")
    ('Red shoes', 'Are red.')
    >>> split_heading("Shoes are red.\n\nWhy?\n====")
    ('Why?', 'Shoes are red.\n\nWhy?\n====')
    """
    lines, start, fenced = text.split("\n"), 0, False
    if lines[0].rstrip() == "---":  # front matter, up to the next such line
        start = next((place + 1 for place, line in enumerate(lines) if place and line.rstrip() == "---"), 0)
    for place in range(start, len(lines)):
        line, following = lines[place], lines[place + 1] if place + 1 < len(lines) else ""
        fenced ^= bool(FENCE.match(line))
        marked, underlined = HEADING.fullmatch(line), bool(line.strip() and UNDERLINE.fullmatch(following))
        if fenced or not (marked or underlined):
            continue
        title = (marked["title"] if marked else line).strip()
        if title and any(map(str.strip, lines[start:place])):
            return title, text
        if title:
            return title, "\n".join(lines[:start] + lines[place + 1 + (not marked) :]).strip("\n")
    return "", text


class Page(NamedTuple):
    """The text of a page or PDF file, and its title, which may be empty."""

    title: str
    text: str


def read_page(path: Path, encoding: str) -> Page:
    """Read the title and the text of a PDF file or an HTML page."""
    kind = "PDF file" if path.suffix.lower() == ".pdf" else "page"
    try:
        if path.stat().st_size > LARGEST:
            raise InputError(f"{path}: is longer than {LARGEST // 1_000_000} MB; no document is that long")
        page = _pdf(path) if kind == "PDF file" else _html(path, encoding)
    except (InputError, MemoryError, ImportError):
        raise
    except OSError as error:
        raise unreadable(path, error) from error
    except Exception as error:  # a damaged file can make a library raise anything
        raise InputError(f"{path}: not a readable {kind} ({one_line(error)}); save it again") from error
    if not page.text:
        raise InputError(f"{path}: has no text; if it is a scan, run text recognition (OCR) first")
    return page


def _html(path: Path, encoding: str) -> Page:
    data = path.read_bytes()
    if _depth(data) > DEEPEST:
        raise InputError(f"{path}: elements are nested more than {DEEPEST:,} deep; no real page is")
    try:
        return parse_html(data, encoding)
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: is not {error.encoding}; give --encoding, or save it as UTF-8") from error


def _depth(data: bytes) -> int:
    """Estimate how deep elements are nested; stop counting beyond `DEEPEST`."""
    is_open, depth, deepest = Counter[bytes](), 0, 0
    for tag in TAG.finditer(data) if data.count(b"<") > DEEPEST else ():
        end, name = tag[1], tag[2].lower()
        if name in UNCLOSED or (end and not is_open[name]):
            continue
        step = -1 if end else 1
        is_open[name] += step
        depth += step
        deepest = max(deepest, depth)
        if deepest > DEEPEST:
            break
    return deepest


def parse_html(data: bytes, encoding: str = "utf-8") -> Page:
    r"""Return a page's title, and its text without navigation, one block per line.

    >>> parse_html(b"<title>Shoes</title><nav>Home</nav><script>x()</script><p>Red <b>shoes</b>.</p><p>Blue ones.</p>")
    Page(title='Shoes', text='Red shoes.\nBlue ones.')
    """
    from selectolax.lexbor import LexborHTMLParser

    source = data.decode(_charset(data, encoding))
    tree = LexborHTMLParser(source)
    title = tree.css_first("title") or tree.css_first("h1")
    name = " ".join(title.text().split()) if title is not None else ""
    text = _shown_text(tree, f"{UNSEEN}, {NAVIGATION}")
    return Page(name, text or _shown_text(LexborHTMLParser(source), UNSEEN))  # a page of links keeps its navigation


def _shown_text(tree: Any, dropped: str) -> str:
    """Return a page's text without the `dropped` elements, one block per line."""
    for node in tree.css(f":is({dropped}):not(:is({dropped}) *)"):  # the outermost ones; elements inside go with them
        node.decompose()
    for node in tree.css(BLOCKS):
        node.insert_before("\n")
        node.insert_after("\n")
    shown = tree.body.text() if tree.body is not None else ""
    lines = (" ".join(line.split()) for line in shown.splitlines())
    return "\n".join(filter(None, lines))


def _charset(data: bytes, encoding: str) -> str:
    """Return the encoding that a page's first bytes or head name, or else `encoding`."""
    for mark, name in MARKS:
        if data.startswith(mark):
            return name
    named = CHARSET.search(data[:4096])
    try:
        return codecs.lookup(named[1].decode("ascii")).name if named else encoding
    except (LookupError, ValueError):  # an unknown encoding
        return encoding


def _pdf(path: Path) -> Page:
    """Return the title in a PDF file's metadata, and the texts of its pages."""
    import pypdf

    logging.getLogger("pypdf").setLevel(logging.ERROR)  # pypdf warns about every malformed object
    reader = pypdf.PdfReader(path)
    if reader.is_encrypted and not reader.decrypt(""):
        raise InputError(f"{path}: is locked by a password; save it without one")
    pages = [page.extract_text().strip() for page in reader.pages]
    title = (reader.metadata.title if reader.metadata else None) or ""
    return Page(" ".join(str(title).split()), "\n\n".join(filter(None, pages)))
