"""The one family of errors. A message gives the local fact, the numbers on both sides, and what to do."""

from __future__ import annotations


class HeadwiseError(ValueError):
    """Something the caller gave cannot be honoured; the message says what, with the numbers, and the remedy."""
