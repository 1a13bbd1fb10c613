"""Comparisons: what changes in a small model when one thing about its heads changes, and what courses claim about it.

Each experiment is a short declaration; `run` runs it, `results` holds what it gave and puts it into a sentence, and
`claims` is the ledger of what courses say. `results` needs no torch.
"""
