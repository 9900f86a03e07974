"""The package's face: names that load when used, no torch where none is needed, versions, rooms in one direction."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

import pipeloom

PACKAGE = Path(pipeloom.__file__).parent
#: each room's floor; a room imports only from its own room and from lower floors
FLOORS = {
    "schedules": 0,
    "program": 1,
    "strategy": 2,
    "planning": 1,  # pure: it imports schedules alone; passes ask it where to cut
    "passes": 2,
    "runtime": 2,
    "footprint": 2.5,
    "planner": 3,
    "fleet": 3,
    "report": 3,
    "auto": 3.5,
    "api": 4,
    "generation": 4,
    "proposals": 4,
    "local": 5,
    "training": 5,
    "prompting": 5.5,
    "cli": 6,
}


def run(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    "module",
    [
        "pipeloom",
        "pipeloom.schedules",
        "pipeloom.planning",
        "pipeloom.strategy",
        "pipeloom.report.trace",
        "pipeloom.cli",
    ],
)
def test_no_torch_is_imported(module: str) -> None:
    done = run(f"import sys, {module}; sys.exit('torch' in sys.modules and 'torch is imported')")
    assert done.returncode == 0, done.stderr


def test_strategy_and_plan_need_no_torch() -> None:
    done = run("import sys, pipeloom; pipeloom.Strategy(), pipeloom.Plan; sys.exit('torch' in sys.modules)")
    assert done.returncode == 0, done.stderr


def test_every_name_loads() -> None:
    for name in pipeloom.__all__:
        assert getattr(pipeloom, name) is not None, name
        assert name in dir(pipeloom)


def test_an_unknown_name_says_what_there_is() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Pipline'; it has Pass, Pipeline"):
        importlib.import_module("pipeloom").Pipline  # noqa: B018


def room_of(path: Path) -> str:
    parts = path.relative_to(PACKAGE).parts
    return parts[0].removesuffix(".py")


def imported_rooms(path: Path) -> set[str]:
    """The rooms that a file imports, anywhere in it."""
    rooms = set()
    package = ("pipeloom", *path.relative_to(PACKAGE).parts[:-1])
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package[: len(package) - node.level + 1]) if node.level else ""
            whole = ".".join(filter(None, [base, node.module]))
            names = [f"{whole}.{alias.name}" for alias in node.names] if whole == "pipeloom" else [whole]
        rooms |= {name.split(".")[1] for name in names if name.startswith("pipeloom.")}
    return rooms


FILES = [path for path in sorted(PACKAGE.rglob("*.py")) if path != PACKAGE / "__init__.py"]


@pytest.mark.parametrize("path", FILES, ids=[str(path.relative_to(PACKAGE)) for path in FILES])
def test_nothing_imports_upwards(path: Path) -> None:
    own = room_of(path)
    for room in imported_rooms(path) - {own}:
        assert FLOORS[room] < FLOORS[own], f"{own} imports {room}, which is not below it"
