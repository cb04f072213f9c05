"""The rooms of the package: which imports which, and who uses what is not public elsewhere."""

from __future__ import annotations

import ast
import graphlib
import pathlib
import re

PACKAGE = pathlib.Path(__file__).parents[2] / "het_tf"

# A room imports from rooms before it; rooms of one line do not import from one another. Modules at
# the top of the package are rooms of their own.
ROOMS = [
    ["compat"],
    ["runtime"],
    ["ops", "initializers", "lifetimes", "optimizers", "cache_config", "row_storage", "top"],
    ["tables"],
    ["storage"],
    ["layers", "distribute"],
    ["checkpoint", "server"],
    ["export", "interop"],
    ["serving", "keras", "datasets", "data"],
    ["planner"],
]
LINE = {room: line for line, rooms in enumerate(ROOMS) for room in rooms}

# The server template is a program: it imports the server that it then is.
PROGRAMS = {("het_tf.distribute.cluster.fork_server", "het_tf.server")}

NOT_PUBLIC = re.compile(
    r"\btensorflow\.python\b|\bkeras\.src\b|\b_getframe\b|\bf_locals\b|\bget_objects\b"
    r"|__bases__ =|__class__ ="
)


def _modules() -> dict[str, pathlib.Path]:
    """Paths by dotted names; of a package its `__init__.py`."""
    modules = {}
    for path in PACKAGE.rglob("*.py"):
        parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
        modules[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return modules


def _imports() -> list[tuple[str, str]]:
    """Pairs of modules of which the first imports the second, for type checking too."""
    modules, pairs = _modules(), set()
    for name, path in modules.items():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                pairs |= {(name, alias.name) for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                for alias in node.names:
                    full = f"{node.module}.{alias.name}"
                    pairs.add((name, full if full in modules else node.module))
    return sorted((a, b) for a, b in pairs if b in modules and a != b)


def _room(module: str) -> str:
    return module.split(".")[1]


def test_no_import_goes_upward():
    inside = [(a, b) for a, b in _imports() if "het_tf" not in (a, b)]
    assert len(inside) > 300
    upward = [
        (a, b)
        for a, b in inside
        if _room(a) != _room(b) and LINE[_room(a)] <= LINE[_room(b)] and (a, b) not in PROGRAMS
    ]
    assert upward == []


def test_no_packages_import_each_other():
    modules, graph = _modules(), {}
    packages = {m: m if modules[m].name == "__init__.py" else m.rpartition(".")[0] for m in modules}
    for a, b in _imports():
        if packages[a] != packages[b] and "het_tf" not in (packages[a], packages[b]):
            graph.setdefault(packages[a], set()).add(packages[b])
    assert len(graph) > 10
    graphlib.TopologicalSorter(graph).prepare()  # raises a CycleError that shows the circle


def test_only_compat_uses_what_is_not_public():
    used = {
        (str(path.relative_to(PACKAGE)), match.group(0))
        for path in PACKAGE.rglob("*.py")
        for match in NOT_PUBLIC.finditer(path.read_text())
    }
    assert {path for path, _ in used if not path.startswith("compat/")} == set()
    assert len(used) > 4
