"""This file makes the command that writes captions from a form, and shows how far the latest one is."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from diffsynth_lite.captioning.contents import Contents
from diffsynth_lite.captioning.report import (
    CaptioningStatus,
    CaptionReport,
    CaptionRow,
    is_by_model,
    options_of,
)
from diffsynth_lite.data.captions import EXAMPLE_MODEL
from diffsynth_lite.errors import UserError
from diffsynth_lite.ui.jobs import Job, Jobs, command_line
from diffsynth_lite.workspace import Workspace

MODELS = (
    EXAMPLE_MODEL,
    "Qwen/Qwen3-VL-8B-Instruct",
    "google/gemma-3-4b-it",
    "fancyfeast/llama-joycaption-beta-one-hf-llava",
    "HuggingFaceTB/SmolVLM2-2.2B-Instruct",
    "microsoft/Florence-2-large",
)
"""What the form suggests; any other may be typed in."""
CHOICES = {
    "goal": {
        "": "None: describe it all",
        "likeness": "Likeness: a person or thing",
        "style": "Style",
        "motion": "Motion",
        "edit": "Edit: what changes",
    },
    "length": {"short": "Short", "": "Medium", "long": "Long"},
    "format": {"": "Prose", "tags": "Tags", "json": "JSON"},
    "quantize": {"": "None", "int8": "int8", "nf4": "nf4"},
}
"""Values of fields with their words; the empty one is the default of the command, without the flag."""
_FIELDS = ("model", "endpoint", "goal", "trigger", "length", "format", "language", "quantize")
_NOT_AGAIN = ("--only", "--replace", "--dry-run")
_NOTHING = "Nothing was written by a model here yet: Write captions does so first"
_LOG_LINES = 3
_NUM_SHOWN = 3
_LONGEST_TEXT = 500


@dataclass(frozen=True)
class Captioning:
    """The captions that a model writes for a data set.

    Args:
        job: the latest process that the screen started.
        state: "none", "starting", "did not start", "killed", or that of the status.
        log: the last lines of a process that did not start.
    """

    folder: Path
    status: CaptioningStatus | None
    job: Job
    state: str
    log: Sequence[str] = ()

    @classmethod
    def of(cls, folder: Path, jobs: Jobs) -> "Captioning":
        """What is known now."""
        status, job = CaptionReport(folder).status(), jobs.of(folder)
        if status is not None and status.is_running:
            state = "running"
        elif job.state in ("starting", "did not start"):
            state = job.state
        elif status is None:
            state = "none"
        else:
            state = "killed" if status.state == "running" else status.state
        has_log = state == "did not start" and not job.was_signalled
        return cls(folder, status, job, state, job.log(_LOG_LINES) if has_log else ())

    @property
    def arguments(self) -> tuple[str, ...]:
        """Those of the latest command."""
        if self.state in ("starting", "did not start"):
            return self.job.words[1:]
        return self.status.arguments if self.status is not None else ()

    def as_json(self) -> dict[str, Any]:
        """What the page's script shows."""
        options = {name.removeprefix("--"): value for name, value in options_of(self.arguments)}
        shown = {"state": self.state, "command": command(self.arguments), "options": options}
        if self.status is None or self.state in ("starting", "did not start"):
            return shown | {"log": list(self.log)}
        return shown | {name: value for name, value in asdict(self.status).items() if name not in shown}

    def same(self, workspace: Workspace) -> list[str]:
        """The latest arguments, to go on with what was interrupted."""
        if not self.arguments:
            raise UserError(_NOTHING)
        if self.folder in [(workspace.path / word).resolve() for word in self.arguments]:
            return list(self.arguments)
        # Its folder was relative to another one.
        return _arguments(workspace.shown(self.folder), options_of(self.arguments))

    def again(self, files: Sequence[str], workspace: Workspace) -> list[str]:
        """The arguments that write captions of items as the latest command would, over those there."""
        if not self.arguments or not files:
            raise UserError(_NOTHING)
        return over(self.arguments, files, workspace.shown(self.folder))


