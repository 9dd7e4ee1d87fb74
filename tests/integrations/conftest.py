"""Tests of doors into frameworks are collected where their framework is."""

from importlib.util import find_spec

collect_ignore_glob = [] if find_spec("torch") else ["test_torch*", "test_transformers*"]
