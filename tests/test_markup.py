"""HTML pages and PDF files in a folder: their texts, their titles, and what cannot be read said in one line."""

from __future__ import annotations

import contextlib
import logging

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hce.data import text_files
from hce.data.corpus import Corpus
from hce.data.records import Reading
from hce.errors import InputError

pytest.importorskip("selectolax", reason="HTML pages want the extra html")
pytest.importorskip("pypdf", reason="PDF files want the extra pdf")


def pdf(text: str, title: str = "") -> bytes:
    """A PDF file of one page with one line, as plain as they come."""
    shown = f"BT /F1 12 Tf 72 720 Td ({text}) Tj ET".encode("latin-1")
    objects = [
        b"<< /Type /Catalog /Pages 2 0 R >>",
        b"<< /Type /Pages /Kids [3 0 R] /Count 1 >>",
        b"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 612 792] /Contents 4 0 R "
        b"/Resources << /Font << /F1 5 0 R >> >> >>",
        b"<< /Length %d >>\nstream\n%s\nendstream" % (len(shown), shown),
        b"<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica >>",
        f"<< /Title ({title}) >>".encode("latin-1"),
    ]
    body, offsets = b"%PDF-1.4\n", []
    for number, each in enumerate(objects, start=1):
        offsets.append(len(body))
        body += b"%d 0 obj\n%s\nendobj\n" % (number, each)
    table = b"".join(b"%010d 00000 n \n" % offset for offset in offsets)
    trailer = b"trailer\n<< /Size 7 /Root 1 0 R /Info 6 0 R >>\nstartxref\n%d\n%%%%EOF\n" % len(body)
    return body + b"xref\n0 7\n0000000000 65535 f \n" + table + trailer


def test_a_folder_of_all_kinds(tmp_path):
    (tmp_path / "a.txt").write_text("plain")
    (tmp_path / "b.HTML").write_text(
        "<html><head><title> Red \n shoes </title></head><body><p>They are red.</p></body>"
    )
    (tmp_path / "c.pdf").write_bytes(pdf("Blue hats are here", "Hats"))
    (tmp_path / "d.png").write_bytes(b"no text")
    found = {each.id: (each.title, each.text) for each in Corpus.load(tmp_path)}
    assert found == {
        "a.txt": ("", "plain"),
        "b.HTML": ("Red shoes", "They are red."),
        "c.pdf": ("Hats", "Blue hats are here"),
    }


@pytest.mark.parametrize(
    ("page", "title", "text"),
    [
        (b"<p>one<p>two", "", "one\ntwo"),
        (b"<h1>Top</h1>in<b>li</b>ne <i>and</i>, more<br>next", "Top", "Top\ninline and, more\nnext"),
        (b"<body>seen<script>hidden()</script><style>p{}</style><template>x</template><!-- no --></body>", "", "seen"),
        (b"<ul><li>a<li>b</ul><table><tr><td>c<td>d</table>", "", "a\nb\nc\nd"),
        ("<meta charset=latin-1><p>Grüße".encode("latin-1"), "", "Grüße"),
        ("\ufeff<p>Grüße".encode("utf-16-le"), "", "Grüße"),
        (b"<meta charset=klingon><p>plain", "", "plain"),
        (b"&lt;b&gt; &amp; &eacute;", "", "<b> & é"),
    ],
)
def test_what_a_browser_would_show(page, title, text):
    assert text_files.parse_html(page) == (title, text)


@pytest.mark.parametrize(
    ("page", "text"),
    [
        (b"<nav>Home<nav>More</nav></nav><p>red", "red"),
        (b"<div role=navigation><h3>Previous topic</h3><footer>x</footer></div><p>red", "red"),
        (b"<header>Shop</header><main><article><header>By me</header><p>red</article></main><footer>(c)", "By me\nred"),
        (
            b"<h1>Red<a class=headerlink>#</a></h1><p hidden>old</p><div role=search>find</div><button>Copy</button>",
            "Red",
        ),
        (b"<nav><a>one</a> <a>two</a></nav>", "one two"),
    ],
)
def test_navigation_is_no_text_unless_there_is_nothing_else(page, text):
    assert text_files.parse_html(page).text == text


TAGS = st.sampled_from(
    ["<nav>", "</nav>", "<header>", "<p>", "<article>", "<b>x", "<div role=navigation>", "</div>", "x"]
)


