"""The page in a real browser: what a visitor sees and does, with a mouse, with keys only, and on a phone."""

from __future__ import annotations

import re
import shutil
import threading
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest

import hce
from hce.data.text import Document
from hce.index.index import Index
from hce.pages.report import report
from hce.training.model_folder import ModelFolder
from hce.training.recipe import Recipe
from hce.web.app import Server, create_app, listen, url_of
from hce.web.guard import LOOPBACK, Rules

playwright = pytest.importorskip("playwright.sync_api", reason="needs the package playwright")
CHROMIUM = next((path for path in map(shutil.which, ("chromium", "chromium-browser", "google-chrome")) if path), None)
if CHROMIUM is None:
    pytest.skip("needs chromium", allow_module_level=True)
ARGUMENTS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
HOSTILE = "<script>window.hacked=1</script><img src=x onerror=window.hacked=1>\"'><b>&amp;"
expect = playwright.expect
expect.set_options(timeout=20_000)


@pytest.fixture(scope="module")
def browser():
    with playwright.sync_playwright() as started:
        opened = started.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        yield opened
        opened.close()


@pytest.fixture(scope="module")
def trained(tmp_path_factory, planted_corpus, module_static_encoder) -> Path:
    folder = tmp_path_factory.mktemp("browser")
    module_static_encoder.save(folder / "start")
    recipe = Recipe(epochs=2, batch_size=32)
    hce.train(planted_corpus, encoder=str(folder / "start"), recipe=recipe, output=folder / "model")
    Index.create(folder / "index", planted_corpus, str(folder / "model"), "grow").close()
    return folder / "index"


@contextmanager
def serving(index: Index, rules: Rules | None = None):
    listens, listener = threading.Event(), listen("127.0.0.1", 0)
    url, server = url_of("127.0.0.1", listener), Server(create_app(index, rules), listener, listens.set)
    thread = threading.Thread(target=server.serve_until_stopped)
    thread.start()
    assert listens.wait(20)
    try:
        yield url
    finally:
        server.should_exit = True
        thread.join(20)


@pytest.fixture
def site(trained, tmp_path):
    """A server of a copy of the index, and the index."""
    shutil.copytree(trained, tmp_path / "index")
    with Index.open(tmp_path / "index") as index, serving(index) as url:
        yield SimpleNamespace(index=index, url=url)


@pytest.fixture
def visit(browser):
    """Open pages; afterwards nothing may have gone wrong in them, and nothing may have come from elsewhere."""
    contexts, troubles = [], []

    def open_page(url, *, refused=(), **options):
        context = browser.new_context(**{"viewport": {"width": 1280, "height": 860}, **options})
        page = context.new_page()
        page.set_default_timeout(20_000)
        page.on("pageerror", lambda error: troubles.append(str(error)))
        page.on("dialog", lambda dialog: (troubles.append(dialog.message), dialog.dismiss()))
        origin = "/".join(url.split("/")[:3])
        page.on("request", lambda request: request.url.startswith(f"{origin}/") or troubles.append(request.url))

        def console(message):
            expected = any(f"status of {code}" in message.text for code in refused)
            if message.type in ("error", "warning") and not expected:
                troubles.append(message.text)

        page.on("console", console)
        page.goto(url)
        contexts.append(context)
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert troubles == []


def ids(page, where="#hits"):
    return page.eval_on_selector_all(f"{where} .hit", "rows => rows.map((row) => row.dataset.id)")


def search(page, text):
    page.fill("#q", text)
    expect(page.locator("#before-hits .hit").first).to_be_visible()


