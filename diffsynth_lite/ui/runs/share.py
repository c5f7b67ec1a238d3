"""This file shares the LoRA of a run: converts it for other programs, copies it to ComfyUI, publishes it."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.routing import Route

from diffsynth_lite.core.units import format_bytes
from diffsynth_lite.errors import UserError
from diffsynth_lite.run_folder.folder import RunFolder
from diffsynth_lite.run_folder.loras import (
    CHOSEN,
    SUFFIX,
    chosen_copy,
    contract_of,
    copy_name,
    find_lora_place,
    metadata_of,
    named_file,
)
from diffsynth_lite.ui.jobs import Job, command_line
from diffsynth_lite.ui.pages import change_route, run_folder, workspace_of
from diffsynth_lite.ui.runs.downloads import name_of_converted
from diffsynth_lite.workspace import Workspace, folder_here

FORMATS = {"comfyui": "ComfyUI", "kohya": "kohya's trainers", "diffusers": "diffusers"}
ONLY_IN_DIFFUSERS = ("flux3", "sana")
"""Families for whose layers other programs have no known names; their own files import torch."""
_FOLDER = "comfyui_folder"
_DRY = "--dry-run"
_LONGEST_TEXT = 200


def routes() -> list[Route]:
    """The routes of this part of a run's screen."""
    return [change_route("/runs/{name}/share/{action}", _act)]


