"""This file is a pipeline in diffusers' layout: its index, and the files of its components."""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath
from typing import Any

from diffsynth_lite.core.weights.stored_formats import is_scale
from diffsynth_lite.errors import UserError
from diffsynth_lite.pipelines.base.folder.hub import HubCommit, fetch_all
from diffsynth_lite.pipelines.base.folder.index import (
    ComponentPlace,
    IndexEntry,
    OtherRepositories,
    holds_component,
    index_file,
    read_entries,
)
from diffsynth_lite.pipelines.base.folder.weight_files import (
    WEIGHT_SUFFIX,
    StoredTensor,
    digest_of,
    header_of,
    of_variant,
    variants,
    which_variant,
)
from diffsynth_lite.pipelines.base.model_settings import (
    ModelSettings,
    read_settings,
    require_readable,
    require_sizes,
    shortened,
)

_WEIGHTS_OF = {"diffusers": "diffusion_pytorch_model", "transformers": "model"}
"""How each library names the weights that it saves."""
_FLOATING = (".weight", ".bias")
"""Endings of names of weights; other tensors may well be of whole numbers, such as positions."""
_COMFYUI_FOLDERS = ("diffusion_models", "unet", "checkpoints")
"""Where ComfyUI's folder of models has transformers and whole models."""
_IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg", ".webp")
"""Of a folder that is taken for a model by mistake."""


@dataclass(frozen=True, kw_only=True)
class ComponentFile:
    """A safetensors file of the user's with the weights of a component, in place of the pipeline's own.

    Attributes:
        path: of the file, which may not exist.
    """

    path: Path
    key: str


