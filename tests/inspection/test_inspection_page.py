"""The page of a report, in a browser: nothing beyond the screen, nothing that a file says is run."""

from __future__ import annotations

from pathlib import Path

import pytest
from browser import browser, needs_browser
from pte_files import made
from selenium.webdriver.common.by import By

from exir_lowering import inspect

HOSTILE = made("theirs state").pte.replace(b"forward", b"<b>x</b")


def test_names_are_text() -> None:
    page = inspect(HOSTILE).to_html()
    assert "&lt;b&gt;x&lt;/b" in page and "<b>x</b" not in page and "<script" not in page
    assert "default-src 'none'" in page


@needs_browser
@pytest.mark.parametrize(("width", "dark"), [(1280, False), (390, True)])
def test_it_fits_the_screen(width: int, dark: bool, tmp_path: Path) -> None:
    with browser(width, dark=dark) as driver:
        for name, content in (("delegates", made("delegates").pte), ("hostile", HOSTILE)):
            path = tmp_path / f"{name}.html"
            path.write_text(inspect(content).to_html())
            driver.get(path.as_uri())
            driver.execute_script("document.querySelectorAll('details').forEach(one => one.open = true)")
            assert driver.execute_script("return document.documentElement.scrollWidth") <= width
            boxes = driver.find_elements(By.CSS_SELECTOR, "#bytes .chart > svg")
            sizes = [float(box.get_attribute(side).rstrip("%")) for box in boxes for side in ("width", "height")]
            area = sum(one * two for one, two in zip(sizes[::2], sizes[1::2], strict=True))
            assert len(boxes) >= 4 and abs(area / 100**2 - 1) < 0.001
            assert len(driver.find_elements(By.CSS_SELECTOR, ".method")) == (2 if name == "delegates" else 1)
            assert not [entry for entry in driver.get_log("browser") if entry["level"] == "SEVERE"]
            colour = driver.find_element(By.TAG_NAME, "body").value_of_css_property("background-color")
            assert (colour == "rgba(23, 23, 26, 1)") is dark
