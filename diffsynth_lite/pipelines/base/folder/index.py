"""This file reads the index of a pipeline: which components it has, and where their files are.

There are two kinds. ``model_index.json`` names a library and a class for each component, whose files are in a
folder of its name. ``modular_model_index.json``, of diffusers' ``ModularPipeline``, adds where they are: a
repository of the hub, a folder in it, a variant and a revision.
Source: ``ModularPipeline.__init__`` and ``_component_spec_to_dict`` in diffusers ``modular_pipeline.py``.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from diffsynth_lite.errors import UserError
from diffsynth_lite.pipelines.base.folder.hub import INDEXES, SMALL_SUFFIXES, HubCommit
from diffsynth_lite.pipelines.base.model_settings import ModelSettings, shortened

_LOCATIONS = ("pretrained_model_name_or_path", "repo")
"""What the place of a component is called, and was called in earlier versions."""
_OF_A_MODEL = "config.json"
"""It comes with weights: by itself it is not a component."""
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)


@dataclass(frozen=True, kw_only=True)
class IndexEntry:
    """A component as an index describes it.

    Attributes:
        library: that its class is of; empty where none is named.
        class_name: empty where none is named.
        location: what the index names as its place, a hub id or a folder on some machine; None where it names
            none.
        subfolder: of that place; empty where the files lie in no folder there.
        variant: of its weights; None for the plain files.
        revision: of the repository; None is its main branch.
    """

    library: str
    class_name: str
    location: str | None = None
    subfolder: str
    variant: str | None = None
    revision: str | None = None

    @property
    def repository(self) -> str | None:
        """The hub id of its place; None where that is a folder, or not named."""
        return self.location if _HUB_ID.fullmatch(self.location or "") else None


def index_file(folder: Path) -> Path:
    """The index of a folder; the first that it may have where it has none."""
    paths = [folder / name for name in INDEXES]
    return next((path for path in paths if path.is_file()), paths[0])


def read_entries(index: ModelSettings) -> dict[str, IndexEntry]:
    """The components that an index names."""
    found = {}
    for name, value in index.items():
        match value:
            case [str(library), str(class_name)]:
                found[name] = IndexEntry(library=library, class_name=class_name, subfolder=name)
            case [library, class_name, dict(place)]:
                entry = _modular_entry(name, str(library or ""), str(class_name or ""), place, index.file)
                if entry.class_name or entry.location:  # else it is none of this pipeline's
                    found[name] = entry
    return found


def _modular_entry(
    name: str, library: str, class_name: str, place: Mapping[str, Any], file: Path
) -> IndexEntry:
    texts: dict[str, str | None] = {}
    for key in (*_LOCATIONS, "subfolder", "variant", "revision"):
        value = place.get(key)
        if not isinstance(value, str | None):
            raise UserError(
                f"model.path: {file}: the {key} of {name} is {shortened(value)}, which is not text"
            )
        texts[key] = value or None
    for key in ("subfolder", "variant", "revision"):
        # They are made parts of paths, of which the one of a variant is a part of a name.
        text = texts[key] or ""
        if not _is_inside(text) or (key == "variant" and "/" in text):
            raise UserError(
                f"model.path: {file}: the {key} of {name} is {shortened(text)!r}, which leads out of its "
                "folder; get the folder again"
            )
    return IndexEntry(
        library=library,
        class_name=class_name,
        location=next((texts[key] for key in _LOCATIONS if texts[key]), None),
        subfolder=texts["subfolder"] or "",
        variant=texts["variant"],
        revision=texts["revision"],
    )


def _is_inside(subfolder: str) -> bool:
    """Whether a path names a folder in the one that it is relative to, by its text only."""
    parts = PurePosixPath(subfolder).parts
    is_relative = not subfolder.startswith(("/", "~")) and not re.search(r"[\\:\0]", subfolder)
    return is_relative and ".." not in parts


@dataclass(frozen=True, kw_only=True)
class ComponentPlace:
    """Where the files of a component are.

    Attributes:
        subfolder: the same in the pipeline's folder or in the repository.
        variant: of the weights that are loaded; None for the plain files.
        hub: where to get weights that are not there; None for a folder of the user's.
    """

    path: Path
    subfolder: str
    variant: str | None
    hub: HubCommit | None

    def file_names(self) -> list[str]:
        """Names of the files that are there, sorted."""
        return sorted(path.name for path in self.path.glob("*") if path.is_file())

    def small_files(self) -> list[Path]:
        """Settings and vocabularies."""
        return sorted(path for path in self.path.glob("*") if path.suffix in SMALL_SUFFIXES)

    def __str__(self) -> str:
        return str(self.path)


def holds_component(folder: Path, *, with_weights: bool = True) -> bool:
    """Whether a component's files are in a folder of the user's, which then goes before a repository.

    Source: ``_is_local_component`` in diffusers ``modular_pipeline.py``.

    Args:
        with_weights: whether those of a model must be there, next to its settings.
    """
    names = {path.name for path in folder.glob("*") if path.is_file()}
    return bool(names) and (not with_weights or names != {_OF_A_MODEL})


class OtherRepositories:
    """The repositories next to the pipeline's own that its index names, each looked for once."""

    def __init__(self) -> None:
        self._commits: dict[tuple[str, str | None], HubCommit] = {}
        self._with_settings: set[tuple[HubCommit, str]] = set()

    def commit_of(self, component: str, entry: IndexEntry, *, instead: Path | None) -> HubCommit:
        """The commit that a component is read from, with the component's settings.

        All that is read of one revision is of the commit that it was first.

        Args:
            instead: a folder of the user's that could hold the component's files, for messages; None where
                the pipeline is on the hub.
        """
        repository, key = str(entry.repository), (str(entry.repository).lower(), entry.revision)
        try:
            if key not in self._commits:
                found = HubCommit.find_with(repository, entry.revision, entry.subfolder)
                self._commits[key] = found
                self._with_settings.add((found, entry.subfolder))
            hub = self._commits[key]
            if (hub, entry.subfolder) not in self._with_settings:
                hub.fetch_settings([entry.subfolder])
                self._with_settings.add((hub, entry.subfolder))
        except UserError as error:
            _, _, reason = str(error).partition(": ")
            folder = instead or f"{component} of a local copy of the pipeline"
            raise UserError(
                f"model.path: {component} is read from {repository} on the hub: {reason}; or put its files "
                f"into {folder}"
            ) from error
        return hub
