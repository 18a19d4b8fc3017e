"""A network with a planted watermark: whoever reads only the first screen of the report must see it."""

from __future__ import annotations

from dataclasses import dataclass

import planted_watermark as planted
import pytest
import torch
from audit import audit_boxes, cheating_network, write_boxes
from drsa_audit import Audit
from drsa_audit.report.pictures import crop_box

from .browser import Page, find_browser, opened_browser


@dataclass(frozen=True)
class Case:
    """The audit, and which test images carry the watermark."""

    audit: Audit
    marked: list[bool]


@pytest.fixture(scope="module")
def case(tmp_path_factory) -> Case:
    root = tmp_path_factory.mktemp("planted")
    model = cheating_network(1500, epochs=4, progress=False)
    write_boxes(root / "train", 300, 1)
    write_boxes(root / "test", 120, 2)
    quick = {"flipping": False, "ablation": False, "stability": False, "progress": False}
    result = audit_boxes(model, root, **quick)
    return Case(result, ["marked" in name for name in result.explained.names])


def test_the_verdict_points_at_the_watermark(case) -> None:
    verdict = case.audit.verdict
    assert verdict.look_first
    group = verdict.groups[0]
    # The images that it names are the watermarked ones, but for one or two.
    named = torch.zeros(len(case.marked), dtype=torch.bool)
    named[group.images] = True
    assert int((named != torch.tensor(case.marked)).sum()) <= 2


def test_the_first_screen_shows_it(case) -> None:
    find_browser()
    with opened_browser() as browser:
        for width, height in ((1280, 800), (390, 844)):
            page = Page(browser, case.audit.report, width, height)
            boxes = [
                node.bounding_box() for node in page.page.locator(".alert").first.locator("h3, p, img").all()
            ]
            assert len(boxes) == 2 + 6
            assert all(box["y"] + box["height"] <= height for box in boxes)
            assert "possible shortcut" in page.page.locator(".alert").first.inner_text()
            page.context.close()


def test_the_crops_on_the_first_screen_hold_the_watermark(case) -> None:
    """The place of the glyph is found by its shape; it lies in the crops that the reader sees."""
    explained, group = case.audit.explained, case.audit.verdict.groups[0]
    k = group.concepts[0]
    order = sorted(group.images, key=lambda n: -float(explained.relevance[n, k]))[:6]
    glyph = planted.GLYPH - planted.GLYPH.mean()
    found = 0
    for n in order:
        grey = explained.pixels[n].mean(0)
        match = torch.nn.functional.conv2d((grey - grey.mean())[None, None], glyph[None, None])[0, 0]
        place = int(match.argmax())
        row, column = place // match.shape[1] + 5, place % match.shape[1] + 5  # middle of the glyph
        top, left, side = crop_box(explained.maps[n, k])
        found += top <= row < top + side and left <= column < left + side
    assert found >= 5
