"""The page in a real browser: typing, pointing, budgets, generating, comparing, saving; and hostile text."""

import re
import shutil
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator

import pytest

from tests.explore.conftest import METHODS, exploring
from tests.tiny import TEXT, tiny
from tokendepth.data.tokenizer import ByteTokenizer
from tokendepth.explore.look import MOST_TOKENS
from tokendepth.training.loop import train

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
pytestmark = [
    pytest.mark.slow,
    pytest.mark.xdist_group("browser"),
    pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium on this machine"),
]

NAME = '<img src=x onerror="document.title=1">'
"""The name of a run's folder must not act as markup."""
HOSTILE = [
    "<script>document.title = 'owned'</script>", "<img src=x onerror=alert(1)>", "<svg/onload=alert(1)>", "</textarea>",
    "</span><b>bold</b>", "<!-- -->", "-->", "]]>", "<![CDATA[x]]>", "&lt;b&gt;", "&amp;", "&#60;script&#62;", "&",
    "<a href=javascript:alert(1)>x</a>", "javascript:alert(1)", "<iframe src=/runs>", "<style>*{display:none}</style>",
    "<meta http-equiv=refresh content=0>", "<base href=//evil.example>", "<link rel=stylesheet href=//evil.example>",
    "<form action=/><input type=submit>", "<template>", "<plaintext>", "<title>x</title>", "<math><mtext>", "${1+1}",
    "{{constructor}}", "`${alert(1)}`", "'\"><script>alert(1)</script>", "\" onmouseover=\"alert(1)", "' or 1=1 --",
    "\\u003cscript\\u003e",
    "\\x3cscript\\x3e", "\u202eabc", "\u200b\u200d\ufeff", "a\u0301\u0302\u0303", "\u2028\u2029",
    "\U0001f469\u200d\U0001f680", "\uffff", "\u0000\u0001\u0007", "\x1b[31mred", "%s%n%x", "../../etc/passwd", "\t\r\n",
    "__proto__", "constructor", "<" * 40, "\u05e9\u05dc\u05d5\u05dd", "data:text/html,<script>1</script>",
    "\u2066\u2069",
]  # fmt: skip

SHOWN = "(text) => [...document.querySelectorAll('.panel .token b')].map((each) => each.textContent).join('') === text"


@pytest.fixture(scope="module")
def browser() -> Iterator:
    with playwright.sync_playwright() as started:
        found = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield found
        found.close()


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Iterator:
    """Two byte-level runs, which accept any text; the first has a dial, the second a soft execution."""
    folder = tmp_path_factory.mktemp("explored")
    runs = [
        train(tiny(folder, METHODS[method], steps=4, n_layer=4, context=64, tokens="byte"), folder / name, show=False)
        for method, name in (("budget", NAME), ("tsa", "second"))
    ]
    with exploring(*runs) as found:
        found.wait_for_budgets()
        yield found


@pytest.fixture
def page(browser, site) -> Iterator:
    yield from opened(browser, site)


def opened(browser, site, **how) -> Iterator:
    """A page; afterwards, it must have made no other requests, shown no dialog and reported no error."""
    context = browser.new_context(viewport={"width": 1280, "height": 900}, **how)
    page = context.new_page()
    page.set_default_timeout(20_000)
    problems: list[str] = []
    page.on("dialog", lambda dialog: (problems.append(f"dialog {dialog.message}"), dialog.dismiss()))
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("console", lambda said: problems.append(said.text) if expected(said) else None)
    page.on("request", lambda sent: problems.append(sent.url) if not sent.url.startswith((site.url, "data:")) else None)
    page.goto(site.url)
    page.wait_for_selector(".token")
    yield page
    context.close()
    assert problems == []


def expected(said) -> bool:
    """Whether a browser message counts as a problem; responses with a 4xx status do not."""
    return said.type in ("error", "warning") and "the server responded with a status of 4" not in said.text


def panel(page, number: int = 0):
    return page.locator("main .panel").nth(number)


def typed(page, text: str, tokens: int | None = None, number: int = 0) -> None:
    """Enter a text and wait for its result."""
    page.fill("#text", text)
    count = len(text.encode()) if tokens is None else tokens
    playwright.expect(panel(page, number).locator(".token")).to_have_count(count)