@dataclass(frozen=True, kw_only=True)
class PipelineFolder:
    """A diffusers pipeline on disk: an index, and one folder a component, some of them perhaps elsewhere.

    Attributes:
        variant: weight variant to load, such as ``fp16``; None for the plain files, or those that a modular
            index names.
        hub: where to get weights that are not in the folder; None for one of the user's.
        files: by component: its weights come from there, and those in the folder are of no use.
        num_blocks: by component: numbers of blocks that a file of it has, in place of these settings.
        elsewhere: by component: where its files are if they are not in the folder, whatever the index names.
    """

    path: Path
    variant: str | None = None
    hub: HubCommit | None = None
    files: Mapping[str, ComponentFile] = field(default_factory=dict)
    num_blocks: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    elsewhere: Mapping[str, IndexEntry] = field(default_factory=dict)
    _others: OtherRepositories = field(default_factory=OtherRepositories, repr=False, compare=False)

    def pipeline_class_name(self) -> str:
        """Name of the pipeline class that the index gives."""
        index = self.pipeline_config()
        name = index.get("_class_name")
        if not isinstance(name, str):
            raise UserError(f"model.path: {index.file} names no pipeline class (_class_name)")
        return name

    def pipeline_config(self) -> ModelSettings:
        """What the index holds: the pipeline's class, its components and its settings."""
        return self._read_json(index_file(self.path))

    def parts(self) -> dict[str, tuple[str, str]]:
        """Library and class of each component that the index names."""
        return {name: (entry.library, entry.class_name) for name, entry in self._entries().items()}

    def _entries(self) -> dict[str, IndexEntry]:
        own = {name: replace(entry, location=None, subfolder=name) for name, entry in self.elsewhere.items()}
        return own | read_entries(self.pipeline_config()) | self.lacking()

    def lacking(self) -> dict[str, IndexEntry]:
        """The components that are read from ``elsewhere``, as the folder has none of their files."""
        return {
            name: entry
            for name, entry in self.elsewhere.items()
            if not holds_component(self.path / name, with_weights=False)
        }

    def own_subfolders(self) -> list[str]:
        """Folders of the components that are in the pipeline's own repository."""
        return [
            self._subfolder(name, entry)
            for name, entry in self._entries().items()
            if self._is_own(name, entry)
        ]

    def place(self, component: str) -> ComponentPlace:
        """Where the files of a component are; looks once for the repository of one that is in another.

        Files in a folder of the user's go before the repository that its index names, as in diffusers. All
        that is of the pipeline's own repository is of the pipeline's commit.
        """
        entry = self._entries().get(component)
        if entry is None:
            return self._place(self.path, component, self.variant, self.hub)
        subfolder, variant = self._subfolder(component, entry), self.variant or entry.variant
        if self._is_own(component, entry):
            return self._place(self.path, subfolder, variant, self.hub)
        instead = self.path / subfolder if self.hub is None else None
        hub = self._others.commit_of(component, entry, instead=instead)
        return self._place(hub.path, entry.subfolder, variant, hub)

    def _place(
        self, path: Path, subfolder: str, variant: str | None, hub: HubCommit | None
    ) -> ComponentPlace:
        return ComponentPlace(path=path / subfolder, subfolder=subfolder, variant=variant, hub=hub)

    def _subfolder(self, component: str, entry: IndexEntry) -> str:
        """Where a component's files are in this folder, if they are."""
        is_root = self.hub is not None and entry.repository is not None
        return entry.subfolder if entry.subfolder or is_root else component

    def _is_own(self, component: str, entry: IndexEntry) -> bool:
        if entry.repository is None:
            return True
        if self.hub is None:
            place = self.path / self._subfolder(component, entry)
            return holds_component(place, with_weights=component not in self.files)
        is_same = entry.repository.lower() == self.hub.repository.lower()
        return is_same and entry.revision in (None, self.hub.path.name)

    def component_config(self, component: str) -> ModelSettings:
        """The configuration of one component."""
        kind = component.rpartition("_")[-1]
        name = f"{kind}_config.json" if kind in ("scheduler", "guider") else "config.json"
        settings = self._read_json(self.place(component).path / name, component)
        settings.update(self.num_blocks.get(component, {}))
        require_sizes(settings)
        return settings

    def require_complete(self, components: Sequence[str]) -> None:
        """Check the weights that are in a folder of the user's, so that nothing more of them comes."""
        there = [component for component in components if self.place(component).hub is None]
        self.require_weights(there)
        self.require_whole_weights(there)

    def require_weights(self, components: Sequence[str]) -> None:
        """Check that each component without a file of its own has safetensors files of the wanted variant.

        All of them are loaded in one variant; none replaces another, as it does in diffusers.
        """
        self._require({one: self.place(one).file_names() for one in self._without_files(components)})

    def _without_files(self, components: Sequence[str]) -> list[str]:
        return [component for component in components if component not in self.files]

    def _require(self, files: Mapping[str, Iterable[str]]) -> None:
        for component, names in files.items():
            place = self.place(component)
            where = place.path if place.hub is None else f"{place.hub.repository}/{place.subfolder}"
            if not of_variant(names, place.variant):
                plain = "without a variant in their names " if variants(names) else ""
                wanted = f"of variant {place.variant!r} " if place.variant else plain
                advice = which_variant(files)
                if place.variant != self.variant:
                    advice = f"{index_file(self.path).name} names that variant: model.variant goes before it"
                raise UserError(
                    f"model.path: {where} holds no safetensors weights {wanted}"
                    f"(files there: {', '.join(names) or 'none'}); {advice}"
                    f"{'' if names else self._elsewhere(component)}"
                )
            if lacking := set(self._loaded_files(component, names)).difference(names):
                raise UserError(
                    f"model.path: {where} lacks {', '.join(sorted(lacking))}, which its index "
                    "lists; complete the download"
                )

    def _elsewhere(self, component: str) -> str:
        """What to add of a component that is missing, where the index names a folder on some machine."""
        entry = self._entries().get(component)
        if entry is None or entry.location is None or entry.repository is not None:
            return ""
        return (
            f"; {index_file(self.path).name} has {component} in {shortened(entry.location)}, and outside of "
            "the folder nothing is read but repositories of the hub: copy or link it to "
            f"{self.path / self._subfolder(component, entry)}"
        )

    def require_whole_weights(self, components: Sequence[str]) -> None:
        """Check by their headers that the folder's weight files are whole, and weights only; none are read.

        A component's library would leave out scales that it knows nothing of, and take weights that are not
        floating-point numbers for such.
        """
        for component in self._without_files(components):
            tensors = self._stored(component)
            if self.is_quantised(component):
                continue
            place = self.place(component)
            scale = next(filter(is_scale, tensors), None)
            if scale is not None:
                raise UserError(
                    f"model.path: the weights in {place} have scales ({scale}), as ComfyUI's "
                    "fp8_scaled and int8; these are read from model.transformer_file only, not from a folder"
                )
            whole = [
                name for name, one in tensors.items() if name.endswith(_FLOATING) and not one.is_floating
            ]
            if whole:
                raise UserError(
                    f"model.path: the weights in {place} hold {whole[0]} in "
                    f"{tensors[whole[0]].dtype}, and not as floating-point numbers; get the folder again"
                )

    def is_quantised(self, component: str) -> bool:
        """Whether a component's files hold its weights in a format of its library's own."""
        return component not in self.files and "quantization_config" in self.component_config(component)

    def require_as_many_numbers(self, component: str, model_class: Any, needed: int) -> None:
        """Check that a component's files can hold its weights, before memory is made for what they lack.

        Args:
            needed: how many numbers its weights are, by its settings.
        """
        if component in self.files or self.is_quantised(component):
            return
        stored = sum(tensor.num_numbers for tensor in self._stored(component).values())
        if needed > 2 * stored:
            config = self.place(component).path / "config.json"
            raise UserError(
                f"model.path: {config} is that of a {model_class.__name__} with {needed} weights, and "
                f"the files next to it hold {stored}; get the folder again"
            )

    def _stored(self, component: str) -> dict[str, StoredTensor]:
        return {
            name: tensor for file in self.files_to_load(component) for name, tensor in header_of(file).items()
        }

    def download_weights(self, components: Sequence[str]) -> None:
        """Get the weights of some components, where the folder is in the hub's cache and lacks them."""
        by_commit: dict[HubCommit, list[str]] = {}
        for component in self._without_files(components):
            if (hub := self.place(component).hub) is not None:
                by_commit.setdefault(hub, []).append(component)
        lacking = {hub: of_it for hub, of_it in by_commit.items() if not self._has_weights(of_it)}
        with ExitStack() as held:
            # In one order in all processes, so that none waits for one that waits for it.
            for hub in sorted(lacking, key=lambda one: one.repository):
                held.enter_context(hub.lock())
            fetch_all({hub: self._files_to_fetch(hub, of_it) for hub, of_it in lacking.items()})

    def _files_to_fetch(self, hub: HubCommit, components: Sequence[str]) -> dict[str, int]:
        """Bytes of the weight files of components of one repository, by their paths there."""
        subfolders = {component: self.place(component).subfolder for component in components}
        found = hub.list_files(subfolders.values())
        files = {component: found[subfolder] for component, subfolder in subfolders.items()}
        self._require(files)
        return {
            (PurePosixPath(subfolders[component]) / name).as_posix(): files[component][name]
            for component in components
            for name in self._loaded_files(component, files[component])
        }

    def _has_weights(self, components: Sequence[str]) -> bool:
        try:
            self.require_weights(components)
        except UserError:
            return False
        return True

    def _loaded_files(self, component: str, names: Iterable[str]) -> list[str]:
        """The weight files that a component's library loads, where ``names`` are there; some may not be.

        The same weights may be there in one file and in shards: diffusers takes the shards then, and
        transformers the one file. Files of other names next to them are for other programs.
        """
        library, _ = self.parts().get(component, ("", ""))
        place = self.place(component)
        indices = place.path.glob("*.safetensors.index*.json")
        listed = {name for index in indices for name in self._shards_in(index)}
        files, shards = of_variant(names, place.variant), of_variant(sorted(listed), place.variant)
        if library not in _WEIGHTS_OF:
            return sorted({*files, *shards}) if listed.intersection(files) else files
        variant = f".{place.variant}" if place.variant else ""
        single = [name for name in files if name == f"{_WEIGHTS_OF[library]}{variant}{WEIGHT_SUFFIX}"]
        return (shards or single if library == "diffusers" else single or shards) or files

    def _shards_in(self, index: Path) -> set[str]:
        """Names of the files that an index of weights lists: they are next to it."""
        files = self._read_json(index)["weight_map"]
        if not isinstance(files, dict):
            raise UserError(
                f"model.path: {index} is not an index of weights: its weight_map is not an object; get the "
                "folder again"
            )
        for name in files.values():
            if not isinstance(name, str) or Path(name).name != name or not name.endswith(WEIGHT_SUFFIX):
                raise UserError(
                    f"model.path: {index} lists {shortened(name)}, which is not a {WEIGHT_SUFFIX} file next "
                    "to it; get the folder again"
                )
        return set(files.values())

    def files_to_load(self, component: str) -> list[Path]:
        """The weight files of a component that its library loads, also shards that are missing."""
        place = self.place(component)
        return [place.path / name for name in self._loaded_files(component, place.file_names())]

    def require_files(self, component: str) -> None:
        """Check that a component's folder holds something, and that settings in it can be read."""
        place = self.place(component)
        small = place.small_files()
        for path in small:
            require_readable(path)
            if path.name.endswith("config.json"):
                self._read_json(path)
        if not small:
            raise UserError(
                f"model.path: {place} is missing or empty; complete the download{self._elsewhere(component)}"
            )

    def place_of(self, component: str, tensor: str) -> str:
        """The setting and the file that a tensor of a component is read from, or else its folder.

        Args:
            tensor: its name in the model; in a file it may have another.
        """
        if given := self.files.get(component):
            return f"{given.key}: {given.path}"
        files = self.files_to_load(component)
        found = [file for file in files if len(files) == 1 or tensor in header_of(file)]
        return f"model.path: {found[0] if found else self.place(component)}"

    def fingerprint(self, component: str) -> str:
        """Hash of a component: of its configuration and its weights.

        Covers the small files in full, and of each weight file its size, its header and evenly spaced
        blocks: a few milliseconds a file, also at 40 GB. Other weights of the same model differ everywhere; a
        file that was edited between the blocks goes unnoticed.
        """
        place, given = self.place(component), self.files.get(component)
        small = place.small_files()
        if given is None:
            weights = [place.path / name for name in of_variant(place.file_names(), place.variant)]
            return digest_of(small, weights, with_names=True)
        # What else is small lists the folder's weights; and a file that the user named may be renamed.
        small = [path for path in small if path.name == "config.json"]
        return digest_of(small, [given.path], with_names=False)

    def fingerprints(self, *components: str) -> str:
        """The hashes of several components, in their order, for an identity that depends on all of them."""
        return " ".join(map(self.fingerprint, components))

    def _read_json(self, path: Path, component: str = "") -> ModelSettings:
        try:
            return read_settings(path)
        except FileNotFoundError:
            shown = path.relative_to(self.path) if path.is_relative_to(self.path) else path
            raise UserError(
                f"model.path: {self.path} is not a diffusers pipeline: "
                f"{shown} is missing{_near(self.path)}{self._elsewhere(component) if component else ''}"
            ) from None


