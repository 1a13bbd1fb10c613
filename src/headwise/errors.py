"""The one family of errors. A message gives the local fact, the numbers on both sides, and what to do."""

from __future__ import annotations


class HeadwiseError(ValueError):
    """Something the caller gave cannot be honoured; the message says what, with the numbers, and the remedy."""


class MissingError(HeadwiseError, KeyError, AttributeError):
    """There is nothing of that name, neither as an item nor as an attribute."""

    __str__ = Exception.__str__  # that of KeyError shows the message in quotes
