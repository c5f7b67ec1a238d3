"""This file finds out how a run is continued, from what its folder holds."""

import argparse
import shlex
import socket
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from diffsynth_lite.cli.arguments import train_command
from diffsynth_lite.cli.train import load, parse_words, settings_of, words_of
from diffsynth_lite.config import Config
from diffsynth_lite.errors import UserError
from diffsynth_lite.queue.entry import MOST_NODES, MOST_PROCESSES
from diffsynth_lite.redaction import MASK
from diffsynth_lite.run_folder.command import Continuation, StartCommand
from diffsynth_lite.run_folder.folder import RunFolder
from diffsynth_lite.run_folder.reading import read_run_file


@dataclass(frozen=True, kw_only=True)
class _Way:
    """Arguments of ``train`` that lead to a run folder, what they ask for, and where."""

    parsed: argparse.Namespace
    config: Config
    working_folder: Path


def continuation(path: Path, *, within: Path | None = None) -> Continuation:
    """How the run in a folder is continued.

    That is the command that started it, where this machine still has its files and it still leads to this
    folder; otherwise the settings that it was started with. The folder may be somebody else's: its arguments
    are parsed as any, and code that its settings name is refused.

    Args:
        within: folder that the command has to be given in, with a config in it; None for any.

    Raises:
        UserError: it cannot be continued from here; the message says why.
    """
    run = RunFolder(path.resolve())
    started = StartCommand.read(run.command_file)
    way = _as_started(run, started, within) or _by_settings(run, started)
    if source := _resume_source(run, way.config.resume.source):
        way.parsed.resume = source
    arguments = words_of(way.parsed)
    num_nodes = started.num_nodes if started is not None else 1
    num_processes = max(1, started.num_processes // num_nodes) if started is not None else 1
    if num_processes > MOST_PROCESSES or num_nodes > MOST_NODES:  # somebody wants to stop this machine
        num_processes = num_nodes = 1
    count = {"num_processes": num_processes, "num_nodes": num_nodes}
    shown = train_command(arguments, **count, here=way.working_folder)
    if way.working_folder != Path.cwd():
        shown = f"cd {shlex.quote(str(way.working_folder))} && {shown}"
    for key, name in way.config.code_of_others.items():
        raise UserError(
            f"{key}: {name} is code that comes with neither diffsynth_lite nor torch; if you know it, resume"
            f" in a terminal: {shown}"
        )
    return Continuation(
        arguments=tuple(arguments),
        config=way.parsed.config,
        presets=tuple(way.parsed.presets),
        settings=tuple(settings_of(way.parsed)),
        working_folder=way.working_folder,
        **count,
        shown=shown,
    )


def _as_started(run: RunFolder, started: StartCommand | None, within: Path | None) -> _Way | None:
    """By the command that started the run; None where it is not known, or does not lead to this folder."""
    folder = _folder_here(started)
    if within is not None and folder is not None and folder.resolve() != within.resolve():
        return None
    if started is None or folder is None or any(MASK in word for word in started.arguments):
        return None
    with suppress(UserError, OSError):
        parsed = parse_words(started.arguments)
        file = folder / parsed.config
        # Presets decide nothing that is asked for here, and loading them logs what they change.
        asked = argparse.Namespace(**vars(parsed) | {"presets": []})
        if file.exists() and not file.is_file():  # a named pipe, which nobody may write to
            return None
        is_cut = any("=" not in each for each in parsed.overrides)  # a value in words, by a shell
        if within is not None and is_cut:
            return None
        if within is not None and file.exists() and not file.resolve().is_relative_to(within.resolve()):
            return None
        config = load(asked, file if file.exists() else parsed.config).config
        if _leads_to(run, folder, config):
            return _Way(parsed=parsed, config=config, working_folder=folder)
    return None


def _by_settings(run: RunFolder, started: StartCommand | None) -> _Way:
    """By the settings that the run was started with, wherever its folder is now."""
    file = run.resolved_file
    own_command = "use the command that started the run"
    try:
        is_masked = MASK.encode() in read_run_file(file)
    except OSError as error:
        raise UserError(f"{file} cannot be read ({error.strerror}): {own_command}") from None
    if is_masked:
        raise UserError(f"{file} has {MASK} in the place of a secret: {own_command}")
    parsed = parse_words(["--config", str(file)])
    config = load(parsed, file).config
    output = Path(config.output.dir).parts
    if not Path(config.output.dir).is_absolute() and run.path.parts[-len(output) :] == output:
        folder = Path(*run.path.parts[: -len(output)])
    else:
        folder = _folder_here(started) or Path.cwd()
    if not _leads_to(run, folder, config):
        parsed.overrides = [f"output.dir={run.path}"]
    return _Way(parsed=parsed, config=config, working_folder=folder)


def _folder_here(started: StartCommand | None) -> Path | None:
    """The folder that a run was started in, if that was on this machine and it is still there."""
    if started is not None and started.host == socket.gethostname():
        folder = Path(started.working_folder)
        with suppress(OSError):  # no name of a file
            return folder if folder.is_absolute() and folder.is_dir() else None
    return None


def _leads_to(run: RunFolder, working_folder: Path, config: Config) -> bool:
    """Whether a config is one of the run in this folder."""
    with suppress(OSError, RuntimeError):  # no name of a file, or the home of nobody
        return (working_folder / Path(config.output.dir).expanduser()).resolve() == run.path
    return False


def _resume_source(run: RunFolder, source: str) -> str | None:
    """What ``--resume`` has to be so that the run goes on; None where its settings have it."""
    is_other_checkpoint = source not in ("auto", "must", "none")
    if source == "auto" or (is_other_checkpoint and not run.has_checkpoints()):
        return None
    return "auto"
