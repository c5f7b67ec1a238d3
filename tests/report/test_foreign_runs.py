"""Run folders of somebody else: whatever is in the place of a file, the page of the others is there."""

import json
import os
import resource
import traceback
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr, redirect_stdout
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from processes import FORKED
from run_folders import full_folder

from diffsynth_lite.cli.main import main
from diffsynth_lite.errors import Problems
from diffsynth_lite.report.charts import Series, read_series
from diffsynth_lite.report.run_report import read_run
from diffsynth_lite.report.server import RunPages
from diffsynth_lite.run_folder.folder import RunFolder, find_runs
from diffsynth_lite.run_folder.metrics import MetricsFile, read_items
from diffsynth_lite.training.checkpoint.resume import ResumePolicy
from diffsynth_lite.training.checkpoint.store import CheckpointStore

LIMIT_S = 300.0
"""A page takes a second; only a hang takes that long."""
MEMORY_BYTES = 1 << 30
"""That reading may take next to what a process has: an endless file takes more."""
DEEP = "[" * 500 + "]" * 500
"""json reads it, and yaml cannot write it."""
PREVIEW = "previews/step-00000000-prompt-00-aa0"
MANIFEST = "checkpoints/step-00000100/COMPLETE"
SHOWN = (
    *("resolved.yaml", "lineage.json", "status.json", "quarantine.jsonl", "items.jsonl"),
    *("metrics.jsonl", "item_losses.jsonl", "sample_losses.jsonl", "layers.jsonl"),
)
"""Files whose loss the page of a run names."""
MENDED_BY_NOBODY = ("items.jsonl", "metrics.jsonl", "item_losses.jsonl", "layers.jsonl", "contract.json")
"""Files without which a start does not continue."""
FILES = (*SHOWN, "contract.json", "config.yaml", ".lock", f"{PREVIEW}.png", f"{PREVIEW}.mp4", MANIFEST)


def endless(path: Path) -> None:
    path.symlink_to("/dev/zero")


def looped(path: Path) -> None:
    path.symlink_to(path.name)


def nested(path: Path) -> None:
    path.write_text('{"found_at": ' + "[" * 100_000 + "\n")


def deep(path: Path) -> None:
    row = f'{{"step": 1, "found_at": {DEEP}, "changed": {{"a": {{"from": {DEEP}}}}}}}'
    path.write_text(f"[{row}]\n" if path.name == "lineage.json" else f"{row}\n")


def aliased(path: Path) -> None:
    """A billion leaves, or more, for whoever walks over what yaml makes of it."""
    levels = [f"a{level}: &a{level} [{', '.join([f'*a{level - 1}'] * 10)}]" for level in range(1, 10)]
    path.write_text("\n".join(['a0: &a0 ["found_at"]', *levels]) + "\n")


def large(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate((2 << 30) + 1)


DAMAGES = (os.mkfifo, endless, looped, nested, deep, aliased, large)


def error_in_child(work: Callable[[Path], None], folder: Path) -> str:
    """What a function logs if it fails, in a process with little memory that may not hang; else empty."""
    child = FORKED.Process(target=_limited, args=(work, folder))
    child.start()
    child.join(LIMIT_S)
    if child.exitcode is None:
        child.kill()
        child.join()
    if child.exitcode == 0:
        return ""
    return f"exit code {child.exitcode}: {(folder / 'log').read_text()}"


def _limited(work: Callable[[Path], None], folder: Path) -> None:
    held = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (held + MEMORY_BYTES, held + MEMORY_BYTES))
    with (folder / "log").open("w") as log, redirect_stdout(log), redirect_stderr(log):
        try:
            work(folder)
        except BaseException:
            traceback.print_exc()
            raise