def test_search_as_you_type_with_before_and_after(site, visit):
    page = visit(site.url)
    expect(page.locator("#start h2")).to_have_text("Search 240 documents")
    expect(page.locator(".topics button").first).to_be_visible()
    page.locator("#q").press_sequentially("star red", delay=30)
    expect(page.locator("#before-hits .hit").first).to_be_visible()
    answer = httpx.get(f"{site.url}/api/search", params={"q": "star red", "compare": True}).json()
    expect(page.locator("#hits .hit")).to_have_count(10)
    assert ids(page) == [hit["id"] for hit in answer["hits"]]
    assert ids(page, "#before-hits") == [hit["id"] for hit in answer["before"]["hits"]]
    marks = page.locator("#hits .moved").all_inner_texts()
    for mark, hit in zip(marks, answer["hits"], strict=True):
        up = hit["before"] - hit["rank"]
        assert mark == ("new" if hit["before"] > 10 else "=" if not up else f"{'↑' if up > 0 else '↓'}{abs(up)}")
    scores = page.locator("#hits .score").all_inner_texts()
    assert [float(score) for score in scores] == [round(hit["score"], 3) for hit in answer["hits"]]
    marked = set(page.locator("#hits mark").all_inner_texts())
    assert marked == {"star", "red"}
    assert page.url.endswith("#search?q=star+red")
    page.reload()
    expect(page.locator("#hits .hit").first).to_have_attribute("data-id", answer["hits"][0]["id"])
    page.uncheck("#compare")
    expect(page.locator("#before")).to_be_hidden()


def test_an_answer_that_comes_too_late_is_dropped(site, visit):
    page = visit(site.url)
    held = []
    page.route(re.compile(r"/api/search\?q=star&"), lambda route: held.append(route))
    page.fill("#q", "star")
    page.wait_for_timeout(600)
    page.fill("#q", "w77")
    expected = [hit.id for hit in site.index.search("w77")]
    expect(page.locator("#hits .hit").first).to_have_attribute("data-id", expected[0])
    assert len(held) == 1
    page.unroute_all()
    page.wait_for_timeout(300)
    assert ids(page) == expected


def test_conditions_and_nothing_found(site, visit):
    site.index.add([Document("m1", "w0", metadata={"year": 1999}), Document("m2", "w0", metadata={"year": 2010})])
    page = visit(site.url, refused=(400,))
    page.fill("#q", "w0")
    page.fill("#where", "year>=2000; year<2020")
    expect(page.locator("#hits .hit")).to_have_count(1)
    expect(page.locator("#hits .chip")).to_be_hidden()  # folded
    page.locator("#hits summary").click()
    expect(page.locator("#hits .chip")).to_have_text("year 2010")
    expect(page.locator("#document")).to_be_hidden()
    page.fill("#where", "year>=2030")
    expect(page.locator("#start")).to_contain_text("No document matches the conditions")
    page.fill("#where", "nonsense")
    expect(page.locator("#start")).to_contain_text("write field=value")


def test_values_of_metadata_are_counted_and_chosen(site, visit):
    page = visit(site.url)
    search(page, "w0")
    expect(page.locator("#facets")).to_be_hidden()  # no document has metadata
    rows = [{"year": 2000 + n % 2, "meta": {"open": n < 4}, "url": f"u{n}", 'a"b': "c; d"} for n in range(6)]
    site.index.add([Document(f"m{n}", "w0 w0 w0", metadata=row) for n, row in enumerate(rows)])
    page.reload()
    buttons = page.locator("#facets button")
    expect(page.locator("#facets .facet > span")).to_have_text(["year", "meta.open"])  # each url is another one
    expect(buttons).to_have_text(["20003", "20013", "true4", "false2"])
    page.fill("#where", "year>=1999")
    expect(page).to_have_url(re.compile("where=year"))
    buttons.nth(1).focus()
    page.keyboard.press("Enter")
    expect(page.locator("#where")).to_have_value("year=2001")  # a field has one condition
    expect(buttons).to_have_text(["20013", "true2", "false1"])
    expect(buttons.first).to_be_focused()
    expect(buttons.first).to_have_attribute("aria-pressed", "true")
    buttons.nth(2).click()
    expect(page.locator("#where")).to_have_value("year=2001; meta.open=false")
    expect(page.locator("#hits .hit")).to_have_count(1)
    assert ids(page) == ["m5"]
    expect(buttons).to_have_text(["20011", "false1"])
    buttons.first.click()
    expect(page.locator("#where")).to_have_value("meta.open=false")
    expect(page.locator("#hits .hit")).to_have_count(2)


def test_conditions_are_hidden_where_no_document_has_a_field(site, visit):
    page = visit(site.url)
    expect(page.locator("#count")).to_have_text("240 documents")
    expect(page.locator("#where")).to_be_hidden()
    page = visit(f"{site.url}/#search?q=w0&where=year=2001", refused=(400,))
    expect(page.locator("#where")).to_have_value("year=2001")
    expect(page.locator("#where")).to_be_visible()
    site.index.add([Document("m", "w0 w0 w0", metadata={"year": 2001})])
    expect(visit(site.url).locator("#where")).to_be_visible()


