"""Exercises: one attention, built a function at a time, each answer marked by the checker."""
