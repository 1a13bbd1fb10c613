"""Reshape: share heads, prune heads, measure what it costs, heal, and write the result as a model folder."""