def summary(page, number: int = 0):
    return panel(page, number).locator(".summary")


def alone(page) -> None:
    page.locator("#run-2").select_option("no other run")
    playwright.expect(page.locator("main .panel")).to_have_count(1)


# --- looking ----------------------------------------------------------------------------------------------------------


def test_typing_colours_every_token(page, site):
    text = TEXT[:50].replace("\u2013", "-")
    typed(page, text)
    assert "".join(panel(page).locator(".token b").all_inner_texts()) == text
    expected = site.explored[0].look(text, "sparse", None)
    playwright.expect(summary(page)).to_contain_text("sparse, budget 0.4: 50 tokens;")
    playwright.expect(summary(page)).to_contain_text(f"active fraction {100 * expected['active_fraction']:.1f}%")
    playwright.expect(summary(page)).to_contain_text(f"loss {expected['loss']:.3f} nats per token")
    routed = [row for row, where in zip(expected["work"], expected["sites"], strict=True) if where["routed"]]
    depths = [sum(row[t] for row in routed) / len(routed) for t in range(50)]
    assert len(set(depths)) > 1
    shades = page.evaluate("""() => [...document.querySelector(".panel").querySelectorAll(".token b")]
        .map((token) => getComputedStyle(token).backgroundColor.match(/[\\d.]+/g).map(Number))""")
    assert [shade[:3] for shade in shades] == [[21, 154, 146]] * 50
    assert [shade[3] for shade in shades] == pytest.approx([0.72 * depth for depth in depths], abs=0.01)


def test_pointing_and_keys_show_what_is_known_of_a_token(page, site):
    text = "ten green bottles"
    typed(page, text)
    found = site.explored[0].look(text, "sparse", None)
    detail = panel(page).locator(".detail")
    panel(page).locator('[data-place="4"]').hover()
    playwright.expect(detail).to_contain_text(f"token 5, surprisal {found['surprisal'][4]:.2f} nats")
    playwright.expect(detail.locator("code").first).to_have_text("g")
    share = found["expected"][3][0][1]
    playwright.expect(detail.locator("li").first).to_contain_text(f"{100 * share:.1f}%")
    decisions = ["processed" if row[4] else "skipped" for row in found["work"][1:]]
    assert [words.strip() for words in detail.locator("dd").all_inner_texts()] == decisions
    passage = panel(page).locator(".passage")
    passage.focus()
    for key, place in (("ArrowRight", 5), ("ArrowLeft", 4), ("End", 16), ("ArrowRight", 16), ("Home", 0)):
        passage.press(key)
        playwright.expect(detail).to_contain_text(f"token {place + 1}")
        playwright.expect(panel(page).locator(".chosen")).to_have_attribute("data-place", str(place))
    playwright.expect(detail).to_contain_text("the first: it has no surprisal")


def test_soft_hard_and_sparse(page):
    second = panel(page, 1)
    typed(page, "ten green bottles", number=1)
    second.get_by_label("soft").check()
    playwright.expect(summary(page, 1)).to_contain_text("soft: 17 tokens; mean gate")
    playwright.expect(summary(page, 1)).to_contain_text("nothing is skipped")
    second.get_by_label("hard").check()
    playwright.expect(summary(page, 1)).to_contain_text("hard: 17 tokens;")
    playwright.expect(summary(page, 1)).not_to_contain_text("FLOPs")
    second.get_by_label("sparse").check()
    playwright.expect(summary(page, 1)).to_contain_text("FLOPs")
    playwright.expect(panel(page, 0).get_by_label("soft")).to_have_count(0)


def test_sliding_the_budget_routes_anew(page, site):
    typed(page, TEXT[:60].replace("\u2013", "-"))
    slider = panel(page).get_by_role("slider")
    slider.focus()
    slider.press("End")
    playwright.expect(summary(page)).to_contain_text("budget 1: 60 tokens; active fraction 100.0%")
    slider.press("Home")
    low = min(site.explored[0].points)
    share = site.explored[0].look(TEXT[:60].replace("\u2013", "-"), "sparse", low)["active_fraction"]
    playwright.expect(summary(page)).to_contain_text(f"budget {low:g}: 60 tokens; active fraction {100 * share:.1f}%")
    panel(page).get_by_label("colour by").select_option("block 2")
    playwright.expect(panel(page).locator(".legend")).not_to_contain_text("by all routers")


