"""Each setting changed alone: the verdict of the fingerprint is the one that the documents give."""

from pathlib import Path
from typing import get_args

import pytest
from faults.settings import BASE, NEEDED, TABLES, Change, Verdict
from tiny_run import write_config

from diffsynth_lite.config import AllowedChange, load_config, section_types
from diffsynth_lite.errors import DifferentRunError
from diffsynth_lite.training.checkpoint.resume import (
    RunFingerprint,
    require_same,
    settings_fingerprint,
)

CASES = [(verdict, key, change) for verdict, table in TABLES.items() for key, change in table.items()]


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
