"""How large the package is, package by package: what `make measure` prints, and CI holds.

Nodes of Python's syntax tree are counted, not lines: a short line that must be read twice is longer than three lines.
"""

from __future__ import annotations

import ast
import functools
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path

import headwise

SOURCE = Path(headwise.__file__).parent
TESTS = Path(__file__).parent
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
OPTION = re.compile(r"(?<![\w-])--[a-z][a-z-]+")


@functools.cache  # several rules read each file
def parsed(source: str) -> ast.Module:
    return ast.parse(source)


@functools.cache
def all_nodes(tree: ast.AST) -> list[ast.AST]:
    """The node itself and all below it."""
    return list(ast.walk(tree))


def source_paths() -> list[Path]:
    """The modules of the package; solutions of exercises are read as texts."""
    return sorted(path for path in SOURCE.rglob("*.py") if path.parent != SOURCE / "learn" / "exercises")


def package_sources() -> tuple[dict[str, str], set[str]]:
    """The text of every module of the package by its name, and which of them are packages."""
    sources: dict[str, str] = {}
    packages: set[str] = set()
    for path in source_paths():
        parts = ["headwise", *path.relative_to(SOURCE).with_suffix("").parts]
        if parts[-1] == "__init__":
            parts.pop()
            packages.add(".".join(parts))
        sources[".".join(parts)] = path.read_text(encoding="utf-8")
    return sources, packages


def imports_of(module: str, source: str, is_package: bool, modules: set[str]) -> Iterator[str]:
    """Every module that a source text names in an import, wherever it stands, `import_module("...")` too."""
    for node in all_nodes(parsed(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            home = module.split(".") if is_package else module.split(".")[:-1]
            start = ".".join(home[: len(home) - node.level + 1]) if node.level else ""
            target = ".".join(part for part in (start, node.module) if part)
            names = [alias.name for alias in node.names if alias.name != "__version__"]
            # `from headwise.backends import loops` names a module; `import attend` from there only the package.
            submodules = [f"{target}.{name}" for name in names if f"{target}.{name}" in modules]
            yield from submodules
            if len(submodules) < len(names):
                yield target
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", getattr(node.func, "id", "")) == "import_module":
            yield from (arg.value for arg in node.args if isinstance(arg, ast.Constant) and isinstance(arg.value, str))


def package_name(module: str) -> str:
    """The folder that a module lies in; "top" for the files beside the folders."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 and (SOURCE / parts[1]).is_dir() else "top"


def sizes() -> dict[str, Counter[str]]:
    """The files and nodes of each package, solutions of exercises too."""
    by_package: dict[str, Counter[str]] = defaultdict(Counter)
    for path in SOURCE.rglob("*.py"):
        folder, *inside = path.relative_to(SOURCE).parts
        source = path.read_text(encoding="utf-8")
        by_package[folder if inside else "top"].update(files=1, nodes=len(all_nodes(parsed(source))))
    return dict(by_package)


def circles(sources: Mapping[str, str], packages: set[str]) -> list[list[str]]:
    """Groups of modules of one package that import one another, at the top of the file, in a function or for types."""
    reached: dict[str, set[str]] = {}
    for module, source in sources.items():
        inside = set(imports_of(module, source, module in packages, set(sources))) & sources.keys() - {module}
        reached[module] = {target for target in inside if package_name(target) == package_name(module)}
    for through in sources:  # Warshall: what a module reaches, those reach that reach it
        for targets in reached.values():
            if through in targets:
                targets |= reached[through]
    groups = {frozenset(other for other in reached[module] if module in reached[other]) for module in sources}
    return sorted(sorted(group) for group in groups if len(group) > 1)


def option_messages() -> list[str]:
    """Where the library, which speaks of arguments, names an `--option` of the command in a text it shows."""
    places: list[str] = []
    for module, source in package_sources()[0].items():
        if package_name(module) == "cli":
            continue
        tree = parsed(source)
        docstrings = _docstrings(tree)
        for node in all_nodes(tree):
            is_text = isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings
            if is_text and OPTION.search(node.value):
                places.append(f"{module}:{node.lineno}")
    return places


def _docstrings(tree: ast.Module) -> set[int]:
    """The ids of the nodes that are docstrings."""
    nodes: set[int] = set()
    for node in all_nodes(tree):
        first = node.body[0] if isinstance(node, (ast.Module, ast.ClassDef, *FUNCTIONS)) and node.body else None
        if isinstance(first, ast.Expr):
            nodes.add(id(first.value))
    return nodes


def options() -> list[str]:
    """Every option of every command, --help among them; arguments are not options."""
    import typer

    from headwise.cli.run import app

    group = typer.main.get_command(app)
    names: list[str] = []
    for command_name, command in group.commands.items():  # type: ignore[attr-defined]
        shown = command.get_params(command.make_context(command_name, [], resilient_parsing=True))
        names += [f"{command_name} --{parameter.name}" for parameter in shown if parameter.param_type_name == "option"]
    return names


def lines_of_tests() -> int:
    return sum(path.read_text(encoding="utf-8").count("\n") for path in TESTS.rglob("*.py"))


def main() -> None:
    packages = sizes()
    print(f"{'package':<9}{'nodes':>9}{'files':>7}")
    for package, size in {**dict(sorted(packages.items())), "all": sum(packages.values(), Counter())}.items():
        print(f"{package:<9}{size['nodes']:>9,}{size['files']:>7}")
    print(f"files of a package that import one another: {circles(*package_sources())}")
    print(f"messages of the library that name --options: {option_messages()}")
    print(f"options of all commands: {len(options())}")
    print(f"lines of tests: {lines_of_tests():,}")


if __name__ == "__main__":
    main()