class RunShare:
    """The LoRA of a run that was chosen, else its latest, and the commands that share it.

    Args:
        name: of the run in the workspace.

    Raises:
        UserError: the LoRA that was chosen is gone.
    """

    def __init__(self, workspace: Workspace, name: str, folder: Path) -> None:
        self._workspace, self._name, self._run = workspace, name, RunFolder(folder)
        is_chosen = chosen_copy(self._run) is not None
        self._lora = find_lora_place(f"{folder}@{CHOSEN}") if is_chosen else self._run.lora_folder
        self._files = [file for file in sorted(self._lora.glob(f"*{SUFFIX}")) if file.is_file()]
        self._metadata = metadata_of(self._files[0]) if self._files else {}
        self._source = f"{workspace.shown(folder)}@{CHOSEN if is_chosen else 'last'}"
        self.conversion = Job.of(workspace, "convert", folder)
        self.publication = Job.of(workspace, "publish", folder)

    def values(self) -> dict[str, Any]:
        """What the template shows of it; nothing before the run has a LoRA."""
        from huggingface_hub import get_token  # it takes memory, and most screens need none of it

        if not self._files:
            return {}
        return {
            "problem": "",
            "step": self._metadata.get("diffsynth_lite.step"),
            "conversions": list(self._conversions()),
            "comfyui": self._copy(),
            "conversion": self.conversion,
            "publication": self.publication,
            "publish": self._shown_publication(),
            "has_token": bool(get_token()),
            "command_line": command_line,
        }

    def convert(self, given: Mapping[str, Any]) -> None:
        """Start the command that writes a file, unless that is there already."""
        for each in self._conversions():
            if each["name"] == given.get("name") and not each["refusal"]:
                if not each["size"]:
                    self.conversion.start(each["words"], self._workspace)
                return
        raise UserError(f"{self._name} has no LoRA that can be converted so (any more)")

    def copy(self, given: Mapping[str, Any]) -> None:
        """Start the command that copies to ComfyUI, into the folder and over the files that were shown."""
        copy = self._copy()
        if copy["refusal"]:
            raise UserError(copy["refusal"])
        if (given.get("folder"), given.get("replace")) != (copy["folder"], copy["others"]):
            raise UserError(f"{copy['folder']}: what would be replaced is not as it was shown; look again")
        self.conversion.start(copy["words"], self._workspace)

    def set_folder(self, given: Mapping[str, Any]) -> None:
        """Write down ComfyUI's folder of LoRAs, for all runs of the workspace."""
        self._workspace.set(_FOLDER, str(folder_here(Path(_line("Folder", given.get("folder"))))))

    def show_publication(self, given: Mapping[str, Any]) -> None:
        """Start the dry run."""
        repository, licence = (_line(key, given.get(key.lower())) for key in ("Repository", "Licence"))
        is_private = given.get("visibility") != "public"
        words = ["publish", self._source, f"--to={repository}", *["--private"] * is_private]
        words += [f"--license={licence}"] * bool(licence)
        form = {"repository": repository, "is_public": not is_private, "licence": licence}
        self.publication.start([*words, _DRY], self._workspace, note=form | {"stamp": self._stamp})

    def publish(self, given: Mapping[str, Any]) -> None:
        """Start the command whose dry run the person has seen."""
        words = self._shown_publication()
        if not words or given.get("command") != command_line(words):
            raise UserError("What would be sent is not as it was shown; show it again")
        self.publication.start(words, self._workspace, note=self.publication.note)

    def stop(self, given: Mapping[str, Any]) -> None:
        """Have a command stop."""
        (self.publication if given.get("what") == "publication" else self.conversion).stop()

    @property
    def _stamp(self) -> str:
        """What changes when any file of the LoRA does, its card and images among them."""
        found = [(str(file), file.stat()) for file in sorted(self._lora.rglob("*"))]
        return str([(name, status.st_mtime_ns, status.st_size) for name, status in found])

    def _conversions(self) -> Iterator[dict[str, Any]]:
        """Each file that can be written, with its size once it is there."""
        step, kind = (self._metadata.get(f"diffsynth_lite.{key}", "") for key in ("step", "kind"))
        only_plain = f"Only a plain LoRA can be converted; this is a {kind}." * bool(kind)
        is_latest = self._lora == self._run.lora_folder and step.isdecimal()
        name = copy_name(self._lora.name, int(step)) if is_latest else self._lora.name
        for target, label in FORMATS.items():
            for file in self._files:
                written = named_file(self._run.converted_folder / target, name, file.name)
                is_new = written.is_file() and written.stat().st_mtime_ns >= file.stat().st_mtime_ns
                is_several = len(self._files) > 1
                source = self._workspace.shown(file) if is_several else self._source
                words = ["convert", source, self._workspace.shown(written), f"--to={target}"]
                yield {
                    "label": label + f", {file.stem.rpartition('weights_')[2]}" * is_several,
                    "name": name_of_converted(written),
                    "size": format_bytes(written.stat().st_size) if is_new else "",
                    "refusal": only_plain or self._unknown(target),
                    "words": words + ["--replace"] * written.is_file(),
                }

    def _copy(self) -> dict[str, Any]:
        """The copy to ComfyUI: where it goes, what of others is there, and why it cannot be made."""
        named = str(self._workspace.settings.get(_FOLDER, ""))
        folder, contract = Path(named), contract_of(self._files[0])
        targets = [named_file(folder, self._run.path.resolve().name, file.name) for file in self._files]
        there = [target for target in targets if named and target.exists()]
        others = [target.name for target in there if not contract or contract_of(target) != contract]
        refusal = self._unknown("comfyui") or ("" if named else "Name ComfyUI's folder of LoRAs first.")
        if not refusal and not folder.is_dir():
            refusal = f"{folder} is not a folder (any more)."
        return {
            "folder": named,
            "there": [target.name for target in there if target.name not in others],
            "others": others,
            "refusal": refusal,
            "words": ["convert", self._source, named, "--to=comfyui", *["--replace"] * bool(others)],
        }

    def _unknown(self, target: str) -> str:
        """Why a program cannot read the LoRA; empty where it can, as far as is known without reading it."""
        family = self._metadata.get("diffsynth_lite.family")
        if target == "diffusers" or family not in ONLY_IN_DIFFUSERS:
            return ""
        return f"No program but diffusers is known to have names for the layers of {family}."

    def _shown_publication(self) -> list[str]:
        """The command whose dry run was shown and that would send the same now; empty for none.

        One that failed, or whose end nobody knows, may be started again.
        """
        latest = self.publication
        if latest.is_alive or latest.note.get("stamp") != self._stamp:
            return []
        is_to_come = (_DRY in latest.words) is (latest.exit_code == 0)
        return [word for word in latest.words if word != _DRY] if is_to_come else []


def _act(request: Request, given: dict[str, Any]) -> dict[str, Any]:
    name, action = request.path_params["name"], request.path_params["action"]
    if (act := _ACTIONS.get(action)) is None:
        raise HTTPException(404)
    act(RunShare(workspace_of(request), name, run_folder(request)), given)
    # A form leads to where its effect is; a button stays where it is.
    return {"go": f"/runs/{quote(name)}/#share"} if action in ("folder", "dry-run") else {}


_ACTIONS = {
    "convert": RunShare.convert,
    "copy": RunShare.copy,
    "folder": RunShare.set_folder,
    "dry-run": RunShare.show_publication,
    "publish": RunShare.publish,
    "stop": RunShare.stop,
}


def _line(name: str, given: Any) -> str:
    text = str(given or "").strip()
    if len(text) > _LONGEST_TEXT or not text.isprintable():
        raise UserError(f"{name}: give one line of up to {_LONGEST_TEXT} letters")
    return text
