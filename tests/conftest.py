"""Shared by all tests. `helpers` is importable because this file puts its folder on the path (pytest, rootdir style)."""

from __future__ import annotations

from hypothesis import settings

# The same examples on every run: a red suite is red for everybody. Speed is not judged here, hence no deadline.
settings.register_profile("headwise", derandomize=True, database=None, deadline=None, max_examples=60)
settings.load_profile("headwise")
