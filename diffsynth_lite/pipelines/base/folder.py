"""This file finds a pipeline in diffusers' layout, on disk or on the hub, and identifies its weights."""

import hashlib
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from diffsynth_lite.core.weights import is_scale
from diffsynth_lite.errors import UserError
from diffsynth_lite.pipelines.base.hub import INDEX, SMALL_SUFFIXES, HubCommit
from diffsynth_lite.pipelines.base.model_settings import (
    ModelSettings,
    read_settings,
    require_readable,
    require_sizes,
    shortened,
)

_WEIGHT_SUFFIX = ".safetensors"
_WEIGHTS_OF = {"diffusers": "diffusion_pytorch_model", "transformers": "model"}
"""How each library names the weights that it saves."""
_VARIANT = re.compile(r"\.([^.]+?)(?:-\d+-of-\d+)?\.safetensors$")
_FLOATING = (".weight", ".bias")
"""Endings of names of weights; other tensors may well be of whole numbers, such as positions."""
_SAMPLED_BLOCKS = 64
_SAMPLED_BLOCK_BYTES = 64 * 1024
_COMFYUI_FOLDERS = ("diffusion_models", "unet", "checkpoints")
"""Where ComfyUI's folder of models has transformers and whole models."""


@dataclass(frozen=True, kw_only=True)
class ComponentFile:
    """A safetensors file of the user's with the weights of a component, in place of the pipeline's own.

    Attributes:
        path: of the file, which may not exist.
        key: the setting that names it, for messages.
    """

    path: Path
    key: str


