"""The page in a real browser, if one is installed: on a phone nothing is wider than the screen."""

import html
import json
import re
import shutil
import subprocess

import pytest

from tests.report.fakes import budget_evaluation, dense_evaluation, metrics, tsa_evaluation
from tokendepth.report import build

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
LONG = "shakespeare.budget-routing=learned-n_layer=12-budget=0.34-d_model=512-without_any_space_to_break_at"
# Iframes, because windows have a minimum width. Content that scrolls inside its own box may be wide.
FRAME = '<iframe width="{width}" height="800" srcdoc="{page}"></iframe>'
SCREENS = """<!doctype html>{frames}<pre id="found"></pre><script>
const look = (frame) => {{
  const page = frame.contentDocument
  page.querySelectorAll("details").forEach((part) => (part.open = true))
  const beyond = (part) => part.getBoundingClientRect().right > page.documentElement.clientWidth
  const wide = [...page.body.querySelectorAll("*")].filter((part) =>
    !part.parentElement.closest(".scroll, svg") && beyond(part))
  const picture = page.querySelector(".first svg").getBoundingClientRect()
  return {{
    width: page.documentElement.clientWidth, scrolls: page.documentElement.scrollWidth,
    wide: wide.map((part) => part.outerHTML.slice(0, 200)), bottom: picture.bottom, high: picture.height }}
}}
onload = () => {{
  const found = [...document.querySelectorAll("iframe")].map(look)
  document.querySelector("#found").textContent = JSON.stringify(found)
}}
</script>"""

pytestmark = [pytest.mark.slow, pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium on this machine")]


def measured(page: str, widths: tuple[int, ...], tmp_path) -> list[dict]:
    """Measurements on screens of these widths."""
    frames = "".join(FRAME.format(width=width, page=html.escape(page)) for width in widths)
    (tmp_path / "screens.html").write_text(SCREENS.format(frames=frames), encoding="utf-8")
    command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}"]
    command += [
        "--window-size=1600,1000",
        "--virtual-time-budget=10000",
        "--dump-dom",
        f"file://{tmp_path}/screens.html",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    found = re.search(r'<pre id="found">(.+?)</pre>', done.stdout, re.DOTALL)
    assert found, done.stdout[-500:] + done.stderr[-500:]
    return json.loads(html.unescape(found[1]))


def test_nothing_is_wider_than_the_screen(make_run, tmp_path):
    runs = [
        make_run("dense", "dense", evaluation=dense_evaluation(), rows=metrics(until=500)),
        make_run("tsa", evaluation=tsa_evaluation(1.4519, 2.2159), rows=metrics(until=500)),
        make_run(LONG, "budget", evaluation=budget_evaluation(), rows=metrics(until=500)),
    ]
    widths = 390, 1280
    page = build(runs, tmp_path / "out").read_text(encoding="utf-8")
    for width, found in zip(widths, measured(page, widths, tmp_path), strict=True):
        assert found["wide"] == []
        assert found["scrolls"] == found["width"] > width - 30  # except for a scroll bar


def test_the_first_screen_of_a_phone_has_the_sentence_and_the_picture(make_run, tmp_path):
    runs = [
        make_run("demo.dense", "dense", evaluation=dense_evaluation()),
        make_run("demo.budget", "budget", evaluation=budget_evaluation()),
        make_run("demo.tsa", evaluation=tsa_evaluation()),
    ]
    page = build(runs, tmp_path / "out", title="tokendepth demo").read_text(encoding="utf-8")
    (found,) = measured(page, (390,), tmp_path)
    assert found["high"] > 200
    assert found["bottom"] < 844, "below the fold of a common phone"
