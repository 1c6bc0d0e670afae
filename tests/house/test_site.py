"""The site of the documentation: opened from a folder, without a network, at the width of a phone, and searched."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from browser import browser, needs_browser
from folders import ROOT
from selenium.webdriver import Chrome
from selenium.webdriver.common.by import By
from selenium.webdriver.support.wait import WebDriverWait

pytestmark = [needs_browser, pytest.mark.nightly, pytest.mark.xdist_group("site")]

QUESTIONS = {
    "how do I share a kv cache": {"guides/language-models.html", "concepts/6-emit.html"},
    "why is my operator on the cpu": {"guides/see-and-check.html", "concepts/plan.html"},
    "how big is my file and why": {"guides/see-and-check.html", "inspect.html"},
    "quantise a model": {"guides/quantised-models.html"},
    "run a .pte in Python": {"quickstart.html", "reference/running.html"},
    "write my own backend": {"write-a-backend.html"},
    "wrong results after lowering": {"guides/see-and-check.html", "verify.html"},
    "dynamic shapes": {"quickstart.html", "torch-compile.html"},
    "two methods one file": {"quickstart.html"},
    "faster lowering cache": {"guides/make-it-faster.html", "cache.html"},
}
"""What people ask, and pages of which one is among the first three that the search finds."""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built."""
    folder = tmp_path_factory.mktemp("site")
    environment = {**os.environ, "PYTHON": sys.executable}
    subprocess.run([ROOT / ".ci" / "docs", "--site-dir", folder], check=True, env=environment, timeout=600)
    return folder


@pytest.fixture(scope="module")
def phone(site: Path) -> Iterator[Chrome]:
    """A browser as wide as a phone."""
    with browser(390, 844) as driver:
        yield driver


def test_pages_fit_and_load_nothing_from_elsewhere(site: Path, phone: Chrome) -> None:
    pages = [page for page in sorted(site.rglob("*.html")) if page.name != "404.html"]  # a server sends that one
    assert len(pages) > 40
    for page in pages:
        phone.get(page.as_uri())
        width = phone.execute_script("return document.documentElement.scrollWidth")
        assert width <= 390, f"{page.name} is {width} pixels wide"
    asked = [entry["message"] for entry in phone.get_log("performance") if "requestWillBeSent" in entry["message"]]
    assert asked and not [message for message in asked if '"url":"http' in message]
    assert not phone.get_log("browser")


@pytest.mark.parametrize("question", QUESTIONS)
def test_the_search_answers(site: Path, phone: Chrome, question: str) -> None:
    phone.get((site / "index.html").as_uri() + "?q=" + question.replace(" ", "+"))
    results = WebDriverWait(phone, 20).until(
        lambda driver: driver.find_elements(By.CSS_SELECTOR, ".md-search-result__item > a")
    )
    found = [str(result.get_attribute("href")).partition("#")[0].partition("?")[0] for result in results[:3]]
    pages = [page.removeprefix(site.as_uri() + "/") for page in found]
    assert QUESTIONS[question] & set(pages), pages
