"""This file finds the folder that a user names: on disk, or on the hub, with its settings only."""

from pathlib import Path

from diffsynth_lite.errors import UserError
from diffsynth_lite.pipelines.base.folder.pipeline_folder import PipelineFolder
from diffsynth_lite.pipelines.base.hub import HubCommit


def resolve_folder(
    location: str, *, revision: str | None = None, variant: str | None = None
) -> PipelineFolder:
    """The pipeline at a local folder, or in the hub's cache, with all of its components but their weights.

    Components that a modular index places in other repositories are looked for when they are used.

    Args:
        location: a local folder, or a hub id such as ``Qwen/Qwen-Image``. A folder that exists wins.
        revision: branch, tag or commit on the hub.
        variant: weight variant, such as ``fp16``.

    Raises:
        UserError: a missing local folder; a hub id that does not exist, is gated or cannot be reached.
    """
    local = Path(location).expanduser()
    if local.is_dir():
        if revision is not None:
            raise UserError(
                f"model.revision: {revision!r} has no effect on the local folder {location}; remove it"
            )
        return PipelineFolder(path=local, variant=variant)
    if local.exists():
        raise UserError(
            f"model.path: {location} is a file; give the pipeline's folder or a hub id, and the file "
            "as model.transformer_file"
        )
    if _looks_local(location):
        raise UserError(f"model.path: there is no folder {location} (a hub id has the form owner/name)")
    hub = HubCommit.find(location, revision)
    folder = PipelineFolder(path=hub.path, variant=variant, hub=hub)
    hub.fetch_settings(folder.own_subfolders())
    return folder


def _looks_local(location: str) -> bool:
    parts = location.split("/")
    return (
        location.startswith((".", "~", "/"))
        or "\\" in location
        or len(parts) != 2
        or not all(parts)
        or Path(parts[0]).is_dir()
    )