def test_numbers_have_ranges_and_other_fields_are_behind_more(site, visit):
    tags = [["red", "new"], ["red"], ["blue"]]
    rows = [{"size": n, "lang": "en", "tag": tags[n % 3], "kind": "ab"[n % 2]} for n in range(12)]
    site.index.add([Document(f"m{n}", "w0 w0 w0", metadata=row) for n, row in enumerate(rows)])
    page = visit(site.url)
    expect(page.locator("#where")).to_have_attribute("placeholder", "tag=red; size>=0")
    search(page, "w0")
    expect(page.locator("#facets > .facet > span")).to_have_text(["tag", "kind", "size"])
    expect(page.locator("#facets details .facet")).to_have_count(0)
    page.locator("#facets summary", has_text="more: lang").click()
    expect(page.locator("#facets details .facet button")).to_have_text(["en12"])
    page.fill("[aria-label='size from']", "9")
    page.keyboard.press("Tab")
    expect(page.locator("#where")).to_have_value("size>=9")
    expect(page.locator("#hits .hit")).to_have_count(3)
    page.fill("[aria-label='size to']", "10")
    page.keyboard.press("Enter")
    expect(page.locator("#where")).to_have_value("size>=9; size<=10")
    expect(page.locator("#hits .hit")).to_have_count(2)
    page.fill("[aria-label='size from']", "")
    page.keyboard.press("Tab")
    expect(page.locator("#where")).to_have_value("size<=10")


def test_metadata_is_folded_without_nulls_and_with_links_that_tell_nothing(site, visit):
    row = {"home": "https://example.org/a", "script": "javascript:alert(1)", "none": None, "tags": ["x", "y"], "no": []}
    site.index.add([Document("same", "w0 w0 w0", title="same", metadata=row)])
    page = visit(site.url)
    search(page, "w0")
    hit = page.locator("#hits .hit[data-id=same]")
    expect(hit.locator("summary")).to_have_text("3 fields")
    assert hit.inner_text().count("same") == 1  # the title is the id
    hit.locator("summary").click()
    expect(hit.locator(".chip")).to_have_text(["home https://example.org/a", "script javascript:alert(1)", "tags x, y"])
    link = hit.locator("a")
    expect(link).to_have_count(1)
    expect(link).to_have_attribute("href", "https://example.org/a")
    expect(link).to_have_attribute("rel", "noopener noreferrer")
    hit.locator("h3").click()
    expect(page.locator("#document td a")).to_have_count(1)
    expect(page.locator("#document tr")).to_have_count(3)


def test_that_nothing_is_a_good_match_stands_above_the_hits(site, visit):
    answers = {"good": True}

    def judge(route):
        answer = route.fetch()
        route.fulfill(response=answer, json=answer.json() | {"good_match": answers["good"]})

    page = visit(site.url)
    page.route("**/api/search?*", judge)
    search(page, "star")
    expect(page.locator("#judged")).to_be_hidden()
    answers["good"] = False
    search(page, "star red")
    expect(page.locator("#judged")).to_be_visible()
    expect(page.locator("#judged")).to_have_text("Nothing here is a good match. These are the closest.")
    assert page.locator("#judged").bounding_box()["y"] < page.locator("#hits").bounding_box()["y"]


def test_the_way_follows_query_and_conditions(site, visit):
    site.index.add([Document("m1", "star red", metadata={"year": 1999})])
    page = visit(site.url, refused=(400,))
    search(page, "star red")
    expect(page.locator("#way .step").first).to_be_visible()
    page.fill("#where", "year>=2030")
    expect(page.locator("#summary")).to_contain_text("0 hits")
    expect(page.locator("#way")).to_be_hidden()  # it would lead to what the conditions leave out
    assert "same order" not in page.inner_text("#summary")
    page.fill("#where", "nonsense")
    expect(page.locator("#start .problem")).to_be_visible()
    page.fill("#where", "year<2000")
    expect(page.locator("#hits .hit")).to_have_count(1)
    expect(page.locator("#way .step").first).to_be_visible()
    page.get_by_role("button", name="show on the map").click()
    expect(page.locator("#map")).to_be_visible()
    assert "view=map" in page.url


