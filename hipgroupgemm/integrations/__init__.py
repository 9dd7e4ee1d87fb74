"""Doors into frameworks: each module here imports its framework, and nothing else of the package imports it."""