def _near(folder: Path) -> str:
    """What to add of a folder that is not a pipeline, but next to one, or holds single files."""
    if index_file(folder).is_file():  # another file is missing
        return ""
    parent = folder.resolve().parent
    if index_file(parent).is_file():
        return f"; its parent is one: model.path={parent}"
    if any(path.suffix.lower() in _IMAGE_SUFFIXES for path in folder.glob("*")):
        return f"; it holds images: data.path={folder} trains on them, and model.path is the model"
    for place in (folder, *(folder / name for name in _COMFYUI_FOLDERS)):
        if found := sorted([*place.glob("*.safetensors"), *place.glob("*.gguf")]):
            return (
                f"; {found[0].relative_to(folder)}, as of ComfyUI, goes with model.transformer_file, next to "
                "a pipeline as model.path, which all else is from"
            )
    return ""


def resolve_folder(
    location: str,
    *,
    revision: str | None = None,
    variant: str | None = None,
    known: Sequence[str] = (),
) -> PipelineFolder:
    """The pipeline at a local folder, or in the hub's cache, with all of its components but their weights.

    Components that a modular index places in other repositories are looked for when they are used.

    Args:
        location: a local folder, or a hub id such as ``Qwen/Qwen-Image``. A folder that exists wins.
        revision: branch, tag or commit on the hub.
        known: hub ids to suggest where there is no such folder.

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
    if looks_local(location):
        raise UserError(f"model.path: there is no folder {location}; {_instead(location, known)}")
    hub = HubCommit.find(location, revision)
    folder = PipelineFolder(path=hub.path, variant=variant, hub=hub)
    hub.fetch_settings(folder.own_subfolders())
    return folder


def _instead(location: str, known: Sequence[str]) -> str:
    """What to write where a folder is not there: the hub id that it is named by, or what one looks like."""
    ending = location.rstrip("/").lower().rpartition("/")[2]
    meant = next((one for one in known if one.lower().rpartition("/")[2] == ending), None)
    if meant is None:
        example = f", such as {known[0]}" if known else ""
        return f"check the path, or give a hub id, which has the form owner/name{example}"
    own_copy = "" if "://" in location else f", or get it: hf download {meant} --local-dir {location}"
    return f"set model.path={meant}, which is downloaded once{own_copy}"


def looks_local(location: str) -> bool:
    """Whether a location that does not exist is meant for a folder, and not for a hub id."""
    parts = location.split("/")
    return (
        location.startswith((".", "~", "/"))
        or "\\" in location
        or len(parts) != 2
        or not all(parts)
        or Path(parts[0]).is_dir()
    )
