"""Counts of the checkout that `make size` prints and `test_house` holds: lines, modules, importers, folders, cycles."""

import ast
from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
ROOMS = ("foundation", "telemetry", "features", "models", "evaluation", "policy", "pipeline", "serving", "scheduler")
ROOMS += ("simulator", "predrain")
SMALL = 80
"""Lines below which a module with one importer usually belongs into that importer."""


@dataclass(frozen=True)
class House:
    """The product's modules, by dotted name, and what each imports of the others."""

    files: dict[str, Path]

    @cached_property
    def lines(self) -> dict[str, int]:
        return {name: line_count(path) for name, path in self.files.items()}

    @cached_property
    def imports(self) -> dict[str, set[str]]:
        """Modules that each module imports, at any depth of its code; a package where one of its own names is meant."""
        return {name: self._imported(path) - {name} for name, path in self.files.items()}

    def _imported(self, path: Path) -> set[str]:
        imports: set[str] = set()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                imports |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                for alias in node.names:
                    inner = f"{node.module}.{alias.name}"
                    imports.add(inner if inner in self.files else node.module)
        return imports & self.files.keys()

    @cached_property
    def single_importer(self) -> list[str]:
        """Modules, packages aside, that exactly one other module imports."""
        importers = Counter(target for targets in self.imports.values() for target in targets)
        return sorted(name for name, count in importers.items() if count == 1 and not self.is_package(name))

    @cached_property
    def small_single_importer(self) -> list[str]:
        """Those of them that are small."""
        return [name for name in self.single_importer if self.lines[name] < SMALL]

    @cached_property
    def folders(self) -> Counter[str]:
        """Modules by folder, without its ``__init__``."""
        inside = (path for name, path in self.files.items() if not self.is_package(name))
        return Counter(str(path.parent.relative_to(ROOT)) for path in inside)

    @cached_property
    def cycles(self) -> list[list[str]]:
        """Groups of modules that reach one another by their imports."""
        reached = {name: self._reached(name) for name in self.files}
        groups = {
            frozenset(other for other in reached[name] if name in reached[other])
            for name in self.files
            if name in reached[name]
        }
        return sorted(sorted(group) for group in groups)

    def _reached(self, name: str) -> set[str]:
        reached: set[str] = set()
        waiting = list(self.imports[name])
        while waiting:
            module = waiting.pop()
            if module not in reached:
                reached.add(module)
                waiting += self.imports[module]
        return reached

    def is_package(self, name: str) -> bool:
        return self.files[name].name == "__init__.py"


def read_house() -> House:
    paths = [path for room in ROOMS for path in sorted((ROOT / room).rglob("*.py"))]
    return House(
        {".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path for path in paths}
    )


def line_count(path: Path) -> int:
    return len(path.read_text(encoding="utf-8").splitlines())


def lines_below(folder: str) -> int:
    return sum(line_count(path) for path in (ROOT / folder).rglob("*.py"))


def main() -> None:
    house = read_house()
    rows = [(f"  {room}/", lines_below(room)) for room in ROOMS]
    rows = [("product lines", sum(count for _, count in rows)), *rows]
    rows += [(f"{other} lines", lines_below(other)) for other in ("benchmarks", "tests")]
    rows += [("modules", len(house.files)), ("modules with one importer", len(house.single_importer))]
    rows += [(f"  of those under {SMALL} lines", len(house.small_single_importer))]
    (folder, count), *_ = house.folders.most_common(1)
    rows += [(f"modules of the largest folder ({folder})", count), ("module cycles", len(house.cycles))]
    for what, number in rows:
        print(f"{number:>9,}  {what}")


if __name__ == "__main__":
    main()