def test_scores_of_two_encoders_are_not_drawn_side_by_side(site, visit):
    page = visit(site.url)
    search(page, "star red")
    expect(page.locator("#before-hits .score")).to_have_count(0)
    shares = page.eval_on_selector_all("#hits .score i", "bars => bars.map((bar) => parseFloat(bar.style.width))")
    assert shares[0] == 100 and shares == sorted(shares, reverse=True)


def test_keys_are_enough(site, visit):
    page = visit(site.url)
    expect(page.locator("#q")).to_be_focused()  # by the page itself; not after the next line
    page.evaluate("document.activeElement.blur()")
    page.keyboard.press("/")
    expect(page.locator("#q")).to_be_focused()
    page.keyboard.type("star red")
    expect(page.locator("#before-hits .hit").first).to_be_visible()
    page.keyboard.press("ArrowDown")
    expect(page.locator("#hits .hit").nth(0)).to_be_focused()
    page.keyboard.press("ArrowDown")
    expect(page.locator("#hits .hit").nth(1)).to_be_focused()
    page.keyboard.press("ArrowRight")
    expect(page.locator("#before-hits .hit").nth(1)).to_be_focused()
    page.keyboard.press("ArrowLeft")
    page.keyboard.press("Enter")
    expect(page.locator("#document h2")).to_be_visible()
    expect(page.locator("#document .mono")).to_have_text(ids(page)[1])
    page.keyboard.press("Escape")
    expect(page.locator("#document")).to_be_hidden()
    page.keyboard.press("ArrowUp")
    page.keyboard.press("Escape")
    expect(page.locator("#q")).to_be_focused()
    page.keyboard.press("Escape")
    expect(page.locator("#start h2")).to_be_visible()
    assert page.input_value("#q") == ""


def test_down_the_tree_and_back(site, visit):
    page = visit(f"{site.url}/#tree")
    root = httpx.get(f"{site.url}/api/tree").json()["tree"]
    expect(page.locator("#branch li")).to_have_count(len(root["children"]))
    largest = root["children"][0]
    name = " · ".join(largest["name"])
    expect(page.locator("#branch li").first).to_contain_text(name)
    expect(page.locator("#branch li").first).to_contain_text(str(largest["size"]))
    page.locator("#treemap .slice").filter(has_text=name).first.click(position={"x": 12, "y": 10}, force=True)
    expect(page.locator("#crumbs [aria-current]")).to_have_text(name)
    assert page.url.endswith(f"#tree?level=1&node={largest['node']}")
    below = httpx.get(f"{site.url}/api/tree", params={"level": 1, "node": largest["node"]}).json()["tree"]
    expect(page.locator("#branch li")).to_have_count(len(below["children"]))
    page.locator("#branch li button").first.click()  # the list says the same as the picture
    expect(page.locator("#branch .beginning").first).to_be_visible()
    leaf = below["children"][0]
    expect(page.locator("#branch > p")).to_contain_text(f"{leaf['size']} documents")
    page.locator("#branch li button").first.click()
    expect(page.locator("#document")).to_be_visible()
    page.keyboard.press("Escape")
    page.locator("#crumbs button").first.click()
    expect(page.locator("#branch li")).to_have_count(len(root["children"]))
    page.go_back()
    expect(page.locator("#branch .beginning").first).to_be_visible()


def test_the_way_of_a_query_is_lit_level_by_level(site, visit):
    page = visit(f"{site.url}/#tree")
    way = httpx.get(f"{site.url}/api/tree/path", params={"q": "star red"}).json()["way"]
    expect(page.locator("#treemap .slice").first).to_be_attached()
    page.fill("#tree-q", "star red")
    chips = page.locator("#tree-way .step")
    expect(chips).to_have_count(len(way["steps"]))
    expect(page.locator("#tree-way .step.lit")).to_have_count(1)  # the first level first
    expect(page.locator("#tree-way .step.lit")).to_have_count(len(way["steps"]))
    for step in way["steps"]:
        expect(page.locator("#tree-way")).to_contain_text(" · ".join(step["name"]))
    lit = page.evaluate("""() => {
        const { ids, marker } = document.getElementById("treemap").data[0];
        const accent = getComputedStyle(document.documentElement).getPropertyValue("--accent").trim();
        return ids.filter((id, place) => marker.colors[place] === accent);
    }""")
    assert sorted(lit) == sorted(f"{step['level']}:{step['node']}" for step in way["steps"])
    expect(page.locator("#branch > p")).to_contain_text(f"{way['steps'][-1]['size']} documents")
    page.fill("#tree-q", "")
    expect(page.locator("#tree-way")).to_be_hidden()


