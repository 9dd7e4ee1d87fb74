"""Builds the package. Everything that is plain metadata stands in pyproject.toml."""

from setuptools import setup

setup()
