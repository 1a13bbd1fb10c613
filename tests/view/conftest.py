"""The report of a module's own in a real Chromium: the module has a fixture `report`, the path of one."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from browsing import Opener

if TYPE_CHECKING:
    from playwright.sync_api import Page


@pytest.fixture
def open_report(open_page: Opener, report: Path) -> Opener:
    """Opens the report, and waits until all of its pictures are drawn."""
    from report_browsing import drawn

    def opened(width: int = 1280, height: int = 900, path: Path = report, **options: Any) -> Page:
        page = open_page(path, width, height, inside=True, **options)
        drawn(page)
        page.evaluate("byId('scales').open = true")
        return page

    return opened
