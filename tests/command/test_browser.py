"""The report in a real browser: it shows, switches, renames, stays by itself, and serves everybody."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from .browser import Page, find_browser, opened_browser
from .running import succeeded

pytest.importorskip("playwright", reason="the browser tests need playwright")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    find_browser()
    with opened_browser() as found:
        yield found


@pytest.fixture
def page(browser, finished) -> Iterator[Page]:
    opened = Page(browser, finished.report)
    yield opened
    opened.context.close()
    assert opened.complaints == []
    assert opened.requests == []


def test_all_images_decode(page) -> None:
    sizes = page.page.evaluate(
        "Promise.all([...document.images].map(i => i.decode().then(() => [i.naturalWidth, i.alt.length])))"
    )
    # Six thumbnails; two concepts with six crops and maps, and four crops each at the top of the page.
    assert len(sizes) >= 6 + 2 * (6 + 6 + 4)
    assert all(width > 0 and alt > 0 for width, alt in sizes)


def test_switching_concepts_changes_the_picture(page) -> None:
    everything = page.picture()
    page.page.locator("#on-0").uncheck()
    without_first = page.picture()
    page.page.locator("#all-off").click()
    nothing = page.picture()
    page.page.locator("#all-on").click()
    assert len({everything, without_first, nothing}) == 3
    assert page.picture() == everything
    page.page.locator("#mode-sum").check()
    assert page.picture() != everything
    page.page.locator("#blend").fill("0")
    # With nothing blended in, the photograph is as without concepts.
    assert page.picture() == nothing


def test_keys_go_from_image_to_image(page) -> None:
    first = page.picture()
    thumbs = page.page.locator("#thumbs button")
    thumbs.nth(0).focus()
    page.page.keyboard.press("ArrowRight")
    assert thumbs.nth(1).get_attribute("aria-pressed") == "true"
    assert page.picture() != first
    page.page.keyboard.press("ArrowLeft")
    assert page.picture() == first
    page.page.keyboard.press("ArrowLeft")  # around the corner
    assert thumbs.nth(5).get_attribute("aria-pressed") == "true"


def test_names_are_kept_in_the_browser_the_copy_and_the_subspaces(browser, finished, tmp_path) -> None:
    page = Page(browser, finished.report)
    name = 'ear & "fur" </script><b>'
    page.page.locator("#name-0").fill(name)
    page.page.locator("#name-0").press("Tab")
    shown = page.page.locator("[data-name='0']").all_text_contents()
    assert len(shown) > 3
    assert set(shown) == {name}
    page.page.reload()
    assert page.page.locator("#name-0").input_value() == name  # kept in the browser
    page.page.locator("#name-1").fill(name)
    page.page.locator("#name-1").press("Tab")
    assert page.page.locator("#name-1").get_attribute("aria-invalid") == "true"
    assert "taken by another concept" in page.page.locator("#names-state").text_content()
    with page.page.expect_download() as copy:
        page.page.locator("#save-copy").click()
    copy.value.save_as(tmp_path / "copy.html")
    with page.page.expect_download() as saved:
        page.page.locator("#save-names").click()
    saved.value.save_as(tmp_path / "names.json")
    assert page.complaints == []
    page.context.close()

    fresh = Page(browser, tmp_path / "copy.html")  # another profile, which knows nothing
    assert fresh.page.locator("#name-0").input_value() == name
    assert fresh.page.locator("#concept-title-0").text_content().strip() == name
    assert fresh.page.locator("#name-1").input_value() == "S2"
    assert (fresh.complaints, fresh.requests) == ([], [])
    fresh.context.close()
    assert json.loads((tmp_path / "names.json").read_text()) == {"S1": name, "S2": "S2"}


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1280])
def test_accessibility_and_width(browser, finished, width: int, theme: str) -> None:
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="the check needs axe-core")
    page = Page(browser, finished.report, width, 844, theme)
    page.page.evaluate("document.querySelectorAll('details').forEach(node => { node.open = true; })")
    found = axe.Axe().run(page.page)
    assert found.violations_count == 0, found.generate_report()
    # Nothing sticks out to the side.
    assert page.page.evaluate("document.documentElement.scrollWidth") <= width
    page.context.close()


def test_it_prints(browser, finished, tmp_path) -> None:
    page = Page(browser, finished.report)
    page.page.emulate_media(media="print")
    assert not page.page.locator("nav").is_visible()
    page.page.pdf(path=tmp_path / "report.pdf")
    assert (tmp_path / "report.pdf").read_bytes().startswith(b"%PDF")
    page.context.close()


def test_it_can_be_read_without_scripts(browser, finished) -> None:
    context = browser.new_context(java_script_enabled=False)
    page = context.new_page()
    page.goto(finished.report.as_uri())
    assert page.locator(".lead").is_visible()
    assert page.locator("noscript p").is_visible()
    assert page.locator(".card img").count() == 2 * 2 * 6
    context.close()


def test_other_names_come_from_the_command(browser, finished, tmp_path) -> None:
    names = tmp_path / "names.json"
    names.write_text('["one", "two"]')
    import shutil

    work = Path(shutil.copytree(finished.work, tmp_path / "work"))
    succeeded("report", work, "--names", names, "--out", tmp_path / "named.html")
    page = Page(browser, tmp_path / "named.html")
    assert page.page.locator("#concept-title-1").text_content().strip() == "two"
    page.context.close()
