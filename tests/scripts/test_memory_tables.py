"""The tables of what training takes: rows for each format and number of streamed blocks, and each release."""

import memory_tables
import pytest
from memory_tables import main

SANA = "Sana 1.0 1.6B"


def table(printed: str) -> list[list[str]]:
    lines = [line for line in printed.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_rows_are_the_formats_with_no_half_of_the_and_all_blocks_streamed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(memory_tables, "STEPS", {"every block": memory_tables.STEPS["every block"]})
    main(["--model", SANA])
    headings, _, *rows = table(capsys.readouterr().out)
    assert headings == ["weights in", "streamed", "weights", "slots", "every"]
    assert [row[:2] for row in rows] == [
        [name, streamed] for name in ("bfloat16", "int8", "nf4") for streamed in ("0", "10", "all")
    ]
    resident = [float(row[2]) for row in rows]
    assert resident[0] > resident[1] > resident[2]
    assert resident[0] > resident[3] > resident[6]
    # In brackets: what is on the host.
    assert ["(" in row[4] for row in rows] == [False, True, True] * 3
