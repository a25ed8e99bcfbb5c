"""The tables of docs/kernels/w4a8.md are those that bench/tables.py makes from the recorded results."""

from __future__ import annotations

import importlib.util
from pathlib import Path

TABLES = Path(__file__).resolve().parents[1] / "bench/tables.py"


def test_tables_are_those_of_the_recorded_results():
    spec = importlib.util.spec_from_file_location("w4a8_tables", TABLES)
    tables = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tables)
    text = tables.PAGE.read_text()
    found = list(tables.MARKED.finditer(text))
    assert len(found) == 11
    for match in found:
        assert match[3] == tables.TABLES[match[1]](match[2]), match[0].split("\n")[0]
