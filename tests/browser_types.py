"""The types of playwright for annotations; where it is not installed, which skips the tests of pages, they are any."""

from typing import Any

try:
    from playwright.sync_api import Browser, Locator, Page
except ModuleNotFoundError:
    Browser = Locator = Page = Any

__all__ = ["Browser", "Locator", "Page"]