# --- writing ----------------------------------------------------------------------------------------------------------


def test_a_text_is_written_with_its_depth_and_kept(page):
    typed(page, "ten green bottles")
    panel(page).get_by_label("tokens", exact=True).fill("12")
    panel(page).get_by_label("temperature").fill("0")
    panel(page).get_by_role("button", name="Continue the text").click()
    written = panel(page).locator(".token.written")
    playwright.expect(panel(page).get_by_role("button", name="Keep it")).to_be_visible()
    assert written.count() == 12
    assert panel(page).locator(".token.unread").count() == 1, "the last one was not read by the model yet"
    panel(page).locator('[data-place="20"]').hover()
    playwright.expect(panel(page).locator(".detail dd")).to_have_count(3)
    panel(page).get_by_role("button", name="Keep it").click()
    playwright.expect(written).to_have_count(0)
    # Each invalid byte sequence becomes one character.
    assert len(page.input_value("#text")) >= len("ten green bottles") + 6


@pytest.mark.parametrize("by", ["the button", "another text"])
def test_writing_can_be_stopped(page, site, monkeypatch, by):
    engine = site.explored[0].service.engine
    step = engine.step
    monkeypatch.setattr(engine, "step", lambda: (time.sleep(0.1), step())[1])
    typed(page, "ten")
    panel(page).get_by_role("button", name="Continue the text").click()
    playwright.expect(panel(page).locator(".token.written").nth(2)).to_be_visible()
    if by == "the button":
        panel(page).get_by_role("button", name="Stop").click()
    else:
        typed(page, "eleven")
        playwright.expect(panel(page).locator(".token.written")).to_have_count(0)
    playwright.expect(panel(page).get_by_role("button", name="Continue the text")).to_be_visible()
    assert panel(page).locator(".token.written").count() < 32
    deadline = time.monotonic() + 10
    while site.explored[0].service.worker.open:
        assert time.monotonic() < deadline, "the slot is still taken"
        time.sleep(0.02)


# --- two runs, their tables, and saved views --------------------------------------------------------------------------


def test_two_runs_side_by_side_and_one_alone(page):
    typed(page, "ten green bottles")
    typed(page, "ten green bottles", number=1)
    assert [panel(page, n).get_attribute("aria-label") for n in (0, 1)] == [NAME, "second"]
    left, right = (panel(page, n).bounding_box() for n in (0, 1))
    assert left["y"] == right["y"]
    assert left["x"] + left["width"] <= right["x"]
    alone(page)
    page.locator("#run-1").select_option("second")
    playwright.expect(panel(page)).to_have_attribute("aria-label", "second")


def test_curves_and_tables(page):
    second = panel(page, 1)
    second.get_by_text("This run's curves and tables").click()
    playwright.expect(second.locator("figure")).to_have_count(2)
    playwright.expect(second.locator("canvas").first).to_be_visible()
    playwright.expect(second.locator(".about")).to_contain_text("not evaluated yet")


def test_a_saved_view_needs_no_server(page, browser, tmp_path):
    text = 'a <b>bold</b> "text" & \x07 more'
    typed(page, text)
    typed(page, text, number=1)
    with page.expect_download() as html:
        page.click("#save-html")
    with page.expect_download() as svg:
        page.click("#save-svg")
    html.value.save_as(tmp_path / "depth.html")
    svg.value.save_as(tmp_path / "depth.svg")
    saved = (tmp_path / "depth.html").read_text(encoding="utf-8")
    assert not re.search(r"<script|src=|href=|@import|url\(", re.sub(r"&lt;.*?&gt;", "", saved))
    context = browser.new_context(java_script_enabled=False, offline=True)
    try:
        alone = context.new_page()
        alone.goto((tmp_path / "depth.html").as_uri())
        assert alone.locator(".panel").count() == 2
        assert alone.locator(".panel").first.locator(".token").count() == len(text)
        assert alone.locator("b b, img, pre.text *").count() == 0
        assert alone.locator("pre.text").inner_text() == text
        assert "surprisal" in (alone.locator(".token").nth(3).get_attribute("title") or "")
    finally:
        context.close()
    picture = ElementTree.fromstring((tmp_path / "depth.svg").read_bytes())
    words = [each.text for each in picture.iter("{http://www.w3.org/2000/svg}text")]
    assert sum(word in ("<", ">", "&") for word in words) == 2 * sum(text.count(c) for c in "<>&")
    assert len(list(picture.iter("{http://www.w3.org/2000/svg}rect"))) > 2 * len(text)