def damaged_run(folder: Path, damage: Callable[[Path], object], *names: str) -> RunFolder:
    run = RunFolder(full_folder(folder))
    for name in names:
        file = run.path / name
        file.unlink(missing_ok=True)
        file.parent.mkdir(parents=True, exist_ok=True)
        damage(file)
    run.lora_folder.mkdir()
    (run.lora_folder / "a.safetensors").touch()
    return run


def look_at_runs(folder: Path) -> None:
    problems = " ".join(read_run(folder / "runs" / "bad").problems)
    assert [name for name in SHOWN if name not in problems] == []
    assert str(folder) not in problems
    os.chdir(folder)
    assert main(["report", *map(str, sorted((folder / "runs").iterdir()))]) == 0
    pages = RunPages(partial(find_runs, [folder / "runs"]))
    for page in (Path("report.html").read_bytes(), pages.answer("/").content):
        assert b"2 runs side by side" in page
        assert b"metrics.jsonl" in page
    assert b"a good caption" in pages.answer("/runs/good/").content
    assert b"metrics.jsonl" in pages.answer("/runs/bad/").content
    assert "a good caption" in (folder / "runs" / "good" / "report.html").read_text()
    for suffix in (".png", ".mp4"):
        answer = pages.answer(f"/runs/bad/{PREVIEW}{suffix}")
        assert answer is None or len(answer.content) < 1 << 20  # what is endless or large is not shown
    assert [card.state.name for card in pages.cards().values()] == ["not started", "failed"]


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_run_of_which_no_file_can_be_read_leaves_the_page_to_the_others(
    tmp_path: Path, damage: Callable[[Path], object]
) -> None:
    (tmp_path / "runs").mkdir()
    full_folder(tmp_path / "runs" / "good", text="a good caption")
    bad = damaged_run(tmp_path / "runs" / "bad", damage, *FILES)
    # By which it is known as a run.
    (bad.path / MANIFEST).unlink()
    (bad.path / MANIFEST).touch()
    assert error_in_child(look_at_runs, tmp_path) == ""


def readings(run: RunFolder) -> Iterator[Callable[[], object]]:
    """What a start reads of its run folder, and what sampling does."""
    store = CheckpointStore(run.checkpoints_folder, keep=2)
    policy = ResumePolicy(source="auto", allow=(), folder=run, store=store, earlier_shifts={})
    yield run.lock().__enter__
    yield policy.earlier_choices
    yield partial(policy.earlier_starts, None)
    yield partial(policy.changed_settings, {}, None)
    yield from (partial(MetricsFile(file).cut_back_to, 10) for file in run.row_files)
    yield partial(read_items, run.items_file)
    yield partial(main, ["sample", "--lora", str(run.path), "--prompt", "a"])


def test_a_run_that_nobody_can_make_sense_of_is_shown_as_unreadable_among_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    bad, good = full_folder(tmp_path / "bad"), full_folder(tmp_path / "good", text="a good caption")
    (bad / "report.html").write_text("the page before")
    (bad / "metrics.jsonl").write_text('{"step": 1, "odd": 1}\n')

    def read_all_but_odd(rows: list[dict[str, Any]]) -> dict[str, Series]:
        assert "odd" not in rows[0], "hf_abcdefghijklmnopqrstuvwxyz"
        return read_series(rows)

    monkeypatch.setattr("diffsynth_lite.report.run_report.read_series", read_all_but_odd)
    monkeypatch.chdir(tmp_path)
    pages = RunPages(partial(find_runs, [tmp_path]))
    with pytest.raises(SystemExit, match="1"):  # a bug of ours, after its traceback
        main(["report", str(bad), str(good)])
    assert f"{bad} cannot be read: AssertionError: REDACTED" in caplog.text
    assert (bad / "report.html").read_text() == "the page before"
    assert "a good caption" in (good / "report.html").read_text()
    for page in (Path("report.html").read_text(), pages.answer("/").content.decode()):
        assert page.count(">Unreadable<") == 1
        assert page.count("cannot be read: AssertionError: REDACTED") == 1
        assert "2 runs side by side" in page
    assert b"a good caption" in pages.answer("/runs/good/").content
    page = pages.answer("/runs/bad/").content.decode()
    assert "cannot be read: AssertionError: REDACTED" in page
    assert "<dt>Step</dt>" not in page


