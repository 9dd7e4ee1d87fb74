"""What the docs say runs: examples of public docstrings, and the pages' Python that needs no GPU. The README stays short."""

from __future__ import annotations

import doctest
import importlib
import re
from pathlib import Path

import pytest

import hipgroupgemm as hgg

ROOT = Path(__file__).parent.parent
# a GPU, or what is a table of names and says all by itself
NO_EXAMPLE = {"Device", "DeviceArray", "MatmulAlgorithm", "RaggedDotMode", "TuningReport", "set_allocator", "register_backend"}
NO_EXAMPLE |= {"unregister_backend", "backend_names", "clear_plan_cache", "__version__"}


def public() -> dict[str, object]:
    return {name: getattr(hgg, name) for name in hgg.__all__ if name not in NO_EXAMPLE}


@pytest.mark.parametrize("name", sorted(public()))
def test_examples_of_docstrings_run(name: str) -> None:
    found = public()[name]
    module = importlib.import_module(found.__module__)
    tests = [test for test in doctest.DocTestFinder(recurse=True).find(found, name, globs={**vars(module)}) if test.examples]
    assert tests, f"{name} has no example"
    for test in tests:
        report: list[str] = []
        result = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(test, out=report.append)
        assert not result.failed, "".join(report)


@pytest.mark.parametrize("page", ["docs/index.md"])
def test_the_pages_code_runs(page: str) -> None:
    names: dict[str, object] = {}
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(encoding="utf-8"), re.DOTALL)
    assert blocks
    for block in blocks:
        exec(compile(block, page, "exec"), names)


def test_all_code_of_the_docs_is_python() -> None:
    for path in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]:
        for block in re.findall(r"```python\n(.*?)```", path.read_text(encoding="utf-8"), re.DOTALL):
            compile(block, str(path), "exec")


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 150