def test_something_turns_while_the_treemap_loads(site, visit):
    page = visit(site.url)
    plotly = re.compile("plotly")
    page.route(plotly, lambda route: None)  # held back
    with page.expect_request(plotly):
        page.get_by_role("link", name="Tree").click()
    expect(page.locator("#picture-loading")).to_be_visible()
    page.unroute(plotly)  # which lets go of what was held back
    expect(page.locator("#treemap .slice").first).to_be_attached()
    expect(page.locator("#picture-loading")).to_be_hidden()
    named = page.evaluate("document.getElementById('treemap').data[0].hovertext")
    assert len(named) > 4 and all(named)  # however small a tile is


def on_the_map(page, u, v):
    """Where on the page a place of the map is, as long as all of the map is shown."""
    box = page.locator("#map").bounding_box()
    scale = 0.9 * min(box["width"], box["height"])
    middle = box["x"] + box["width"] / 2, box["y"] + box["height"] / 2
    return middle[0] + (u - 0.5) * scale, middle[1] + (v - 0.5) * scale


def test_the_map(site, visit):
    page = visit(f"{site.url}/#tree?view=map", reduced_motion="reduce")
    drawn = page.locator("#map[data-milliseconds]")
    expect(drawn).to_be_visible()
    assert page.get_attribute("#map", "data-view") == "1.00 240.00"  # the whole map, and all documents
    places = {
        each.id: httpx.get(f"{site.url}/api/map/places", params={"id": each.id}).json()["documents"][0]
        for each in list(site.index)[:60:6]
    }
    for ident, place in places.items():
        page.mouse.move(*on_the_map(page, place["x"], place["y"]))
        page.wait_for_timeout(150)
        if page.locator("#map-tip b").count() and site.index.get(ident).title == page.inner_text("#map-tip b"):
            break
    else:
        pytest.fail("no document says its title")
    page.mouse.click(*on_the_map(page, place["x"], place["y"]))
    expect(page.locator("#document .way")).to_be_visible()
    page.keyboard.press("Escape")
    page.mouse.wheel(0, -900)
    expect(page.locator("#map")).not_to_have_attribute("data-view", "1.00 240.00")
    page.click("#map-whole")
    expect(page.locator("#map")).to_have_attribute("data-view", "1.00 240.00")
    page.locator("#branch li button").first.click()  # the list leads into a region
    expect(page.locator("#map")).not_to_have_attribute("data-view", "1.00 240.00")
    assert "level=1" in page.url and "view=map" in page.url
    page.get_by_role("button", name="Treemap").click()
    expect(page.locator("#treemap .slice").first).to_be_attached()
    expect(page.locator("#map")).to_be_hidden()
    assert "level=1" in page.url and "view=map" not in page.url


def test_a_query_and_its_hits_on_the_map(site, visit):
    page = visit(f"{site.url}/#tree?view=map&q=star+red", reduced_motion="reduce")
    answer = httpx.get(f"{site.url}/api/search", params={"q": "star red"}).json()
    expect(page.locator("#branch li")).to_have_count(10)
    assert page.locator("#branch .ranked").all_inner_texts() == [str(rank) for rank in range(1, 11)]
    expect(page.locator("#tree-way .step.lit").last).to_be_visible()
    expect(page.locator("#map-points.behind")).to_be_attached()
    page.locator("#branch li button").first.click()
    expect(page.locator("#document .mono")).to_have_text(answer["hits"][0]["id"])
    page.keyboard.press("Escape")
    site.index.add([Document("new", "w192", "w190 w191")])
    page.goto(f"{site.url}/#tree?view=map&q=w190+w191+w192")
    page.reload()
    expect(page.locator("#branch li").first).to_contain_text("w190 w191")  # it has a place at once
    expect(page.locator("#map-points.behind")).to_be_attached()


