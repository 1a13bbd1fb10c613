"""Shared by all tests. That this file lies here also lets them import `helpers`: pytest puts its folder on the path."""

from __future__ import annotations

from hypothesis import settings
from invoking import invoke

__all__ = ["invoke"]  # a fixture for all

# The same examples on every run: a red suite is red for everybody. Speed is not judged here, hence no deadline.
settings.register_profile("headwise", derandomize=True, database=None, deadline=None, max_examples=60)
settings.load_profile("headwise")
