"""The cache as a command: filled, checked and pruned, with what each leaves on the disk."""

import logging
import os
from pathlib import Path

import pytest
from tiny_run import TinyRun

from diffsynth_lite.cli.main import main
from diffsynth_lite.ui.home.disk import WOULD_DELETE


def cache(run: TinyRun, task: str, *arguments: str) -> int:
    return main(["cache", task, "--config", str(run.config), *arguments])


def entries(run: TinyRun) -> dict[str, Path]:
    return {path.stem: path for path in (run.root / "cache").rglob("*.safetensors")}


def other_config(run: TinyRun, **changes: str) -> Path:
    """A second run on the same cache; ``changes`` are texts of its yaml and what they become."""
    text = run.config.read_text()
    for old, new in changes.items():
        assert old in text
        text = text.replace(old, new)
    path = run.root / "other.yaml"
    path.write_text(text)
    return path


def test_a_run_after_filling_encodes_nothing(tiny_run: TinyRun, request: pytest.FixtureRequest) -> None:
    assert cache(tiny_run, "fill") == 0
    assert not tiny_run.folder.exists()
    filled = {key: path.stat().st_mtime_ns for key, path in entries(tiny_run).items()}
    assert len(filled) == 5 + 2 + 2
    request.getfixturevalue("refuse_encoders")
    assert tiny_run.train("train.steps=1") == 0
    assert {key: path.stat().st_mtime_ns for key, path in entries(tiny_run).items()} == filled


def test_several_configs_of_one_cache_are_filled_together(
    tiny_run: TinyRun, caplog: pytest.LogCaptureFixture
) -> None:
    other = other_config(
        tiny_run, **{"width: 64": "width: 48", 'mixed_precision: "no"': "mixed_precision: bf16"}
    )
    caplog.set_level(logging.INFO)
    assert cache(tiny_run, "fill", "--config", str(other)) == 0
    assert len(entries(tiny_run)) == 2 * 5 + 4
    assert caplog.text.count("all of its 5 items are in the cache") == 2


def test_a_flipped_and_a_truncated_entry_are_found_and_made_again(
    tiny_run: TinyRun, caplog: pytest.LogCaptureFixture
) -> None:
    cache(tiny_run, "fill")
    before = {key: path.read_bytes() for key, path in entries(tiny_run).items()}
    flipped, cut, *_ = sorted(before)
    paths = entries(tiny_run)
    paths[flipped].write_bytes(before[flipped][:-1] + bytes([before[flipped][-1] ^ 1]))
    paths[cut].write_bytes(before[cut][:-9])
    caplog.set_level(logging.INFO)
    assert cache(tiny_run, "verify") == 0
    assert "7 entries are whole" in caplog.text
    assert "2 entries were damaged" in caplog.text
    assert entries(tiny_run).keys() == before.keys() - {flipped, cut}
    assert cache(tiny_run, "fill") == 0
    assert {key: path.read_bytes() for key, path in entries(tiny_run).items()} == before


def test_pruning_keeps_what_any_config_needs_and_drops_the_rest(
    tiny_run: TinyRun, caplog: pytest.LogCaptureFixture
) -> None:
    other = other_config(tiny_run, **{"width: 64": "width: 48"})
    assert cache(tiny_run, "fill", "--config", str(other)) == 0
    needed = entries(tiny_run).keys()
    assert cache(tiny_run, "fill", "data.height=48") == 0
    stranger = tiny_run.root / "cache" / "notes.txt"
    stranger.write_text("mine")
    more = [f"orders/{'a' * 32}.order", f"sealed/{'b' * 32}.table", f"parts/.tmp-0-of-2.memory-{'c' * 8}"]
    idle = [tiny_run.root / "cache" / name for name in more]
    for path in idle:
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"1")
        os.utime(path, (0, 0))
    assert len(entries(tiny_run)) == len(needed) + 5
    caplog.set_level(logging.INFO)
    assert cache(tiny_run, "prune", "--config", str(other), "--dry-run") == 0
    assert f"{WOULD_DELETE} 8 files, " in caplog.text
    assert len(entries(tiny_run)) == len(needed) + 5
    assert cache(tiny_run, "prune", "--config", str(other), "--yes") == 0
    assert "Deleted 8 files, " in caplog.text
    assert "(3 of them, 3 bytes, are orders of samples" in caplog.text
    assert not any(path.exists() for path in idle)
    assert entries(tiny_run).keys() == needed
    assert cache(tiny_run, "prune", "--yes") == 0
    assert len(entries(tiny_run)) == 9
    assert stranger.exists()
    assert cache(tiny_run, "prune") == 0  # nothing to ask for
    assert "holds nothing that the configs do not need" in caplog.text


@pytest.mark.parametrize(("answer", "left", "code"), [("y", 0, 0), ("n", 9, 2), (None, 9, 2)])
def test_pruning_asks_first(
    tiny_run: TinyRun,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
    answer: str | None,
    left: int,
    code: int,
) -> None:
    assert cache(tiny_run, "fill") == 0
    old = entries(tiny_run).keys()
    for path in (tiny_run.root / "data").glob("*.txt"):
        path.write_text(f"other {path.stem}")

    def reply(*_: object) -> str:
        if answer is None:
            raise EOFError
        return answer

    monkeypatch.setattr("builtins.input", reply)
    changes = ("data.height=48", "validation.prompts=[]")
    assert cache(tiny_run, "prune", *changes) == code
    assert len(entries(tiny_run).keys() & old) == left
    assert "Delete 9 files, " in capsys.readouterr().out
    assert ("nothing was deleted" in caplog.text) == (code == 2)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["fill", "data.cache=false"], "data.cache: is false in"),
        (["fill", "data.path=nowhere"], "nowhere: no such folder"),
        (["fill", "data.nonsense=1"], "data.nonsense"),
        (["prune", "--yes", "data.path=nowhere"], "nowhere: no such folder"),
    ],
)
def test_what_makes_no_sense_exits_with_2_and_touches_nothing(
    tiny_run: TinyRun, caplog: pytest.LogCaptureFixture, arguments: list[str], message: str
) -> None:
    assert cache(tiny_run, "fill") == 0
    before = entries(tiny_run).keys()
    assert cache(tiny_run, *arguments) == 2
    assert message in caplog.text
    assert entries(tiny_run).keys() == before


def test_configs_of_different_caches_are_refused_and_of_one_spelled_twice_are_not(
    tiny_run: TinyRun, caplog: pytest.LogCaptureFixture
) -> None:
    folder = f"cache_dir: {tiny_run.root}/cache"
    other = other_config(tiny_run, **{folder: f"cache_dir: {tiny_run.root}/another"})
    assert cache(tiny_run, "prune", "--config", str(other), "--yes") == 2
    assert "take those of one cache" in caplog.text
    other = other_config(tiny_run, **{folder: f"cache_dir: {tiny_run.root}/data/../cache"})
    assert cache(tiny_run, "fill", "--config", str(other)) == 0


def test_verify_and_prune_refuse_several_processes(
    tiny_run: TinyRun, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert cache(tiny_run, "prune") == 2
    assert "cache prune: needs one process, and WORLD_SIZE=2" in caplog.text