def test_a_documents_place_is_shown_from_its_hit(site, visit):
    page = visit(site.url)
    search(page, "star red")
    first = ids(page)[0]
    page.locator("#hits .hit").first.get_by_role("button", name="Show in the tree").click()
    expect(page.locator("#tree-way")).to_contain_text(f"position of the document {first}")
    expect(page.locator("#branch .lit")).to_contain_text(first)
    way = httpx.get(f"{site.url}/api/tree/path", params={"id": first}).json()["way"]
    expect(page.locator("#tree-way .step.lit")).to_have_count(len(way["steps"]))


def test_add_find_and_remove(site, visit):
    page = visit(site.url, refused=(409,))
    page.click("#add")
    page.fill("#adding [name=id]", "mine")
    page.fill("#adding [name=title]", "w190 w191")
    page.fill("#adding [name=text]", "w192")
    page.fill("#adding [name=metadata]", '{"year": }')
    page.click("#adding [type=submit]")
    expect(page.locator("#adding .problem")).to_contain_text("JSON object")
    page.fill("#adding [name=metadata]", '{"year": 2024}')
    page.click("#adding [type=submit]")
    expect(page.locator("#adding")).to_be_hidden()
    expect(page.locator("#toast")).to_contain_text("241 documents")
    expect(page.locator("#count")).to_have_text("241 documents")
    assert site.index.get("mine") == Document("mine", "w192", "w190 w191", {"year": 2024})
    page.click("#add")
    page.fill("#adding [name=id]", "mine")
    page.fill("#adding [name=text]", "w1")
    page.click("#adding [type=submit]")
    expect(page.locator("#adding .problem")).to_contain_text("is there already")
    page.keyboard.press("Escape")
    search(page, "w190 w191 w192")
    assert ids(page)[0] == "mine"
    expect(page.locator("#before-hits .hit").first).to_have_attribute("data-id", "mine")
    page.locator("#hits .hit").first.click()
    expect(page.locator("#document .way")).to_contain_text("added after the tree was grown")
    page.get_by_role("button", name="Remove").click()
    assert "mine" in site.index  # not by one press
    page.get_by_role("button", name="Really remove it?").click()
    expect(page.locator("#count")).to_have_text("240 documents")
    expect(page.locator("#hits .hit").first).not_to_have_attribute("data-id", "mine")
    assert "mine" not in site.index


def test_the_passage_of_a_long_document_is_marked(site, visit):
    sentence = f"𝒜 {'w193 w194 w195 w196 w197 w198 w199 ' * 4}."
    filler = " ".join(f"w{i % 7} 😀 w{i % 5}." for i in range(1500))
    site.index.add([Document("long", f"{filler} {sentence} {filler}", "A book")])
    page = visit(site.url)
    search(page, sentence)
    hit = page.locator("#hits .hit[data-id=long]")
    expect(hit.locator(".snippet")).to_contain_text(sentence)
    hit.click()
    expect(page.locator("#document .text mark")).to_contain_text(sentence)
    expect(page.locator("#document .text mark")).to_be_in_viewport()
    page.keyboard.press("Escape")
    hit.focus()
    page.keyboard.press("Enter")
    expect(page.locator("#document .text mark")).to_contain_text(sentence)


def test_a_hostile_document_is_only_text(site, visit):
    ident, title = f"id {HOSTILE}", f"title w190 {HOSTILE}"
    site.index.add([Document(ident, f"w190 w191 {HOSTILE}", title, {HOSTILE: HOSTILE, "list": [HOSTILE]})])
    page = visit(site.url)
    search(page, f"w190 w191 {HOSTILE}")
    hit = page.locator("#hits .hit").first
    expect(hit.locator("h3")).to_have_text(title)
    expect(hit.locator(".snippet")).to_have_text(f"w190 w191 {HOSTILE}")
    expect(hit.locator(".mono")).to_have_text(ident)
    hit.click()
    expect(page.locator("#document .text")).to_have_text(f"w190 w191 {HOSTILE}")
    expect(page.locator("#document td").first).to_have_text(HOSTILE)
    page.get_by_role("button", name="Show in the tree").last.click()
    expect(page.locator("#branch .lit")).to_contain_text(title)
    expect(page.locator("#tree-way")).to_contain_text(ident)
    page.locator("#tree-way .step").last.click()  # now the documents are tiles of the picture
    tile = page.locator("#treemap .slice").filter(has_text="title")
    expect(tile.first).to_be_attached()
    page.wait_for_timeout(300)
    assert page.evaluate("window.hacked") is None
    assert page.locator("main img, main script, dialog img, dialog script").count() == 0
    page.evaluate("document.getElementById('treemap').emit('plotly_treemapclick', "
                  f"{{points: [{{id: 'document:' + {ident!r}}}]}})")  # fmt: skip
    expect(page.locator("#document .mono")).to_have_text(ident)
    page.get_by_role("button", name="Remove").click()
    page.get_by_role("button", name="Really remove it?").click()
    expect(page.locator("#count")).to_have_text("240 documents")
    assert page.evaluate("window.hacked") is None


