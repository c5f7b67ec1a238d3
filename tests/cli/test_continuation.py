"""How a run is continued by what its folder holds, which may be somebody else's."""

import json
import os
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from diffsynth_lite.cli.arguments import command
from diffsynth_lite.cli.continuation import continuation
from diffsynth_lite.config import load_config
from diffsynth_lite.errors import UserError
from diffsynth_lite.queue.adding import entry_of_continuation
from diffsynth_lite.run_folder.command import StartCommand
from diffsynth_lite.workspace import Workspace

PLACES = ("~nobody-of-this-name/a", "/" + "a" * 9999, "'\0'", "\ud800", "..", "''")
CONFIG = "model: {family: qwen_image, path: m}\ndata: {path: d}\noutput: {dir: runs/a}\n"
WORDS = ("--config", "a.yaml", "--preset", "style", "train.steps=7", "--no-use_gradient_checkpointing")


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a run that was started in its workspace by ``WORDS``."""
    monkeypatch.chdir(tmp_path)
    Path("a.yaml").write_text(CONFIG)
    return started(tmp_path / "runs" / "a", *WORDS)


def started(run: Path, *words: str, settings: str = CONFIG) -> Path:
    run.mkdir(parents=True)
    (run / "command.json").write_text(StartCommand.of(words, 1).as_text())
    (run.parent / "as written.yaml").write_text(settings)
    loaded = load_config(run.parent / "as written.yaml", ["train.steps=7"])
    (run / "resolved.yaml").write_text(loaded.resolved_yaml)
    return run


def test_the_command_that_started_it_continues_a_run_from_wherever_it_is_asked(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    found = continuation(Path("runs/a"))
    assert (found.working_folder, found.num_processes) == (tmp_path, 1)
    assert found.arguments == WORDS
    assert found.shown == command("train", *WORDS)
    monkeypatch.chdir("/")
    assert continuation(run).arguments == WORDS
    assert continuation(run).shown == f"cd {shlex.quote(str(tmp_path))} && {found.shown}"
    assert caplog.messages == []
    change(num_processes=1_000_000)(run)
    assert continuation(run).num_processes == 1


@pytest.mark.parametrize(
    ("num_processes", "num_nodes", "expected"),
    [(16, 2, (8, 2)), (2, 2, (1, 2)), (1, 2, (1, 2)), (80, 10, (8, 10)), (10**6, 10**5, (1, 1))],
)
def test_a_run_of_several_nodes_is_queued_for_as_many_with_as_many_processes_each(
    run: Path, tmp_path: Path, num_processes: int, num_nodes: int, expected: tuple[int, int]
) -> None:
    change(num_processes=num_processes, num_nodes=num_nodes)(run)
    (run / "status.json").write_text('{"found_at": {}}')
    found = continuation(run)
    entry = entry_of_continuation(Workspace(tmp_path), run, found)
    assert (entry.num_processes, entry.num_nodes) == expected
    is_several = f"--nnodes {num_nodes} " in found.shown and f"--nproc_per_node {expected[0]} " in found.shown
    assert is_several == (expected != (1, 1))


def change(**values: Any) -> Callable[[Path], None]:
    """Other values in ``command.json``."""

    def write(run: Path) -> None:
        file = run / "command.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | values))

    return write


@pytest.mark.parametrize(
    "happen",
    [
        change(host="elsewhere"),
        change(working_folder="/no/such/folder"),
        *(change(working_folder=folder) for folder in ("", ".", "/" + "a" * 9999, "/\0")),
        *(change(arguments=["--config", file]) for file in ("a" * 9999, "\0", "\ud800", "/dev/zero", "/")),
        *(change(arguments=["--config", "a.yaml", f"output.dir={place}"]) for place in PLACES),
        change(num_processes=0),
        change(num_nodes=0),
        change(num_nodes="2"),
        change(arguments=["--config", "a.yaml", 1]),
        change(arguments=["--config", "a.yaml", "--help"]),
        change(arguments=["--config", "a.yaml", "--trust", "train.steps=7"]),
        change(arguments=["--config", "a.yaml", "validation.negative_prompt=REDACTED"]),
        lambda run: (run / "command.json").unlink(),
        lambda run: ((run / "command.json").unlink(), os.mkfifo(run / "command.json")),
        lambda run: (run / "command.json").write_text("[" * 100_000),
        lambda _: Path("a.yaml").unlink(),
        lambda _: (Path("a.yaml").unlink(), os.mkfifo("a.yaml")),
        lambda _: Path("a.yaml").write_text("train: {stesp: 3}"),
        lambda _: Path("a.yaml").write_text(CONFIG.replace("runs/a", "runs/b")),
    ],
)
def test_where_that_leads_elsewhere_or_nowhere_its_settings_do(
    run: Path, tmp_path: Path, happen: Callable[[Path], object]
) -> None:
    happen(run)
    found = continuation(run)
    assert found.arguments == ("--config", f"{run}/resolved.yaml")
    assert found.working_folder == tmp_path
    assert load_config(*found.arguments[1:]).config.train.steps == 7


def test_a_run_whose_folder_was_moved_continues_where_it_is(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    moved = run.rename(tmp_path / "b: [c], #d")
    found = continuation(moved)
    assert found.arguments == ("--config", f"{moved}/resolved.yaml", f"output.dir={moved}")
    assert load_config(found.arguments[1], found.arguments[2:]).config.output.dir == str(moved)
    assert found.working_folder == tmp_path
    change(host="elsewhere")(moved)
    monkeypatch.chdir("/")
    assert continuation(moved).working_folder == Path("/")


@pytest.mark.parametrize(
    ("source", "num_checkpoints", "asked"),
    [
        ("none", 0, "auto"),
        ("must", 1, "auto"),
        ("x/step-2", 0, "x/step-2"),
        ("x/step-2", 1, "auto"),
    ],
)
@pytest.mark.parametrize("is_flag", [True, False])
def test_a_run_goes_on_whatever_it_was_asked_to_start_from(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    source: str,
    num_checkpoints: int,
    asked: str,
    is_flag: bool,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a.yaml").write_text(CONFIG)
    words = ("--resume", source) if is_flag else (f"resume.source={source}",)
    run = started(tmp_path / "runs" / "a", "--config", "a.yaml", *words)
    for step in range(num_checkpoints):
        (run / "checkpoints" / f"step-{step}").mkdir(parents=True)
        (run / "checkpoints" / f"step-{step}" / "COMPLETE").touch()
    found = continuation(run).arguments
    if asked == source and not is_flag:
        assert found == ("--config", "a.yaml", *words)
    else:
        assert found[-2:] == ("--resume", asked)


def test_what_cannot_be_continued_from_here_is_refused(run: Path) -> None:
    (run / "command.json").unlink()
    settings = (run / "resolved.yaml").read_text()
    for text, message in (
        (settings.replace("path: d\n", "path: REDACTED\n"), "REDACTED in the place of a secret"),
        (settings.replace("steps: 7", "steps: many"), r"train\.steps"),
        (
            settings.replace("family: qwen_image", "family: of.theirs"),
            r"model\.family: of\.theirs is code",
        ),
        (
            settings.replace("optimizer: adamw", "optimizer: of.theirs"),
            r"train\.optimizer: of\.theirs is code",
        ),
    ):
        assert text != settings
        (run / "resolved.yaml").write_text(text)
        with pytest.raises(UserError, match=message):
            continuation(run)
    (run / "resolved.yaml").unlink()
    with pytest.raises(UserError, match=r"resolved\.yaml cannot be read \(No such file"):
        continuation(run)
