"""The documentation names tests, files and environment variables that exist."""

import ast
import importlib.util
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SOURCES = [
    p
    for folder in ("packages", "tools", "tests_integration")
    for p in (ROOT / folder).rglob("*.py")
    if "build" not in p.parts
]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


def test_every_test_named_in_the_parity_page_exists():
    page = (ROOT / "docs" / "parity.md").read_text()
    named = re.findall(r"`([\w/.-]+\.py)::(\w+)`", page)
    assert len(named) >= 40, "the page must name our tests"
    missing = [f"{path}::{name}" for path, name in named if name not in functions_of(ROOT / path)]
    assert not missing


def functions_of(path):
    """Names of all functions in a file; none where there is no such file."""
    if not path.exists():
        return set()
    return {node.name for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef)}


def test_every_environment_variable_is_documented():
    used = {v for p in SOURCES for v in re.findall(r"\bKITCHEN_[A-Z0-9_]+\b(?=[\"'])", p.read_text())}
    used -= {"KITCHEN_ABI"}
    page = (ROOT / "docs" / "environment.md").read_text()
    assert used
    assert not {v for v in used if f"`{v}`" not in page}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_and_paths_lead_somewhere(page):
    text = page.read_text()
    prose = re.sub(r"```.*?```|`[^`]*`|^ {4}.*?$", "", text, flags=re.DOTALL | re.MULTILINE)
    for target in re.findall(r"\]\(([^)#:]+)\)", prose):
        assert (page.parent / target).exists(), target
    for path in re.findall(r"`((?:packages|docs|tools|tests_integration|shared_cuda|benchmarks)/[\w/.-]+\.\w+)`", text):
        assert (ROOT / path).exists(), path


def test_no_module_is_longer_than_500_lines():
    modules = list((ROOT / "packages").glob("*/src/**/*.py"))
    assert len(modules) > 30
    assert not {str(p): n for p in modules if (n := len(p.read_text().splitlines())) > 500}


def test_the_support_table_is_up_to_date():
    spec = importlib.util.spec_from_file_location("support_table", ROOT / "tools" / "support_table.py")
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    readme = (ROOT / "README.md").read_text()
    assert tool.written(readme) == readme, "run: uv run python tools/support_table.py --write"