@given(st.lists(TAGS, max_size=30))
def test_nested_navigation_leaves_a_page_that_can_be_read(tags):
    assert "\n\n" not in text_files.parse_html("".join(tags).encode()).text


@given(st.lists(st.text(st.characters(codec="utf-8", categories=["L", "N"]), min_size=1), min_size=1, max_size=5))
def test_paragraphs_come_back(paragraphs):
    page = "".join(f"<p>{text}</p>" for text in paragraphs).encode()
    assert text_files.parse_html(page).text.splitlines() == paragraphs


@given(st.binary(max_size=300))
def test_any_bytes_are_a_page_or_are_not_text(data):
    with contextlib.suppress(UnicodeDecodeError):
        assert isinstance(text_files.parse_html(data).text, str)


@pytest.mark.parametrize(
    ("name", "data", "said"),
    [
        ("x.html", b"\xff\xfe\xfa\xff\xff", "is not utf-16"),
        ("x.html", b"<p>Gr\xfc\xdfe", "is not utf-8; give --encoding"),
        ("x.html", b"<script>only()</script>", "has no text"),
        ("x.pdf", b"no PDF at all", "not a readable PDF file"),
        ("x.pdf", b"", "not a readable PDF file"),
        ("x.pdf", pdf("x")[:-120], None),  # its table is cut off: read all the same, or refused in one line
        ("x.pdf", pdf(""), "has no text; if it is a scan"),
    ],
)
def test_what_cannot_be_read_is_one_line(tmp_path, name, data, said):
    (tmp_path / name).write_bytes(data)
    try:
        text_files.read_page(tmp_path / name, "utf-8")
    except InputError as error:
        assert "\n" not in str(error)
        assert str(tmp_path / name) in str(error)
        assert said is None or said in str(error)
    else:
        assert said is None


def test_a_bad_page_is_left_out_if_asked(tmp_path, caplog):
    (tmp_path / "a.txt").write_text("plain")
    (tmp_path / "b.pdf").write_bytes(b"no PDF at all")
    with pytest.raises(InputError, match="--skip-bad"):
        Corpus.load(tmp_path)
    assert Corpus.load(tmp_path, reading=Reading(skip_bad=True)).ids == ["a.txt"]


def test_without_the_library_they_are_counted(tmp_path, monkeypatch, caplog):
    (tmp_path / "a.txt").write_text("plain")
    (tmp_path / "b.pdf").write_bytes(pdf("x"))
    monkeypatch.setattr("hce.data.text_files.is_readable", lambda suffix: False)
    with caplog.at_level(logging.WARNING):
        assert Corpus.load(tmp_path).ids == ["a.txt"]
    assert "left out 1 .pdf files; pip install 'hierarchical-corpus-encoder[pdf]' reads them" in caplog.text


@pytest.mark.parametrize(
    ("content", "is_deep"),
    [
        (b"<div>" * 10_001, True),
        (b"<DIV class='a'><b></x>" * 5_001, True),
        (b"<div>" * 9_999 + b"</div>" * 9_999 + b"<div>" * 9_999, False),
        (b"<p>a<br><li>" * 20_000, False),  # which a browser closes
        (b"<b>a</b>" * 20_000, False),
    ],
)
def test_a_page_that_is_too_deep_is_refused_at_once(tmp_path, monkeypatch, content, is_deep):
    """The parser's time grows with the square of the depth: a page of 8 MB would take hours."""
    monkeypatch.setattr(text_files, "parse_html", lambda data, encoding: text_files.Page("", "read"))
    (tmp_path / "a.html").write_bytes(content)
    if is_deep:
        with pytest.raises(InputError, match=r"a\.html: elements are nested more than 10,000 deep"):
            text_files.read_page(tmp_path / "a.html", "utf-8")
    else:
        assert text_files.read_page(tmp_path / "a.html", "utf-8").text == "read"


def test_what_the_parser_says_is_one_line(tmp_path, monkeypatch):
    """It raises an error of its own where it gets no memory."""

    def parse(data, encoding):
        raise RuntimeError("Can't parse HTML.")

    monkeypatch.setattr(text_files, "parse_html", parse)
    (tmp_path / "a.html").write_text("<p>")
    with pytest.raises(InputError, match=r"a\.html: not a readable page \(Can't parse HTML\.\); save it again$"):
        text_files.read_page(tmp_path / "a.html", "utf-8")