@dataclass(frozen=True, kw_only=True)
class PipelineFolder:
    """A diffusers pipeline on disk: ``model_index.json`` and one folder a component.

    Attributes:
        path: the folder.
        variant: weight variant to load, such as ``fp16``; None for the plain files.
        hub: where to get weights that are not in the folder; None for one of the user's.
        files: by component: its weights come from there, and those in the folder are of no use.
    """

    path: Path
    variant: str | None = None
    hub: HubCommit | None = None
    files: Mapping[str, ComponentFile] = field(default_factory=dict)

    def pipeline_class_name(self) -> str:
        """Name of the pipeline class that ``model_index.json`` gives.

        Raises:
            UserError: the file is missing, is not JSON, or names no class.
        """
        name = self.pipeline_config().get("_class_name")
        if not isinstance(name, str):
            raise UserError(
                f"model.path: {self.path / 'model_index.json'} names no pipeline class (_class_name)"
            )
        return name

    def pipeline_config(self) -> ModelSettings:
        """What ``model_index.json`` holds: the pipeline's class, its components' classes and its settings."""
        return self._read_json(self.path / INDEX)

    def parts(self) -> dict[str, tuple[str, str]]:
        """Library and class of each component that ``model_index.json`` names."""
        found = {}
        for name, value in self.pipeline_config().items():
            match value:
                case [str(library), str(class_name)]:
                    found[name] = library, class_name
        return found

    def component_config(self, component: str) -> ModelSettings:
        """The configuration of one component.

        Raises:
            UserError: the component's folder or its config is missing, or cannot be read.
        """
        name = f"{component}_config.json" if component in ("scheduler", "guider") else "config.json"
        settings = self._read_json(self.path / component / name)
        require_sizes(settings)
        return settings

    def require_weights(self, components: Sequence[str]) -> None:
        """Check that each component without a file of its own has safetensors files of the wanted variant.

        All of them are loaded in one variant; none stands in for another, as it does in diffusers.

        Raises:
            UserError: naming the component without weights and the variants there are.
        """
        files = {
            component: sorted(path.name for path in (self.path / component).glob("*") if path.is_file())
            for component in self._without_files(components)
        }
        self._require(files, self.path)

    def _without_files(self, components: Sequence[str]) -> list[str]:
        return [component for component in components if component not in self.files]

    def _require(self, files: Mapping[str, Iterable[str]], place: Path | str) -> None:
        for component, names in files.items():
            if not self._of_variant(names):
                plain = "without a variant in their names " if _variants(names) else ""
                wanted = f"of variant {self.variant!r} " if self.variant else plain
                raise UserError(
                    f"model.path: {place}/{component} holds no safetensors weights {wanted}"
                    f"(files there: {', '.join(names) or 'none'}); {_advice(files)}"
                )
            if lacking := set(self._loaded_files(component, names)).difference(names):
                raise UserError(
                    f"model.path: {place}/{component} lacks {', '.join(sorted(lacking))}, which its index "
                    "lists; complete the download"
                )

    def require_whole_weights(self, components: Sequence[str]) -> None:
        """Check by their headers that the folder's weight files are whole, and weights alone; none are read.

        Raises:
            UserError: a file is no safetensors file, or ends before the tensors that its header lists; or it
                holds scales that the component's library knows nothing of, and would leave out, or weights
                that are no floating-point numbers, which it would take for such.
        """
        for component in self._without_files(components):
            tensors = self._stored(component)
            if self.is_quantised(component):
                continue
            whole = [
                name for name, one in tensors.items() if name.endswith(_FLOATING) and not one.is_floating
            ]
            if whole:
                raise UserError(
                    f"model.path: the weights in {self.path / component} hold {whole[0]} in "
                    f"{tensors[whole[0]].dtype}, and not as floating-point numbers; get the folder again"
                )
            scale = next(filter(is_scale, tensors), None)
            if scale is not None:
                raise UserError(
                    f"model.path: the weights in {self.path / component} have scales ({scale}), as ComfyUI's "
                    "fp8_scaled files; these are read from model.transformer_file alone, not from a folder"
                )

    def is_quantised(self, component: str) -> bool:
        """Whether a component's files hold its weights in a format of its library's own."""
        return component not in self.files and "quantization_config" in self.component_config(component)

    def require_as_many_numbers(self, component: str, model_class: Any, needed: int) -> None:
        """Check that a component's files can hold its weights, before memory is made for what they lack.

        Args:
            model_class: of the component.
            needed: how many numbers its weights are, by its settings.

        Raises:
            UserError: they hold less than half as many numbers.
        """
        if component in self.files or self.is_quantised(component):
            return
        stored = sum(tensor.num_numbers for tensor in self._stored(component).values())
        if needed > 2 * stored:
            raise UserError(
                f"model.path: {self.path / component / 'config.json'} is that of a {model_class.__name__} "
                f"with {needed} weights, and the files beside it hold {stored}; get the folder again"
            )

    def _stored(self, component: str) -> dict[str, "_StoredTensor"]:
        return {
            name: tensor
            for file in self.files_to_load(component)
            for name, tensor in _header_of(file).items()
        }

    def _of_variant(self, names: Iterable[str]) -> list[str]:
        wanted = self.variant or ""
        return [name for name in names if name.endswith(_WEIGHT_SUFFIX) and _variant_of(name) == wanted]

    def download_weights(self, components: Sequence[str]) -> None:
        """Get the weights of some components, where the folder is in the hub's cache and lacks them.

        Raises:
            UserError: the hub has none of the wanted variant or cannot be reached, or the disk is too small.
        """
        if self.hub is None or self._has_weights(components):
            return
        components = self._without_files(components)
        with self.hub.alone():
            files = self.hub.list_files(components)
            self._require(files, self.hub.repository)
            self.hub.fetch_weights(
                {
                    f"{component}/{name}": files[component][name]
                    for component in components
                    for name in self._loaded_files(component, files[component])
                }
            )

    def _has_weights(self, components: Sequence[str]) -> bool:
        try:
            self.require_weights(components)
        except UserError:
            return False
        return True

    def _loaded_files(self, component: str, names: Iterable[str]) -> list[str]:
        """The weight files that a component's library loads, where ``names`` are there; some may not be.

        The same weights may be there in one file and in shards: diffusers takes the shards then, and
        transformers the one file. Files of other names beside them are for other programs.
        """
        library, _ = self.parts().get(component, ("", ""))
        indices = (self.path / component).glob("*.safetensors.index*.json")
        listed = {name for index in indices for name in self._shards_in(index)}
        files, shards = self._of_variant(names), self._of_variant(sorted(listed))
        if library not in _WEIGHTS_OF:
            return sorted({*files, *shards}) if listed.intersection(files) else files
        variant = f".{self.variant}" if self.variant else ""
        single = [name for name in files if name == f"{_WEIGHTS_OF[library]}{variant}{_WEIGHT_SUFFIX}"]
        return (shards or single if library == "diffusers" else single or shards) or files

    def _shards_in(self, index: Path) -> set[str]:
        """Names of the files that an index of weights lists: they are beside it."""
        files = self._read_json(index)["weight_map"]
        if not isinstance(files, dict):
            raise UserError(
                f"model.path: {index} is no index of weights: its weight_map is no object; get the folder "
                "again"
            )
        for name in files.values():
            if not isinstance(name, str) or Path(name).name != name or not name.endswith(_WEIGHT_SUFFIX):
                raise UserError(
                    f"model.path: {index} lists {shortened(name)}, which is no {_WEIGHT_SUFFIX} file beside "
                    "it; get the folder again"
                )
        return set(files.values())

    def files_to_load(self, component: str) -> list[Path]:
        """The weight files of a component that its library loads, also shards that are missing."""
        folder = self.path / component
        names = sorted(path.name for path in folder.glob("*"))
        return [folder / name for name in self._loaded_files(component, names)]

    def require_files(self, component: str) -> None:
        """Check that a component's folder is there and holds something, and that settings in it can be read.

        Raises:
            UserError: naming the folder or the file.
        """
        small = self._small_files(component)
        for path in small:
            require_readable(path)
            if path.name.endswith("config.json"):
                self._read_json(path)
        if not small:
            raise UserError(f"model.path: {self.path / component} is missing or empty; complete the download")

    def place_of(self, component: str, tensor: str) -> str:
        """The setting and the file that a tensor of a component is read from, or its folder if no name tells.

        Args:
            tensor: its name in the model; in a file it may have another.
        """
        if given := self.files.get(component):
            return f"{given.key}: {given.path}"
        files = self.files_to_load(component)
        found = [file for file in files if len(files) == 1 or tensor in _header_of(file)]
        return f"model.path: {found[0] if found else self.path / component}"

    def fingerprint(self, component: str) -> str:
        """Hash that tells one component from another: its configuration and its weights.

        Covers the small files in full, and of each weight file its size, its header and evenly spaced
        blocks: a few milliseconds a file, also at 40 GB. Other weights of the same model differ everywhere; a
        file that was edited between the blocks goes unnoticed.
        """
        digest = hashlib.blake2b(digest_size=16)
        small = self._small_files(component)
        if component in self.files:
            # What else is small lists the folder's weights.
            small = [path for path in small if path.name == "config.json"]
        for path in small:
            digest.update(path.name.encode() + path.read_bytes())
        for path in self._weight_files(component):
            size = path.stat().st_size
            # One that the user named may be renamed.
            name = "" if component in self.files else path.name
            digest.update(f"{name}:{size}".encode())
            stride = max(size // _SAMPLED_BLOCKS, _SAMPLED_BLOCK_BYTES)
            with path.open("rb") as file:
                for offset in range(0, size, stride):
                    file.seek(offset)
                    digest.update(file.read(_SAMPLED_BLOCK_BYTES))
        return digest.hexdigest()

    def fingerprints(self, *components: str) -> str:
        """The hashes of several components, in their order, for an identity that depends on all of them."""
        return " ".join(map(self.fingerprint, components))

    def _small_files(self, component: str) -> list[Path]:
        return sorted(path for path in (self.path / component).glob("*") if path.suffix in SMALL_SUFFIXES)

    def _weight_files(self, component: str) -> list[Path]:
        if component in self.files:
            return [self.files[component].path]
        folder = self.path / component
        return [folder / name for name in self._of_variant(sorted(path.name for path in folder.glob("*")))]

    def _read_json(self, path: Path) -> ModelSettings:
        try:
            return read_settings(path)
        except FileNotFoundError:
            raise UserError(
                f"model.path: {self.path} is not a diffusers pipeline: "
                f"{path.relative_to(self.path)} is missing{_near(self.path)}"
            ) from None


def _near(folder: Path) -> str:
    """What to add of a folder that is not a pipeline, but beside one, or holds single files."""
    if (folder / "model_index.json").is_file():  # another file is missing
        return ""
    parent = folder.resolve().parent
    if (parent / "model_index.json").is_file():
        return f"; its parent is one: model.path={parent}"
    for place in (folder, *(folder / name for name in _COMFYUI_FOLDERS)):
        if found := sorted([*place.glob("*.safetensors"), *place.glob("*.gguf")]):
            return (
                f"; {found[0].relative_to(folder)}, as of ComfyUI, goes with model.transformer_file, beside "
                "a pipeline as model.path, which all else is from"
            )
    return ""


def resolve_folder(
    location: str, *, revision: str | None = None, variant: str | None = None
) -> PipelineFolder:
    """The pipeline at a local folder, or in the hub's cache, with all of its components but their weights.

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
    hub.fetch_settings(folder.parts())
    return folder


def _variant_of(name: str) -> str:
    """As in ``model.fp16.safetensors`` and ``model.fp16-00001-of-00002.safetensors``; else empty."""
    match = _VARIANT.search(name)
    return match[1] if match else ""


def _variants(names: Iterable[str]) -> set[str]:
    return {_variant_of(name) for name in names if name.endswith(_WEIGHT_SUFFIX)}


def _advice(files: Mapping[str, Iterable[str]]) -> str:
    """Which variant would do; where none does, which each component has."""
    there = {component: _variants(names) for component, names in files.items()}
    if of_all := sorted(set[str].intersection(*there.values())):
        return " or ".join(f"set model.variant: {one}" if one else "remove model.variant" for one in of_all)
    if not all(there.values()):
        return "complete the download, or check model.path and model.variant"
    listed = "; ".join(
        f"{component}: {', '.join(one or 'plain' for one in sorted(variants))}"
        for component, variants in there.items()
    )
    return (
        f"all components are loaded in one variant, and none is there for all of them ({listed}): get "
        "what is missing, or rename the files"
    )


def _looks_local(location: str) -> bool:
    parts = location.split("/")
    return (
        location.startswith((".", "~", "/"))
        or "\\" in location
        or len(parts) != 2
        or not all(parts)
        or Path(parts[0]).is_dir()
    )


@dataclass(frozen=True, kw_only=True)
class _StoredTensor:
    """What the header of a file says of a tensor."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def is_floating(self) -> bool:
        return self.dtype.startswith(("F", "BF"))

    @property
    def num_numbers(self) -> int:
        return math.prod(self.shape)


def _header_of(file: Path) -> dict[str, _StoredTensor]:
    try:
        with safe_open(file, framework="pt") as opened:
            parts = {name: opened.get_slice(name) for name in list(opened.keys())}
            return {
                name: _StoredTensor(dtype=part.get_dtype(), shape=tuple(part.get_shape()))
                for name, part in parts.items()
            }
    except (SafetensorError, OSError) as error:
        raise UserError(
            f"model.path: the weights in {file.parent} cannot be read ({file.name}: {error}); "
            "get that file again"
        ) from error