@pytest.mark.parametrize(
    "where", ["#search", "#search?q=star+red", "#tree", "#tree?q=star+red", "#tree?view=map", "#status", "docs"]
)
def test_a_phone_needs_no_sideways_scrolling(site, visit, where):
    site.index.add([Document("long-" + "x" * 200, "star red " + "y" * 500, "star " + "z" * 200, {"k" * 90: "v" * 90})])
    phone = {"viewport": {"width": 390, "height": 844}, "is_mobile": True, "has_touch": True}
    page = visit(f"{site.url}/{where}", **phone)
    ready = {
        "#search": ".topics",
        "#search?q=star+red": ".hit",
        "#status": "#plot-accuracy .main-svg",
        "docs": "article",
        "#tree?view=map": "#map[data-milliseconds]",
    }
    expect(page.locator(ready.get(where, "#treemap .slice")).first).to_be_attached()
    page.wait_for_timeout(200)
    assert page.evaluate("[document.documentElement.scrollWidth, innerWidth]") == [390, 390]
    if where == "#search?q=star+red":  # one ranking at a time
        expect(page.locator("#hits .hit").first).to_be_visible()
        expect(page.locator("#before-hits")).to_be_hidden()
        page.get_by_role("tab", name="Untrained").tap()
        expect(page.locator("#before-hits .hit").first).to_be_visible()
        expect(page.locator("#hits")).to_be_hidden()
        page.locator("#before-hits .hit").first.tap()
        expect(page.locator("#document")).to_be_visible()
        assert page.evaluate("document.getElementById('document').getBoundingClientRect().right <= innerWidth")


def test_a_report_on_a_phone_and_in_the_dark(trained, visit, tmp_path):
    (tmp_path / "report.html").write_text(report(ModelFolder.read(trained.parent / "model")))
    backgrounds = set()
    for scheme in ("light", "dark"):
        page = visit((tmp_path / "report.html").as_uri(), viewport={"width": 390, "height": 844}, color_scheme=scheme)
        assert page.evaluate("document.documentElement.scrollWidth") == 390
        assert page.locator("svg").count() >= 3
        backgrounds.add(page.evaluate("getComputedStyle(document.body).backgroundColor"))
    assert len(backgrounds) == 2


def test_status_in_light_and_dark(site, visit, monkeypatch):
    backgrounds = set()
    for scheme in ("light", "dark"):
        page = visit(f"{site.url}/#status", color_scheme=scheme)
        for plot in ("dev", "loss", "accuracy"):
            expect(page.locator(f"#plot-{plot} .scatterlayer .trace").first).to_be_attached()
        expect(page.locator(".card").first).to_contain_text("240")
        expect(page.locator("#status")).to_contain_text("trained from start")
        expect(page.locator(".measures")).to_contain_text("mean")
        expect(page.locator(".verdict")).to_be_visible()
        expect(page.locator(".card.wide")).to_contain_text("words count 0.50", ignore_case=True)
        backgrounds.add(page.evaluate("getComputedStyle(document.body).backgroundColor"))
    assert len(backgrounds) == 2


def test_status_names_the_regions_that_grew(site, visit):
    first, *_ = site.index
    site.index.add([Document(f"new-{n}", f"{first.text} canal canal tariff") for n in range(40)])
    (region,) = site.index.drift().grown
    page = visit(f"{site.url}/#status")
    line = page.locator(".grown li")
    expect(line).to_have_count(1)
    expect(line).to_contain_text(f"{region.before} documents and {region.added} later ones")
    expect(line.locator("b")).to_have_text(", ".join(region.words))
    line.get_by_role("button", name=" · ".join(region.name)).click()
    expect(page.locator("#crumbs [aria-current]")).to_have_text(" · ".join(region.name))


