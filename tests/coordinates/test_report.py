"""`coord.html` says the verdict, what to change, and nothing that has to be fetched."""

from __future__ import annotations

import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest

from analysis.coordinate_plots import figure_coordinates
from analysis.coordinate_report import render_report
from analysis.coordinate_verdict import CoordinateVerdict, with_wider
from analysis.coordinates import judge
from analysis.depth_coordinates import judge_depth, over_layers
from analysis.report import svg
from analysis.wider import judge_wider
from scaling.coordinates import measure, measure_depths
from tests.coordinates.depth_targets import DeepMlp, DepthFault
from tests.coordinates.targets import frozen_embedding, mlp

VOID = {"meta", "br"}


class Tags(HTMLParser):
    """Fails on a tag that is closed without having been opened last; keeps the text."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.text = ""

    def handle_starttag(self, tag: str, _attributes: object) -> None:
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open, tag
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def page_of(verdict: CoordinateVerdict, picture: str = "<svg></svg>") -> str:
    page = render_report(verdict, "coordinate check of mine.py:Net & <friends>", picture)
    parser = Tags()
    parser.feed(page)
    assert parser.open == []
    assert "mine.py:Net & <friends>" in parser.text
    return page


def test_the_page_of_a_fault_says_what_to_change() -> None:
    measurement = measure(frozen_embedding, (32, 64, 128), seeds=2)
    curves = {32: {0: [1.0] * 9, 1: [1.1] * 9}, 64: {0: [1.2] * 9, 1: [1.3] * 9}}
    verdict = with_wider(judge(measurement), judge_wider(curves, 9))
    page = page_of(verdict, svg(figure_coordinates(measurement, verdict)))
    assert "1 tensor is wrong and wider models end worse" in page
    assert "<code>embed.weight</code> (update)" in page
    assert re.search(r"divide its learning rate by width<sup>-(0.9|1.0)\d</sup>", page)
    assert page.count('class="wrong"') == 2, "its update's cell, and the width that ends worse"
    assert page.count("<svg") == 1
    fetched = re.findall(r'(?:src|href)="(?!#)[^"]*"', page)
    assert fetched == [], "a self-contained page"


@pytest.mark.parametrize("fault", [DepthFault(), DepthFault(multiplier={"layers.*.2": 1})], ids=["right", "no multiplier"])
def test_the_page_of_depth_speaks_of_depth(fault: DepthFault) -> None:
    measurement, layers = measure_depths(DeepMlp(fault=fault), (2, 4, 8), seeds=1)
    verdict = judge_depth(measurement, layers)
    page = page_of(verdict, svg(figure_coordinates(over_layers(measurement, layers), verdict)))
    assert "Slopes against log2(depth)" in page
    assert ("What to change" in page) == bool(verdict.culprits) == bool(fault.multiplier)
    assert "(completep)" in page or not fault.multiplier


def test_what_was_not_measured_is_a_dash() -> None:
    verdict = judge(measure(mlp(zero_readout=True), (32, 64, 128), seeds=1))
    assert "<td>- <small></small></td>" in page_of(replace(verdict, notes=()))