def look_without_rights(folder: Path) -> None:
    """As somebody who is not root and owns nothing here; the way to this folder is closed, too."""
    os.chdir(folder / "open")
    if os.geteuid() == 0:
        os.seteuid(65534)
    # 2 where there are two runs: their own pages cannot be written into their folders.
    assert main(["report", "runs/bad", "runs/good", "--out", "page/report.html"]) in (0, 2)
    pages = RunPages(partial(find_runs, [Path("runs")]))
    for page in (Path("page/report.html").read_bytes(), pages.answer("/runs/good/").content):
        assert b"a good caption" in page
    assert b"good" in pages.answer("/").content


@pytest.mark.parametrize("closed", [".", "checkpoints", "previews", "status.json metrics.jsonl"])
def test_a_run_that_may_not_be_read_leaves_the_page_to_the_others(tmp_path: Path, closed: str) -> None:
    folder = tmp_path / "open"
    for name in ("runs", "page"):
        (folder / name).mkdir(parents=True)
    (folder / "page").chmod(0o777)
    full_folder(folder / "runs" / "good", text="a good caption")
    bad = full_folder(folder / "runs" / "bad")
    (bad / "checkpoints").mkdir(exist_ok=True)
    for name in closed.split():
        (bad / name).chmod(0o000)
    try:
        assert error_in_child(look_without_rights, tmp_path) == ""
    finally:
        for name in closed.split():
            (bad / name).chmod(0o755)


def test_names_and_texts_that_utf_8_has_not_are_shown_without_what_it_has_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = tmp_path / "runs"
    runs.mkdir()
    full_folder(runs / "good", text="a good caption")
    odd = full_folder(runs / "b\udcff")
    status = json.loads((odd / "status.json").read_text())
    (odd / "status.json").write_text(json.dumps({**status, "message": "a \ud800 message"}))
    (odd / "lineage.json").write_text(
        json.dumps([{"step": 1, "changed": {"a": {"from": "\ud800", "to": 1}}}])
    )
    monkeypatch.chdir(tmp_path)
    assert main(["report", *map(str, sorted(runs.iterdir()))]) == 0
    pages = RunPages(partial(find_runs, [runs]))
    for page in (Path("report.html").read_bytes(), pages.answer("/").content):
        assert b"2 runs side by side" in page
    assert b"a good caption" in pages.answer("/runs/good/").content
    assert b"a ? message" in pages.answer("/runs/b%FF/").content


def test_rows_beyond_those_of_any_run_are_left_out_before_they_take_memory(tmp_path: Path) -> None:
    run = full_folder(tmp_path / "bad")
    (run / "layers.jsonl").write_bytes(b"{}\n" * 40_001)
    (problem,) = (line for line in read_run(run).problems if "layers.jsonl" in line)
    assert problem == "layers.jsonl has 40,001 rows, where 40,000 are the most, and is left out"


def start_again(folder: Path) -> None:
    for run in map(RunFolder, sorted((folder / "runs").iterdir())):
        problems = Problems()
        for read in readings(run):
            problems.attempt(read)
        assert not [line for line in problems if "\n" in line]
        name = (run.path / "damaged").read_text()
        assert name not in MENDED_BY_NOBODY or name in " ".join(problems)


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_start_refuses_what_it_cannot_read_in_one_line(
    tmp_path: Path, damage: Callable[[Path], object]
) -> None:
    (tmp_path / "runs").mkdir()
    for place, name in enumerate(FILES):
        run = damaged_run(tmp_path / "runs" / str(place), damage, name)
        (run.path / "damaged").write_text(name)
    assert error_in_child(start_again, tmp_path) == ""
