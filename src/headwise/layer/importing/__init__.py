"""Attention layers of other libraries and of courses, made into ours, each with a measured difference."""
