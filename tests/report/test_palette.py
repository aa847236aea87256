"""One colour per method, the same in every figure, distinguishable with every colour vision, and none alarming."""

import colorsys
import itertools
import re
from pathlib import Path

import numpy as np
import pytest

import paper
import tokendepth.report
from paper.schematic import SCHEMATICS
from tests.report.fakes import budget_evaluation, dense_evaluation, metrics, tsa_evaluation
from tokendepth.report import build
from tokendepth.report.page import METHODS, inline
from tokendepth.report.palette import LOOKS, UNKNOWN, look, row_looks

HEX = re.compile(r"#[0-9a-fA-F]{6}\b")
# Machado, Oliveira and Fernandes (2009), severity 1, on linear RGB.
EYES = {
    "normal": [[1, 0, 0], [0, 1, 0], [0, 0, 1]],
    "protanopia": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "deuteranopia": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.01182, 0.04294, 0.968881]],
    "tritanopia": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.3039]],
}
TO_LMS = [[0.41222, 0.53633, 0.05145], [0.2119, 0.6807, 0.1074], [0.0883, 0.28172, 0.62998]]
TO_OKLAB = [[0.21045, 0.79362, -0.00407], [1.978, -2.42859, 0.45059], [0.0259, 0.78277, -0.80868]]


def linear(colour: str) -> np.ndarray:
    channels = np.array(list(bytes.fromhex(colour[1:]))) / 255
    return np.where(channels <= 0.04045, channels / 12.92, ((channels + 0.055) / 1.055) ** 2.4)


def seen(colour: str, eye: str) -> np.ndarray:
    """The colour in Oklab, whose distances are perceptually uniform; 0.02 is just noticeable."""
    rgb = np.clip(EYES[eye] @ linear(colour), 0, 1)
    return TO_OKLAB @ np.cbrt(TO_LMS @ rgb)


def test_every_method_with_a_page_has_a_colour_of_its_own_and_so_has_a_new_one():
    colours = [look(method).colour for method in (*SCHEMATICS, "random", "a method to come")]
    assert len(set(colours)) == len(colours)


@pytest.mark.parametrize("eye", EYES)
@pytest.mark.parametrize("page", ["colour", "on_dark"])
def test_the_colours_stay_apart_for_every_eye(page, eye):
    looks = {name: getattr(one, page) for name, one in {**LOOKS, "unknown": UNKNOWN}.items() if name != "random"}
    for (a, one), (b, other) in itertools.combinations(looks.items(), 2):
        assert np.linalg.norm(seen(one, eye) - seen(other, eye)) > 0.08, (a, b)


def luminance(colour: str) -> float:
    return float(np.array([0.2126, 0.7152, 0.0722]) @ linear(colour))


def test_they_show_on_a_dark_page():
    for _, one in METHODS:
        if one is not LOOKS["random"]:  # drawn in the page's ink
            assert (luminance(one.on_dark) + 0.05) / (luminance("#14191f") + 0.05) > 3


def test_red_and_orange_are_for_what_is_bad():
    for one in {**LOOKS, "unknown": UNKNOWN}.values():
        hue, light, saturation = colorsys.rgb_to_hls(*np.array(list(bytes.fromhex(one.colour[1:]))) / 255)
        assert not (hue < 0.11 and saturation > 0.6 and light > 0.25), one


def test_only_the_palette_has_colours():
    """Other modules contain only greys and tints, so no figure can paint a method differently."""
    folders = (Path(next(iter(paper.__path__))), Path(next(iter(tokendepth.report.__path__))))
    files = [path for folder in folders for path in folder.rglob("*.py") if path.name != "palette.py"]
    found = {(path.name, colour) for path in files for colour in HEX.findall(path.read_text())}
    assert found
    for name, colour in found:
        channels = bytes.fromhex(colour[1:])
        assert max(channels) - min(channels) < 40, (name, colour)


def test_every_figure_of_a_report_paints_a_method_alike(make_run, tmp_path):
    evaluations = {"tsa": tsa_evaluation(), "budget": budget_evaluation(), "dense": dense_evaluation()}
    runs = [
        make_run(method, method, evaluation={**evaluation, "passage": None}, rows=metrics(until=500))
        for method, evaluation in evaluations.items()
    ]
    figures = build(runs, tmp_path / "out").parent / "figures"
    here = {look(method).colour for method in ("dense", "budget", "tsa")}
    others = {one.colour for one in LOOKS.values()} - here - {look("random").colour}
    for name in ("overview_01", "loss_steps", "loss_tlops", "pareto_01"):
        used = set(HEX.findall((figures / f"{name}.svg").read_text()))
        assert here <= used, name
        assert not others & used, name


def test_the_page_paints_them_too_and_follows_its_own_light(make_run, tmp_path):
    run = make_run("t", evaluation={**tsa_evaluation(), "passage": None})
    page = build([run], tmp_path / "out").read_text()
    assert "--method-tsa: #b42c92;" in page
    body = page[page.index("<body") :]
    assert "var(--method-tsa)" in body
    assert look("tsa").colour not in body
    assert inline('<svg width="1"><path style="fill: #b42c92"/></svg>', "x").count("var(--method-tsa)") == 1


def test_rows_of_one_method_share_its_colour_and_can_be_told_apart():
    looks = row_looks(["tsa", "budget", "tsa", "tsa", "early_exit", "tsa"])
    assert {one.colour for n, one in enumerate(looks) if n not in (1, 4)} == {look("tsa").colour}
    alike = [(one.dash, one.marker) for n, one in enumerate(looks) if n not in (1, 4)]
    assert len(set(alike)) == len({marker for _, marker in alike}) == 4
