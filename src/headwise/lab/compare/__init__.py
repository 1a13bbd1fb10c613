"""Comparisons: what one change of its heads does to a small model, and what courses claim about it."""
