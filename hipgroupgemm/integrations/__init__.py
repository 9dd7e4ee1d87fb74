"""Doors into frameworks. Each module imports its framework; nothing else of the package imports these."""
