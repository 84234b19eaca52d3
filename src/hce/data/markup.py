"""Texts in files that are more than text: HTML pages and PDF files, each by a library that is an extra."""

from __future__ import annotations

import codecs
import importlib.util
import logging
import re
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

from hce.errors import InputError, one_line

HTML_SUFFIXES = (".html", ".htm", ".xhtml")
LIBRARIES = {**dict.fromkeys(HTML_SUFFIXES, "selectolax"), ".pdf": "pypdf"}
INSTALL = {  # in messages to users
    **dict.fromkeys(HTML_SUFFIXES, "pip install 'hierarchical-corpus-encoder[html]'"),
    ".pdf": "pip install 'hierarchical-corpus-encoder[pdf]'",
}
LARGEST = 200_000_000  # bytes of a file, which is read at once
DEEPEST = 10_000  # elements within each other; the parser's time grows with their square

UNSEEN = "script, style, noscript, template, svg, head, [hidden], .headerlink"  # not shown as text by a browser
# Navigation and controls are the same on each page of a site. A header or footer is part of it unless it belongs to an
# article or section, as for a screen reader.
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


class Page(NamedTuple):
    """A title, which may be empty, and a text."""

    title: str
    text: str


def is_readable(suffix: str) -> bool:
    """Return whether the library for such files is installed."""
    return importlib.util.find_spec(LIBRARIES[suffix]) is not None


def read_page(path: Path, encoding: str) -> Page:
    """Read the title and the text of a PDF file, or of an HTML page, in this encoding unless it names its own.

    Raises:
        InputError: the file cannot be read, or has no text.
    """
    try:
        if path.stat().st_size > LARGEST:
            raise InputError(f"{path}: is longer than {LARGEST // 1_000_000} MB; no document is that long")
        page = _pdf(path) if path.suffix.lower() == ".pdf" else _html(path, encoding)
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror}); check the path and its permissions") from error
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: is not {error.encoding}; give --encoding, or save it as UTF-8") from error
    if not page.text:
        raise InputError(f"{path}: has no text; a scan needs to be recognised (OCR) first")
    return page


def _html(path: Path, encoding: str) -> Page:
    """Return the title and the text of a page in a file."""
    data = path.read_bytes()
    if _depth(data) > DEEPEST:
        raise InputError(f"{path}: more than {DEEPEST:,} elements lie within each other; no page is that deep")
    try:
        return parse_html(data, encoding)
    except (UnicodeDecodeError, MemoryError, ImportError):
        raise
    except Exception as error:  # of the library's own, such as for want of memory
        raise InputError(f"{path}: not a readable page ({one_line(error)}); save it again") from error


def _depth(data: bytes) -> int:
    """Return about how deep elements are nested; counting stops beyond `DEEPEST`."""
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
    r"""Return the title of a page and its text without navigation, a block a line.

    >>> parse_html(b"<title>Shoes</title><nav>Home</nav><script>x()</script><p>Red <b>shoes</b>.</p><p>Blue ones.</p>")
    Page(title='Shoes', text='Red shoes.\nBlue ones.')
    """
    from selectolax.lexbor import LexborHTMLParser

    source = data.decode(_charset(data, encoding))
    tree = LexborHTMLParser(source)
    title = tree.css_first("title") or tree.css_first("h1")
    name = " ".join(title.text().split()) if title is not None else ""
    text = _shown_text(tree, f"{UNSEEN}, {NAVIGATION}")
    return Page(name, text or _shown_text(LexborHTMLParser(source), UNSEEN))  # the latter of a page of links alone


def _shown_text(tree: Any, dropped: str) -> str:
    """Return the text of a page, a block a line, after dropping some elements from the tree."""
    for node in tree.css(f":is({dropped}):not(:is({dropped}) *)"):  # the outermost: those inside go with them
        node.decompose()
    for node in tree.css(BLOCKS):
        node.insert_before("\n")
        node.insert_after("\n")
    shown = tree.body.text() if tree.body is not None else ""
    lines = (" ".join(line.split()) for line in shown.splitlines())
    return "\n".join(filter(None, lines))


def _charset(data: bytes, encoding: str) -> str:
    """Return a page's encoding: by its first bytes, by its head, or the given one."""
    for mark, name in MARKS:
        if data.startswith(mark):
            return name
    told = CHARSET.search(data[:4096])
    try:
        return codecs.lookup(told[1].decode("ascii")).name if told else encoding
    except (LookupError, ValueError):  # a name that nobody knows
        return encoding


def _pdf(path: Path) -> Page:
    """Return the title in a PDF file's metadata, and the texts of its pages."""
    import pypdf

    logging.getLogger("pypdf").setLevel(logging.ERROR)  # it warns of every odd object in somebody else's file
    try:
        reader = pypdf.PdfReader(path)
        if reader.is_encrypted and not reader.decrypt(""):
            raise InputError(f"{path}: is locked by a password; save it without one")
        pages = [page.extract_text().strip() for page in reader.pages]
        title = (reader.metadata.title if reader.metadata else None) or ""
    except (InputError, OSError, MemoryError):
        raise
    except Exception as error:  # a damaged file raises whatever its damage leads to
        raise InputError(f"{path}: not a readable PDF file ({one_line(error)}); save it again") from error
    return Page(" ".join(str(title).split()), "\n\n".join(filter(None, pages)))
