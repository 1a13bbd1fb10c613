"""Shared by the tests of this room."""

from small_models import by_paper, prose, shaken, tiny, tiny_config

__all__ = ["by_paper", "prose", "shaken", "tiny", "tiny_config"]  # fixtures
