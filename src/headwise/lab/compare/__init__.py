"""Comparisons: what changes in a small model when one thing about its heads changes, and what courses claim about it.

Each experiment is a short declaration in a file of its own; `experiment` runs it, `verdict` puts it into a sentence,
`claims` is the ledger of what courses say. `results` needs no torch.
"""