def test_an_index_without_tree_and_training(tmp_path, planted_corpus, module_static_encoder, visit):
    with Index.create(tmp_path / "plain", planted_corpus, module_static_encoder) as index, serving(index) as url:
        page = visit(url)
        page.fill("#q", "star red")
        expect(page.locator("#hits .hit")).to_have_count(10)
        expect(page.locator("#before")).to_be_hidden()
        expect(page.locator("#compare-option")).to_be_hidden()
        page.get_by_role("link", name="Tree").click()
        expect(page.locator("#tree")).to_contain_text("This index has no tree")
        page.get_by_role("link", name="Status").click()
        expect(page.locator("#status")).to_contain_text("was not trained with")


def test_an_index_that_was_emptied(site, visit):
    site.index.remove([document.id for document in site.index])
    page = visit(site.url)
    expect(page.locator("#start")).to_contain_text("No documents yet")
    page.fill("#q", "star")
    expect(page.locator("#start")).to_contain_text("There are no documents yet")
    page.get_by_role("link", name="Tree").click()
    expect(page.locator("#crumbs")).to_contain_text("0 documents")
    page.get_by_role("link", name="Status").click()
    expect(page.locator(".card").first).to_contain_text("240 removed")


def test_writing_with_a_token(site, visit):
    with serving(site.index, Rules(LOOPBACK, "right")) as url:
        page = visit(url, refused=(401,))
        page.click("#add")
        page.fill("#adding [name=id]", "mine")
        page.fill("#adding [name=text]", "w1")
        page.fill("#adding [name=token]", "wrong")
        page.click("#adding [type=submit]")
        expect(page.locator("#adding .problem")).to_contain_text("needs the token")
        page.fill("#adding [name=token]", "right")
        page.click("#adding [type=submit]")
        expect(page.locator("#count")).to_have_text("241 documents")
    with serving(site.index, Rules(LOOPBACK, writable=False)) as url:
        page = visit(url)
        expect(page.locator("#count")).to_have_text("241 documents")
        expect(page.locator("#add")).to_be_hidden()


def test_narrow_regions_of_the_treemap_keep_a_heading(site, visit):
    page = visit(f"{site.url}/#tree", reduced_motion="reduce")
    expect(page.locator("#treemap g.slice").first).to_be_attached()
    headings = page.evaluate("""(() => { const d = document.querySelector('#treemap').data[0];
        return d.labels.filter((_, i) => d.parents[i] === d.ids[0]) })()""")
    assert len(headings) >= 2
    texts = page.locator("#treemap g.slicetext text")
    for heading in headings:
        expect(texts.filter(has_text=heading).first).to_be_visible()


@pytest.mark.parametrize("press", ["#map-in", "+"])
def test_the_map_is_not_empty_however_close_one_goes(site, visit, press):
    page = visit(f"{site.url}/#tree?view=map", reduced_motion="reduce")
    expect(page.locator("#map")).to_have_attribute("data-view", re.compile(r"^\d"))
    closeness = 0.0
    for _ in range(7):  # the seventh press of the button reaches the closest view there is
        page.click(press) if press.startswith("#") else page.press("#map-marks", press)
        expect(page.locator("#map")).not_to_have_attribute("data-view", re.compile(rf"^{closeness:.2f} "))
        closeness, visible = map(float, page.get_attribute("#map", "data-view").split())
        assert visible >= 1


def test_lit_tiles_of_the_dark_treemap_have_dark_letters(site, visit):
    page = visit(f"{site.url}/#tree?q=star", color_scheme="dark", reduced_motion="reduce")
    expect(page.locator("#tree-way .step.lit").last).to_be_visible()
    inks = "document.querySelector('#treemap').data[0]"
    page.wait_for_timeout(500)
    found = page.evaluate(
        f"(() => {{ const d = {inks}; return d.marker.colors.map((c, i) => [c, d.textfont.color[i]]) }})()"
    )
    lit = {ink for tone, ink in found if tone == "#45c1b2"}
    assert lit == {"#06201d"}
    assert {ink for tone, ink in found if tone != "#45c1b2"} == {"#e7eaec"}
