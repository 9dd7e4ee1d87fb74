"""Tests of a door into a framework are collected where the framework is."""

from importlib.util import find_spec

collect_ignore_glob = [
    f"test_{door}*" for door, framework in {"torch": "torch", "transformers": "torch", "jax": "jax"}.items() if not find_spec(framework)
]