def goal_of(arguments: Sequence[str]) -> str:
    """The goal of captions; empty for none."""
    goal = dict(options_of(arguments)).get("--goal", "")
    return goal if goal in CHOICES["goal"] else ""


def over(latest: Sequence[str], files: Sequence[str], path: str) -> list[str]:
    """The arguments that write captions of items over those there, as the latest arguments would."""
    kept = [each for each in options_of(latest) if each[0] not in _NOT_AGAIN]
    only = [("--only", file) for file in files]
    return _arguments(path, [*kept, *only, ("--replace", "all")])


def replaced_by(
    arguments: Sequence[str], contents: Contents, rows: Mapping[str, CaptionRow]
) -> dict[str, str]:
    """Captions that a command may write over, by item."""
    options = options_of(arguments)
    only = {value for name, value in options if name == "--only"}
    replace = dict(options).get("--replace")
    if replace is None or "--dry-run" in dict(options):
        return {}
    return {
        item.file: item.captions[0]
        for item in contents.items
        if item.captions and not item.is_locked and (not only or item.file in only)
        if replace == "all" or is_by_model(rows.get(item.file), item.captions[0])
    }


def from_form(given: Mapping[str, str], data_set: Path, workspace: Workspace) -> list[str]:
    """The arguments of the command that a form asks for.

    Raises:
        UserError: a field is empty that is needed, or holds what it cannot.
    """
    values = {key: _checked(key, given.get(key, "")) for key in _FIELDS}
    if values["endpoint"]:
        _host_of(values["endpoint"])
        values["quantize"] = ""
    elif not values["model"]:
        raise UserError("Model: give its name on the hub, or its folder on this machine")
    if values["goal"] == "edit":
        if (inputs := workspace.data_sets.get(given.get("inputs", ""))) is None:
            raise UserError("Inputs: choose the data set with the images before the edit")
        values["inputs"] = workspace.shown(inputs)
    if (config := given.get("config")) in workspace.configs:
        values["config"] = f"configs/{config}.yaml"
    if (replace := given.get("replace", "")) in ("model", "all"):
        values["replace"] = replace
    if given.get("do") == "preview":
        values["dry-run"] = str(_NUM_SHOWN)
    options = [(f"--{key}", value) for key, value in values.items() if value]
    return _arguments(workspace.shown(data_set), options)


def preview_of(given: Mapping[str, str], data_set: Path, workspace: Workspace) -> dict[str, str]:
    """The ``command`` of a form and the ``host`` that images are sent to, or what is ``wrong`` in it."""
    try:
        arguments = from_form(given, data_set, workspace)
    except UserError as error:
        return {"wrong": str(error)}
    return {
        "command": command(arguments),
        "host": _host_of(given["endpoint"]) if given.get("endpoint") else "",
    }


def _checked(key: str, value: str) -> str:
    value = value.strip()
    if len(value) > _LONGEST_TEXT or any(letter < " " for letter in value):
        raise UserError(f"{key.capitalize()}: give one line of up to {_LONGEST_TEXT} letters")
    if value not in CHOICES.get(key, (value,)):
        raise UserError(f"{key.capitalize()}: {value}: is not one of the choices")
    return value


def _host_of(endpoint: str) -> str:
    """The machine that images are sent to; empty for this one."""
    # Imported here: the HTTP client takes memory, and most data sets need none.
    from diffsynth_lite.captioning.endpoint import api_address, is_this_machine

    return "" if is_this_machine(endpoint) else urlsplit(api_address(endpoint)).netloc


def command(arguments: Sequence[str]) -> str:
    """A command as it is typed in the workspace."""
    return command_line(["caption", *arguments])


def _arguments(folder: str, options: Sequence[tuple[str, str]]) -> list[str]:
    words = [folder]
    for name, value in options:
        is_joined = value.startswith("-") or (not value and name != "--dry-run")
        words += [f"{name}={value}"] if is_joined else filter(None, [name, value])
    return words
