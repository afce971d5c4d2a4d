"""The house keeps its shape: imports go down, nothing is tied to one system, files stay small."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FLOORS = {"protocol": 0, "model": 1, "engine": 2, "ring": 3, "coordinator": 4, "api": 5, "ui": 5, "cli": 6}
MAX_LINES = 500

POSIX_ONLY = frozenset({"fcntl", "grp", "posix", "pty", "pwd", "resource", "syslog", "termios", "tty", "nis", "spwd"})
POSIX_CALLS = frozenset({"add_signal_handler", "fork", "forkpty", "geteuid", "getuid", "killpg", "mkfifo", "setsid"})
UNPICKLERS = frozenset({"pickle", "cPickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"})


@cache
def sources() -> dict[str, Path]:
    """From a module's dotted name to its file, for all of ``swarm/`` and ``node.py``."""
    found = {"node": ROOT / "node.py"}
    for path in sorted((ROOT / "swarm").rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


@cache
def tree(module: str) -> ast.Module:
    return ast.parse(sources()[module].read_text(encoding="utf-8"), str(sources()[module]))


def imported(syntax: ast.AST) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of every import; of ``from a import b`` both ``a`` and ``a.b``."""
    for node in ast.walk(syntax):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports name their module in full"
            assert node.module is not None
            yield node.lineno, node.module
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)


def called(syntax: ast.AST) -> Iterator[tuple[int, str]]:
    """(line, last part of the name) of every call."""
    for node in ast.walk(syntax):
        if isinstance(node, ast.Call):
            name = node.func
            if isinstance(name, ast.Attribute):
                yield node.lineno, name.attr
            elif isinstance(name, ast.Name):
                yield node.lineno, name.id


def floor(module: str) -> int | None:
    parts = module.split(".")
    return FLOORS[parts[1]] if parts[0] == "swarm" and len(parts) > 1 else None


def upward(module: str, syntax: ast.AST) -> list[str]:
    """Imports of `module` that go up, or across from one package of a floor to another."""
    own, found = floor(module), []
    for line, name in imported(syntax):
        other = floor(name)
        if own is None or other is None:
            continue
        if other > own or (other == own and name.split(".")[1] != module.split(".")[1]):
            found.append(f"{module}:{line} imports {name}")
    return found


def cycles(edges: dict[str, set[str]]) -> list[list[str]]:
    """One cycle for each module that reaches itself."""
    found = []
    for start in edges:
        stack, seen = [(start, [start])], set()
        while stack:
            module, way = stack.pop()
            for target in edges.get(module, ()):
                if target == start:
                    found.append([*way, start])
                elif target not in seen:
                    seen.add(target)
                    stack.append((target, [*way, target]))
    return found


def test_every_package_has_a_floor() -> None:
    packages = {path.name for path in (ROOT / "swarm").iterdir() if path.is_dir() and not path.name.startswith("__")}
    assert packages <= set(FLOORS)


@pytest.mark.parametrize("module", sorted(sources()))
def test_imports_go_down(module: str) -> None:
    assert upward(module, tree(module)) == []


def test_no_module_imports_itself_by_a_way_round() -> None:
    edges = {
        module: {name for _, name in imported(tree(module)) if name in sources() and name != module}
        for module in sources()
    }
    assert cycles(edges) == []


@pytest.mark.parametrize("module", sorted(sources()))
def test_runs_on_windows_too(module: str) -> None:
    tops = {name.split(".")[0] for _, name in imported(tree(module))}
    assert tops.isdisjoint(POSIX_ONLY)
    assert [(line, name) for line, name in called(tree(module)) if name in POSIX_CALLS] == []


@pytest.mark.parametrize("module", sorted(sources()))
def test_nothing_is_unpickled_or_executed(module: str) -> None:
    tops = {name.split(".")[0] for _, name in imported(tree(module))}
    assert tops.isdisjoint(UNPICKLERS)
    builtins = {node.func.id for node in ast.walk(tree(module)) if isinstance(node, ast.Call) and named(node)}
    assert builtins.isdisjoint({"eval", "exec", "compile"})
    assert "trust_remote_code=True" not in sources()[module].read_text(encoding="utf-8")


def named(node: ast.Call) -> bool:
    return isinstance(node.func, ast.Name)


@pytest.mark.parametrize("module", sorted(sources()))
def test_no_coroutine_sleeps_the_thread(module: str) -> None:
    assert sleepers(tree(module)) == []


def sleepers(syntax: ast.AST) -> list[str]:
    """Coroutines that call ``time.sleep``."""
    return [
        f"{function.name}:{node.lineno}"
        for function in ast.walk(syntax)
        if isinstance(function, ast.AsyncFunctionDef)
        for node in ast.walk(function)
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "time.sleep"
    ]


@pytest.mark.parametrize("module", sorted(sources()))
def test_files_are_small_and_say_what_they_are_for(module: str) -> None:
    lines = len(sources()[module].read_text(encoding="utf-8").splitlines())
    assert lines <= MAX_LINES, f"{lines} lines"
    assert ast.get_docstring(tree(module))


def test_the_checks_find_what_they_look_for() -> None:
    assert upward("swarm.model.cut", ast.parse("from swarm.engine.paged import PagedEngine")) != []
    assert upward("swarm.api.server", ast.parse("from swarm.ui import rows")) != []
    assert upward("swarm.ring.worker", ast.parse("from swarm.engine.base import Engine")) == []
    assert sleepers(ast.parse("async def f():\n    time.sleep(1)")) == ["f:2"]
    assert cycles({"a": {"b"}, "b": {"c"}, "c": {"a"}}) != []
    assert cycles({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == []
