"""The house of DESIGN.md: imports go down its floors, without circles and in sight; no file past 500 lines, few lines in all."""

from __future__ import annotations

import ast
from pathlib import Path

import hipgroupgemm

ROOT = Path(hipgroupgemm.__file__).parent
MOST_LINES, MOST_LINES_A_FILE = 25_177, 500  # lines: 19,000 are wanted, and this goes down with the code

FLOORS = (
    ("__main__",),
    ("cli",),
    ("sweep",),
    ("benchmark",),
    ("tuning",),
    ("measure",),
    ("integrations",),
    ("moe",),
    ("__init__",),
    ("api",),
    ("plan",),
    ("dispatch",),
    ("caches",),
    ("hooks",),
    ("store",),
    ("backends",),
    ("problem",),
    ("operands",),
    ("processes",),
    ("runtime",),
    ("native",),
    ("config",),
    ("config_rules",),
    ("config_types",),
    ("version",),
)
FLOOR = {room: height for height, rooms in enumerate(reversed(FLOORS)) for room in rooms}
PACKAGE = "hipgroupgemm"


def modules() -> dict[str, Path]:
    """Every module of the package by its dotted name below the package, "" for the package itself."""
    return {
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix("__init__").rstrip("."): path for path in ROOT.rglob("*.py")
    }


def room_of(module: str) -> str:
    return module.partition(".")[0] or "__init__"


def imports(path: Path, known: dict[str, Path]) -> list[tuple[str, bool, str]]:
    """(module, whether a function hides it, the line) of every import of the package's own; type checkers' are left out."""
    tree = ast.parse(path.read_text())
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    hidden = {id(inner) for function in functions for inner in ast.walk(function)}
    checks = [node for node in ast.walk(tree) if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)]
    typing = {id(inner) for check in checks for inner in ast.walk(check)}
    found = []
    for node in ast.walk(tree):
        if id(node) in typing or not isinstance(node, ast.Import | ast.ImportFrom):
            continue
        where = f"{path.relative_to(ROOT)}:{node.lineno}"
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{where}: a relative import"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            names = [alias.name for alias in node.names]
        for name in names:
            if name.partition(".")[0] != PACKAGE:
                continue
            module = name.removeprefix(PACKAGE).lstrip(".")
            while module not in known:
                module = module.rpartition(".")[0]
            found.append((module, id(node) in hidden, where))
    return found


def test_imports_go_down_the_floors():
    known, wrong = modules(), []
    for name, path in known.items():
        room = room_of(name)
        for target, hidden, where in imports(path, known):
            floor = FLOOR[room_of(target)]
            if target and floor > FLOOR[room]:
                wrong.append(f"{where}: {room} imports {target}, from above")
            if hidden and room != "__init__":
                wrong.append(f"{where}: {target} is imported in a function")
    assert not wrong, "\n".join(wrong)


def test_no_circle_of_imports():
    known = modules()
    edges = {name: {target for target, _, _ in imports(path, known) if target not in ("", name)} for name, path in known.items()}
    state: dict[str, int] = {}

    def visit(name: str, way: tuple[str, ...]) -> None:
        assert state.get(name) != 1, " -> ".join((*way, name))
        if name not in state:
            state[name] = 1
            for target in edges[name]:
                visit(target, (*way, name))
            state[name] = 2

    for name in edges:
        visit(name, ())


def test_the_house_is_small():
    files = [path for path in ROOT.rglob("*") if path.suffix in (".py", ".cpp", ".hpp", ".h", ".map")]
    lines = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in files}
    assert not [f"{name}: {count}" for name, count in lines.items() if count > MOST_LINES_A_FILE]
    assert sum(lines.values()) <= MOST_LINES
