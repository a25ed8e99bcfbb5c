"""Check that the public functions of the ops have docstrings with every field, in order, and all other public names one.

Fields: a summary line, Shapes, Dtypes and units, Layout, Returns, Raises, Devices, Source. Exit code 1 lists what misses.
"""

from __future__ import annotations

import importlib
import inspect
import re
import sys

import kitchen_core.ops as ops
from kitchen_core.known_formats import KNOWN_FORMATS
from kitchen_core.ops._define import problem_builders

FIELDS = ("Shapes", "Dtypes and units", "Layout", "Returns", "Raises", "Devices", "Source")


def problems_of(name: str) -> list[str]:
    """What the docstring of one op's public function lacks."""
    function = getattr(ops, name, None)
    if function is None:
        return [f"{name}: the op has no public function in kitchen_core.ops"]
    text = inspect.getdoc(function) or ""
    at = [re.search(rf"^{field}: ", text, re.MULTILINE) for field in FIELDS]
    missing = [field for field, found in zip(FIELDS, at, strict=True) if not found]
    if missing:
        return [f"{name}: docstring lacks {', '.join(missing)}"]
    starts = [found.start() for found in at]
    return [] if starts == sorted(starts) else [f"{name}: docstring fields are not in the order {', '.join(FIELDS)}"]


def undocumented(package: str) -> list[str]:
    """Public names of a package, and public methods of its classes, that say nothing of themselves."""
    module = importlib.import_module(package)
    found = []
    for name in getattr(module, "__all__", ()):
        value = getattr(module, name)
        members = vars(value).items() if inspect.isclass(value) else ()
        own = [(n, getattr(m, "__func__", m)) for n, m in members if not n.startswith("_")]
        for path, what in ((name, value), *((f"{name}.{n}", m) for n, m in own)):
            if (inspect.isroutine(what) or inspect.isclass(what) or isinstance(what, property)) and not what.__doc__:
                found.append(f"{package}.{path}: no docstring")
    return found


def main() -> int:
    problems = [problem for name in sorted(problem_builders()) for problem in problems_of(name)]
    packages = {"kitchen_core", "kitchen_models", "kitchen_fallback_volta"}
    packages |= {names[0].replace("-", "_") for names in KNOWN_FORMATS.values()}
    problems += [problem for package in sorted(packages) for problem in undocumented(package)]
    print(
        "\n".join(problems) or f"{len(problem_builders())} ops have every docstring field, all public names a docstring"
    )
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
