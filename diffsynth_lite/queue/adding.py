"""This file makes entries of a config and settings, and checks them before any is added."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from diffsynth_lite.config import Config, load_config
from diffsynth_lite.config.files import schema_file
from diffsynth_lite.errors import Problems, UserError
from diffsynth_lite.files import parse_json
from diffsynth_lite.queue.entry import MOST_NODES, MOST_PROCESSES, Entry
from diffsynth_lite.queue.variants import names, variants
from diffsynth_lite.redaction import redacted
from diffsynth_lite.run_folder.command import Continuation
from diffsynth_lite.run_folder.folder import RunFolder
from diffsynth_lite.run_folder.reading import read_run_file
from diffsynth_lite.workspace import Workspace

_COMPARED = ("lora", "train")
_NOT_COMPARED = ("lora.groups", "train.warmup_steps", "train.micro_batch_size")
"""Settings that the fingerprint of a run does not hold as they are in its config."""
_EXPECTED = {
    "device": "write it as in CUDA_VISIBLE_DEVICES, such as 1 or 0,1",
    "num_processes": f"must be from 1 to {MOST_PROCESSES}",
    "num_nodes": f"must be from 1 to {MOST_NODES}",
}
_MOST_NAMED = 3


def entries_of(
    workspace: Workspace,
    config: Path,
    settings: Sequence[str] = (),
    *,
    presets: Sequence[str] = (),
    device: str = "",
    num_processes: int = 1,
    num_nodes: int = 1,
) -> list[Entry]:
    """The entries of a config, one for each combination of the values that the settings list.

    Raises:
        UserError: a config is wrong, leads out of the workspace, or has the folder of another run.
    """
    several = variants(settings)
    base = Path(load_config(config, several[0].settings, presets=presets).config.output.dir)
    folders = [str(base)]
    if len(several) > 1:
        folders = [str(base.with_name(name)) for name in names(base.name, several)]
    problems, found = Problems(), []
    for variant, folder in zip(several, folders, strict=True):
        given = (setting for setting in variant.settings if not setting.startswith("output.dir="))
        entry = _entry(
            config=name_in(workspace, config),
            folder=folder,
            settings=tuple(given),
            presets=tuple(presets),
            device=device,
            num_processes=num_processes,
            num_nodes=num_nodes,
        )
        problems.attempt(require_startable, entry, workspace)
        found.append(entry)
    problems.require_none()
    return found


def entry_of_continuation(workspace: Workspace, run: Path, found: Continuation) -> Entry:
    """The entry with which a run is continued."""
    root, folder = workspace.path.resolve(), run.resolve()
    is_here = found.working_folder.resolve() == root
    entry = _entry(
        config=found.config,
        folder=folder.relative_to(root).as_posix() if folder.is_relative_to(root) else str(folder),
        settings=tuple(each for each in found.settings if not each.startswith("output.dir=")),
        presets=found.presets,
        num_processes=found.num_processes,
        num_nodes=found.num_nodes,
        working_folder="" if is_here else str(found.working_folder),
    )
    require_startable(entry, workspace)
    return entry


def _entry(**values: Any) -> Entry:
    try:
        return Entry(**values)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        key = str(first["loc"][0])
        raise UserError(f"{key}: {first['input']!r}: {_EXPECTED.get(key, first['msg'])}") from None


def name_in(workspace: Workspace, config: Path) -> str:
    """The config as an entry names it: by its path in the workspace, or as a recipe by its name."""
    file, root = config.resolve(), workspace.path.resolve()
    if file.is_relative_to(root):
        return file.relative_to(root).as_posix()
    if file.is_relative_to(schema_file().parent.resolve()):
        return file.name
    raise UserError(f"--config {config}: is outside of the workspace {root}; copy it to configs/ there")


def require_startable(entry: Entry, workspace: Workspace) -> None:
    """Check all of an entry that can be checked before its run starts.

    Raises:
        UserError: its config is wrong, leads out of the workspace, or has the folder of another run.
    """
    entry.require_inside(workspace)
    if redacted(asked := entry.model_dump()) != asked:
        raise UserError(
            "a setting holds a secret, which a file of the queue may not; put it in an environment variable, "
            "and write ${oc.env:NAME}"
        )
    run = RunFolder(entry.folder_in(workspace))
    config = entry.load(workspace).config
    if run.path.exists() and not run.path.is_dir():
        raise UserError(f"output.dir: {entry.folder}: is a file")
    if run.path.is_dir() and run.is_new() and any(file.name[0] != "." for file in run.path.iterdir()):
        raise UserError(f"output.dir: {entry.folder}: is not empty and holds no run; give a new folder")
    if differences := list(_differences(run, config)):
        more = "" if len(differences) <= _MOST_NAMED else f" and {len(differences) - _MOST_NAMED} more"
        named = "; ".join(differences[:_MOST_NAMED])
        raise UserError(
            f"output.dir: {entry.folder}: holds a run of another config: {named}{more}; give another folder"
        )


def _differences(run: RunFolder, config: Config) -> Iterator[str]:
    """Settings that the run in a folder was started with and that are others now, as far as is known here."""
    try:
        saved = parse_json(read_run_file(run.fingerprint_file))
    except (OSError, UserError, ValueError):
        return
    values = redacted(json.loads(config.model_dump_json()))
    for key, old in saved.items() if isinstance(saved, dict) else ():
        section, _, name = key.partition(".")
        is_compared = section in _COMPARED and key not in (*_NOT_COMPARED, *config.resume.allow)
        if is_compared and name in values[section] and values[section][name] != old:
            yield f"{key} was {old!r}, is {values[section][name]!r}"
