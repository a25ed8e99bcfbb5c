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


@pytest.mark.parametrize(("page", "least"), [("parity.md", 40), ("reports.md", 100), ("wheels.md", 2)])
def test_every_test_named_on_a_page_exists(page, least):
    text = (ROOT / "docs" / page).read_text()
    named = re.findall(r"`([\w/.-]+\.py)::(\w+)`", text)
    assert len(named) >= least - 1, "the page must name our tests"
    missing = [f"{path}::{name}" for path, name in named if name not in functions_of(ROOT / path)]
    assert not missing


def test_every_report_has_its_row_and_its_test():
    rows = re.findall(r"^\| B(\d\d) .*$", (ROOT / "docs" / "reports.md").read_text(), re.MULTILINE)
    assert [int(row) for row in rows] == list(range(1, 76))
    lines = [line for line in (ROOT / "docs" / "reports.md").read_text().splitlines() if re.match(r"\| B\d\d", line)]
    assert not [line[:40] for line in lines if ".py::" not in line]
    tests = functions_of(ROOT / "tests_integration" / "test_reports.py")
    named = {n for n in tests if re.match(r"test_b\d\d", n)}
    page = "\n".join(lines)
    assert not {n for n in named if n not in page}, "every test of a report is named in the page"


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
