"""The version of this package; imports nothing."""

__version__ = "0.1.0"