# --- what must not happen ---------------------------------------------------------------------------------------------


def test_hostile_texts_are_texts(page):
    assert len(HOSTILE) == 50
    tokenizer = ByteTokenizer()
    alone(page)
    title, elements = page.title(), page.locator("script, iframe, img, base, form, template").count()
    for text in ("\n".join(HOSTILE[n : n + 5]) for n in range(0, 50, 5)):
        page.fill("#text", text)
        pieces = "".join(tokenizer.pieces(tokenizer.encode(page.input_value("#text"))))
        page.wait_for_function(SHOWN, arg=pieces)  # fails after a timeout
        panel(page).locator(".token").first.hover()
        assert page.locator("script, iframe, img, base, form, template").count() == elements, text
        assert page.title() == title


def test_a_very_long_paste_is_refused_and_the_page_goes_on(page):
    page.fill("#text", "lorem ipsum " * 1700)
    message = panel(page).get_by_role("alert")
    playwright.expect(message).to_contain_text(f"the text has 20,400 tokens; expected at most {MOST_TOKENS:,}")
    typed(page, "ten")
    playwright.expect(message).to_have_count(0)


def test_as_long_a_text_as_is_taken_stays_responsive(page):
    alone(page)
    typed(page, "m" * MOST_TOKENS)
    panel(page).locator(f'[data-place="{MOST_TOKENS - 1}"]').scroll_into_view_if_needed()
    milliseconds = page.evaluate("""async () => {
        const start = performance.now()
        document.querySelector('[data-place="9"]').dispatchEvent(new MouseEvent("mouseover", { bubbles: true }))
        await new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))
        return performance.now() - start
    }""")
    playwright.expect(panel(page).locator(".detail")).to_contain_text("token 10")
    assert milliseconds < 1000


def test_an_empty_text(page):
    typed(page, "ten")
    page.fill("#text", "")
    playwright.expect(panel(page).get_by_role("alert")).to_have_text("the text is empty; type at least one character")


def test_a_server_that_is_gone_is_said(browser, run_of):
    with exploring(run_of("dense")) as short:
        context = browser.new_context()
        page = context.new_page()
        page.goto(short.url)
        page.wait_for_selector(".token")
        page.fill("#text", "\u2603")
        playwright.expect(panel(page).get_by_role("alert")).to_contain_text("'\u2603'")
    page.fill("#text", "ten")
    playwright.expect(panel(page).get_by_role("alert")).to_contain_text("The server does not respond; start it again")
    context.close()


@pytest.mark.parametrize(
    "how", [{"viewport": {"width": 390, "height": 844}}, {"color_scheme": "dark"}], ids=["phone", "dark"]
)
def test_on_a_phone_and_in_the_dark(browser, site, how):
    context = browser.new_context(**how)
    page = context.new_page()
    page.goto(site.url)
    typed(page, TEXT[:64].replace("\u2013", "-"))
    panel(page).get_by_text("This run's curves and tables").click()
    page.wait_for_selector("canvas")
    wide = page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
    assert wide == 0
    ink, paper = (
        [int(n) for n in re.findall(r"\d+", page.evaluate(f"getComputedStyle(document.body).{name}"))[:3]]
        for name in ("color", "backgroundColor")
    )
    assert (sum(ink) > sum(paper)) == ("color_scheme" in how)
    assert abs(sum(ink) - sum(paper)) > 400, "text stands out from the page"
    context.close()
