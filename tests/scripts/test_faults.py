"""The fault program at its smallest scale, what it reports, and the verdict on each changed setting."""

import re
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest
from faults.bench import Bench, Fault
from faults.driver import all_faults, main, tried
from faults.settings import BASE, NEEDED, TABLES, Change, Verdict
from processes import LIMIT_S, Program
from tiny_run import REPOSITORY, write_config

from diffsynth_lite.config import AllowedChange, load_config, section_types
from diffsynth_lite.errors import DifferentRunError
from diffsynth_lite.training.checkpoint.resume import (
    RunFingerprint,
    require_same,
    settings_fingerprint,
)

FAULTS = all_faults()
CASES = [(verdict, key, change) for verdict, table in TABLES.items() for key, change in table.items()]
IN_CI = ("R1", "R6", "R7", "K1", "D3")
"""What no other test proves, in little time; tests/training and tests/runs have parts of the others."""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="needs fork and signals")
def test_a_run_survives_what_is_tried_in_ci(tmp_path: Path) -> None:
    script = REPOSITORY / "scripts" / "faults" / "__main__.py"
    program = Program(script, ["--ci", "--only", ",".join(IN_CI)], tmp_path / "printed")
    assert program.wait() == 0, program.printed()
    rows = [line.split("|") for line in program.printed().splitlines() if line.startswith("|")]
    assert [row[1].strip() for row in rows if row[1].strip() in FAULTS] == list(IN_CI)


def in_child(prove, folder: Path, *, limit_s: float = LIMIT_S):
    fault = Fault(name="X", what="a fault", bar="nothing", prove=prove, limit_s=limit_s)
    return tried(fault, folder, scale="ci", seed=3)


@pytest.mark.skipif(sys.platform != "linux", reason="needs fork")
def test_an_item_reports_what_came_of_it_why_it_failed_and_that_it_took_too_long(tmp_path: Path) -> None:
    def holds(bench: Bench) -> str:
        return f"once, with seed {bench.seed}"

    def fails(_bench: Bench) -> str:
        raise AssertionError("a step was lost")

    def hangs(_bench: Bench) -> str:
        time.sleep(60)
        return "never"

    folders = [tmp_path / name for name in ("holds", "fails", "hangs")]
    for folder in folders:
        folder.mkdir()
    held = in_child(holds, folders[0])
    assert held.result == "once, with seed 3"
    failed = in_child(fails, folders[1])
    assert failed.result is None
    assert "AssertionError: a step was lost" in failed.last_lines()
    hanging = in_child(hangs, folders[2], limit_s=0.3)
    assert hanging.result is None
    assert "killed after 0.3 s" in hanging.last_lines()


def test_an_item_names_what_it_needs_and_is_missing() -> None:
    for fault in FAULTS.values():
        assert set(fault.missing()) <= set(fault.needs)
    assert replace(FAULTS["N2"], needs=("sh", "no-such-program")).missing() == ["no-such-program"]


def test_the_faults_are_those_of_the_page_about_them() -> None:
    page = (REPOSITORY / "docs" / "reliability.md").read_text()
    assert set(FAULTS) == set(re.findall(r"^\| ([A-Z]\d) \|", page, re.MULTILINE))


def test_an_unknown_item_is_refused() -> None:
    with pytest.raises(SystemExit, match="Z9"):
        main(FAULTS, ["--only", "Z9"])


def fingerprint(root: Path, change: Change) -> RunFingerprint:
    config = load_config(root / "tiny.yaml", [*BASE, *change]).config
    return settings_fingerprint(config, model_fingerprint="weights")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("drift")
    (folder / "data").mkdir()
    write_config(folder, folder / "model", folder / "data")
    return folder


@pytest.fixture(scope="module")
def saved(root: Path) -> RunFingerprint:
    return fingerprint(root, ())


def test_every_setting_is_tried_once() -> None:
    sections = {name: kind for name, kind in section_types().items() if name != "resume"}
    settings = [f"{name}.{key}" for name, section in sections.items() for key in section.model_fields]
    assert sorted(key for _, key, _ in CASES) == sorted(settings)


@pytest.mark.parametrize(("verdict", "key", "change"), CASES, ids=[key for _, key, _ in CASES])
def test_a_change_of_one_setting_is_refused_or_allowed_by_name_or_free(
    verdict: Verdict, key: str, change: Change, root: Path, saved: RunFingerprint
) -> None:
    needed = NEEDED.get(key, ())
    changed = fingerprint(root, (*needed, *change))
    if verdict == "free":
        assert changed == (fingerprint(root, needed) if needed else saved)
        return
    with pytest.raises(DifferentRunError, match=rf"{key} was .*, is "):
        require_same(changed, saved, where="runs/a")
    permission = "data" if verdict == "data" else key
    allow = get_args(AllowedChange) if verdict == "never" else (permission,)
    if verdict == "never":
        with pytest.raises(DifferentRunError, match=rf"{key} was "):
            require_same(changed, saved, where="runs/a", allow=allow)
    else:
        assert key in [found.key for found in require_same(changed, saved, where="runs/a", allow=allow)]
