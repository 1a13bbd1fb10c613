"""Draws records: in the terminal, and as one HTML file. Needs no torch."""
