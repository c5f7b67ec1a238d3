"""This file writes LoRA files for pipelines of diffusers, in the spelling of their family, and reads them."""

import json
import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from diffusers.loaders.lora_base import LORA_ADAPTER_METADATA_KEY, LORA_WEIGHT_NAME_SAFE
from peft.utils.other import get_pattern_key
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

from diffsynth_lite.errors import UserError
from diffsynth_lite.lora.adapter import example_tensors, peft_pattern
from diffsynth_lite.lora.kinds import LORA, AdapterKind
from diffsynth_lite.lora.layer_names import LoraLayers
from diffsynth_lite.lora.layers import COMFYUI_SCALE, MAGNITUDE
from diffsynth_lite.lora.loading import FileHeader, LoadedLayer, header_of
from diffsynth_lite.lora.reading import LoraContents, contents_of, known_updates, read_contents
from diffsynth_lite.lora.spelling import DIFFUSERS, Spelling
from diffsynth_lite.lora.updates import (
    DoraUpdate,
    LayerUpdate,
    LoraFile,
    LoraPair,
    adapter_of,
    lokr_updates,
    tensors_of,
    updates_of,
)
from diffsynth_lite.pipelines.base.composite import join_adapter, split_adapter

logger = logging.getLogger(__name__)


@dataclass(kw_only=True)
class LoraFiles:
    """The adapter files of a pipeline of diffusers, which it loads or its models do.

    Attributes:
        pipeline: its class.
        models: classes of the components that are trained, in order.
        spelling: the names of layers in the files, of which ``settle`` takes others where it must.
        layers: as ``lora_layers`` of a family.
        prefixes: as ``lora_prefixes`` of a family.
        names: of the file of each component that is not in the usual one.
        ask_loader: what the pipeline, or its models, do with a file, as ``loaded_layers`` gives it, by its
            header and the components that it is for, by their names in the pipeline; raises ValueError where
            they refuse it.
        pipeline_loads_adapter: whether the pipeline loads files of the kind of adapter that is trained.
    """

    pipeline: Any
    models: Mapping[str, Any]
    spelling: Spelling
    layers: LoraLayers
    prefixes: Mapping[str, str]
    names: Mapping[str, str]
    ask_loader: Callable[[Mapping[str, str], FileHeader], Mapping[tuple[str, str], LoadedLayer]]
    pipeline_loads_adapter: bool = True
    _settled_for: tuple[AdapterKind, tuple[str, ...]] | None = field(default=None, init=False)

    @property
    def trained(self) -> tuple[str, ...]:
        """Names of the components that are trained, in order."""
        return tuple(self.models)

    def save(
        self,
        folder: Path,
        tensors: Mapping[str, torch.Tensor],
        settings: Mapping[str, Any],
        *,
        dtype: torch.dtype = torch.float32,
    ) -> list[Path]:
        """Write an adapter in ``spelling``.

        Args:
            tensors: the adapter, by peft's names in the model that is trained.

        Returns:
            The files written, one for each expert.
        """
        parts = split_adapter(tensors, settings, self.trained)
        files = self._by_file(folder)
        for file, components in files.items():
            of_file = {self._in_pipeline(component): parts[component][1] for component in components}
            file.parent.mkdir(parents=True, exist_ok=True)
            metadata = {"format": "pt", **_adapter_metadata(self.spelling, of_file)}
            save_file(self._file_tensors(parts, components, dtype), file, metadata=metadata)
        return list(files)

    def read(self, place: Path) -> LoraFile:
        """Read an adapter from its folder or its one file, of this or another program.

        Without ``layers`` it reads what the pipeline does.

        Returns:
            Tensors by peft's names in the model that is trained, and ``lora_alpha`` for all of them.
        """
        if self.layers:
            return adapter_of(self._known_updates(place))
        parts: dict[str, LoraFile] = {}
        for file, components in self._by_file(place).items():
            contents = _read_any(self.pipeline, file) if self.pipeline_loads_lora else read_contents(file)
            updates = contents.updates
            by_prefix = _split(updates, list(map(self.prefix, components)))
            for component, of_component in zip(components, by_prefix, strict=True):
                parts[component] = adapter_of(of_component) if of_component else ({}, {})
        return join_adapter(parts)

    def _known_updates(self, place: Path) -> dict[str, LayerUpdate]:
        """Updates in files of this or other programs, by the names of layers in the model that is trained.

        Those of components that are not trained have their names in a pipeline.
        """
        updates: dict[str, LayerUpdate] = {}
        files = self._by_file(place)
        if len(files) == 1 and not next(iter(files)).exists():
            files = {place: list(self.trained)}  # a folder of another trainer, with a file of another name
        for file, components in files.items():
            for name, update in known_updates(read_contents(file), self.layers).items():
                updates[self._trained_layer(name, components)] = update
        return updates

    def _trained_layer(self, name: str, components: Sequence[str]) -> str:
        for component in components:
            prefix = self.prefix(component)
            if name.startswith(prefix):
                layer = name.removeprefix(prefix)
                return layer if len(self.trained) == 1 else f"{component}.{layer}"
        return name

    def loaded(self, folder: Path) -> dict[str, LayerUpdate]:
        """The update of each layer after the pipeline has loaded the files of ``save``.

        For a kind that the pipeline does not load, the update in the file.

        Returns:
            By the names of the layers in the model that is trained.
        """
        if not self.pipeline_loads_adapter:
            return self._known_updates(folder)
        if not self._has_loader:
            return updates_of(*self.read(folder))
        updates: dict[str, LayerUpdate] = {}
        for file, components in self._by_file(folder).items():
            tensors, stated = load_file(file), _stated_settings(file)
            for layer, found in self._loaded_layers(tensors, components, stated).items():
                updates[layer] = _update_of(found, tensors)
        return updates

    def settle(self, model: nn.Module, layers: Sequence[str], *, rank: int, kind: AdapterKind = LORA) -> None:
        """Make ``spelling`` one in which diffusers loads an adapter on these layers.

        Logs if diffusers cannot load this kind of adapter, and warns of layers for which ComfyUI has no name.

        Args:
            model: may be on the meta device.
        """
        # Settings of the memory, for which it is asked again, change nothing here.
        if self._settled_for == (kind, tuple(layers)):
            return
        self.pipeline_loads_adapter = True
        if kind.name != LORA.name:
            self._settle_kind(model, layers, rank, kind)
        elif self._has_loader:
            self._settle_pairs(model, layers, rank)
        else:
            return
        self._log_what_comfyui_lacks(layers)
        self._settled_for = kind, tuple(layers)

    def _settle_pairs(self, model: nn.Module, layers: Sequence[str], rank: int) -> None:
        if self._loads(model, layers, rank, LORA):
            return
        self.spelling = DIFFUSERS
        if not self._loads(model, layers, rank, LORA):
            raise UserError(
                f"lora.target_modules: diffusers' {self.pipeline.__name__} loads no LoRA on "
                f"{_some(layers)} only; add other layers"
            )
        logger.warning(
            "The LoRA file will have diffusers' names, by which ComfyUI does not find the layers: by "
            "others diffusers' %s loads no LoRA on %s only (lora.target_modules).",
            self.pipeline.__name__,
            _some(layers),
        )

    def _settle_kind(self, model: nn.Module, layers: Sequence[str], rank: int, kind: AdapterKind) -> None:
        """The file has the names that ComfyUI takes, whatever the pipeline does."""
        if not self.layers:
            raise UserError(
                f"lora.kind: {kind.name} is written and read by the names in lora_layers, which this family "
                "does not have; set it to lora"
            )
        if kind.derived:
            self._require_order_of_rows(model, layers)
        self.pipeline_loads_adapter = self._has_loader and self._loads(model, layers, rank, kind)
        if not self.pipeline_loads_adapter:
            logger.warning(
                "diffusers' %s does not load a %s of this family: the file is for %s (docs/lora-file.md).",
                self.pipeline.__name__,
                kind.title,
                " and ".join(self.other_readers()),
            )

    def _require_order_of_rows(self, model: nn.Module, layers: Sequence[str]) -> None:
        """Check that ComfyUI has the rows of all weights in the order that they have here.

        It swaps the halves of an update where they come in another order there, not what multiplies rows.
        """
        for component, (_, part) in split_adapter({}, {"target_modules": layers}, self.trained).items():
            names = self.layers[self._in_pipeline(component)]
            of_component = model if len(self.trained) == 1 else model.get_submodule(component)
            for layer in part["target_modules"]:
                num_outputs, num_inputs = of_component.get_parameter(f"{layer}.weight").shape
                if names.in_kohya(layer)[1].swaps(num_inputs, num_outputs):
                    raise UserError(
                        f"lora.target_modules: {layer} has the halves of its outputs in another order in "
                        "ComfyUI, which would multiply a DoRA's rows in the wrong one; leave it out, or set "
                        "lora.kind: lora"
                    )

    @property
    def loaded_by_diffusers(self) -> bool:
        """Whether the pipeline, or a model of it, loads the kind of adapter that is trained."""
        return self.pipeline_loads_adapter or self.adapter_model is not None

    def other_readers(self) -> Iterator[str]:
        """Who takes a file that the pipeline does not load."""
        if self.spelling.unknown_to_comfyui not in (None, ("",)):
            yield "ComfyUI"
        if model := self.adapter_model:
            yield f"{model}.load_lora_adapter(..., prefix={model!r}) of diffusers"
        yield "diffsynth-lite sample"

    @property
    def adapter_model(self) -> str | None:
        """The model of the pipeline that loads what the pipeline does not; None where the file is of several,
        or has other names than diffusers'."""
        spelling = self.spelling
        if spelling.prefixes or spelling.renames or spelling.is_flat or len(self.trained) > 1:
            return None
        return self._in_pipeline(self.trained[0])

    def _log_what_comfyui_lacks(self, layers: Sequence[str]) -> None:
        if self.spelling.unknown_to_comfyui is None:
            return
        parts = split_adapter({}, {"target_modules": layers}, self.trained)
        names = [
            f"{component}.{layer}"
            for component, (_, of_it) in parts.items()
            for layer in of_it["target_modules"]
        ]
        lacking = [name for name in names if not self.spelling.in_comfyui(name)]
        if self.spelling.is_converted_for_comfyui:
            has = "several of its layers as one" if self.spelling.is_joined_in_comfyui else "other names"
            logger.info(
                "The file is for diffusers: ComfyUI has %s, and takes what `diffsynth-lite convert --to "
                "comfyui` makes of a plain LoRA.",
                has,
            )
        elif len(lacking) == len(names):
            logger.info("ComfyUI has no names for the layers of this model: the LoRA file is for diffusers.")
        elif lacking:
            logger.warning(
                "ComfyUI has no names for %d of the %d layers that get a LoRA, and leaves them out: %s "
                "(lora.target_modules).",
                len(lacking),
                len(names),
                _some(lacking),
            )

    @property
    def _has_loader(self) -> bool:
        """Whether diffusers loads LoRAs of these models; else their family writes and reads them itself."""
        return self.pipeline_loads_lora or all(
            hasattr(model, "load_lora_adapter") for model in self.models.values()
        )

    @property
    def pipeline_loads_lora(self) -> bool:
        """Whether the pipeline has ``load_lora_weights``; else the models may have ``load_lora_adapter``."""
        return hasattr(self.pipeline, "load_lora_weights")

    def _loads(self, model: nn.Module, layers: Sequence[str], rank: int, kind: AdapterKind) -> bool:
        """Whether the pipeline loads all of an adapter on these layers in ``spelling``."""
        tensors = example_tensors(model, layers, rank=rank, kind=kind)
        parts = split_adapter(tensors, {"target_modules": layers}, self.trained)
        found: dict[str, LoadedLayer] = {}
        for components in self._by_file(Path()).values():
            try:
                found |= self._loaded_layers(self._file_tensors(parts, components), components, {})
            except (ValueError, KeyError):
                return False
        given = {f"{layer}{ending}" for layer, one in found.items() for ending in one.parts}
        return given == {name for name in tensors if not name.endswith(kind.derived)}

    def _file_tensors(
        self,
        parts: Mapping[str, LoraFile],
        components: Sequence[str],
        dtype: torch.dtype = torch.float32,
    ) -> dict[str, torch.Tensor]:
        updates: dict[str, LayerUpdate] = {}
        for component in components:
            updates |= updates_of(*parts[component], self.prefix(component))
        return tensors_of(updates, self.spelling, dtype)

    def _loaded_layers(
        self, tensors: Mapping[str, torch.Tensor], components: Sequence[str], stated: Mapping[str, Any]
    ) -> dict[str, LoadedLayer]:
        """What the pipeline does with a file, by the names of layers in the model that is trained."""
        names = {self._in_pipeline(component): component for component in components}
        layers = {}
        for (model, layer), found in self.ask_loader(names, header_of(tensors)).items():
            name = layer if len(self.trained) == 1 else f"{names[model]}.{layer}"
            if not stated:
                layers[name] = found
            elif layer in stated[f"{model}.target_modules"]:  # its loaders use only what a file states
                layers[name] = replace(found, scale=_stated_scale(stated, model, layer))
        return layers

    def prefix(self, component: str) -> str:
        """What the names of a component's layers begin with in the pipeline."""
        return self.prefixes.get(component, f"{component}.")

    def _in_pipeline(self, component: str) -> str:
        """The model of the pipeline that a component's LoRA is loaded into."""
        return self.prefix(component).partition(".")[0]

    @property
    def by_name(self) -> dict[str, list[str]]:
        """The components whose LoRA each file holds, by its name."""
        files: dict[str, list[str]] = {}
        for component in self.trained:
            files.setdefault(self.names.get(component, LORA_WEIGHT_NAME_SAFE), []).append(component)
        return files

    def _by_file(self, place: Path) -> dict[Path, list[str]]:
        """The components whose LoRA each file holds: the one file given, or those in a folder."""
        if not place.is_file():
            return {place / name: components for name, components in self.by_name.items()}
        if len(self.by_name) > 1:
            raise UserError(
                f"{place}: one file, but this LoRA is several; name a folder with {sorted(self.by_name)}"
            )
        return {place: list(self.trained)}


def _some(layers: Sequence[str]) -> str:
    more = f" and {len(layers) - 3} more" if len(layers) > 3 else ""
    return f"{', '.join(layers[:3])}{more}"


def _adapter_metadata(spelling: Spelling, settings: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """peft's settings of each model of a pipeline as diffusers' loaders want them.

    They refuse them in a file with tensors of alpha.
    """
    if spelling.is_flat:
        return {}
    stated = {
        f"{model}.{name}": value
        for model, of_model in settings.items()
        for name, value in {**of_model, **_folded(of_model)}.items()
    }
    return {LORA_ADAPTER_METADATA_KEY: json.dumps(stated, indent=2, sort_keys=True)}


def _folded(settings: Mapping[str, Any]) -> dict[str, Any]:
    """What takes the place of alpha, which is folded, as other programs do not read it: the ranks."""
    alpha = {_alpha_setting(settings): settings["r"]}
    if not settings.get("rank_pattern") and not settings.get("alpha_pattern"):
        return alpha
    ranks = peft_pattern(settings.get("rank_pattern", {}))
    return {**alpha, "rank_pattern": ranks, "alpha_pattern": ranks}


def _alpha_setting(settings: Collection[str], prefix: str = "") -> str:
    """What peft calls alpha: otherwise in a LoKr than in a LoRA."""
    return "lora_alpha" if f"{prefix}lora_alpha" in settings else "alpha"


def _update_of(found: LoadedLayer, tensors: Mapping[str, torch.Tensor]) -> LayerUpdate:
    """The update of a layer by tensors of a file, with the tensor for ComfyUI that is with them."""
    given = {ending: tensors[name] for ending, name in found.parts.items()}
    if ".lora_A.weight" not in given:
        return replace(lokr_updates(given)[""], scale=found.scale)
    down, up = given[".lora_A.weight"], given[".lora_B.weight"]
    pair = LoraPair(down=down, up=up, alpha=found.scale * len(down))
    if MAGNITUDE not in given:
        return pair
    scale = tensors.get(found.parts[MAGNITUDE].removesuffix(MAGNITUDE) + COMFYUI_SCALE)
    return DoraUpdate(
        pair=pair, magnitude=given[MAGNITUDE], comfyui=None if scale is None else scale.flatten()
    )


def _stated_scale(stated: Mapping[str, Any], model: str, layer: str) -> float:
    """What the update of a layer is multiplied with, by the settings of peft in a file."""
    alpha, rank = (
        patterns.get(get_pattern_key(list(patterns), layer), stated[f"{model}.{of_all}"])
        for patterns, of_all in (
            (stated.get(f"{model}.alpha_pattern", {}), _alpha_setting(stated, f"{model}.")),
            (stated.get(f"{model}.rank_pattern", {}), "r"),
        )
    )
    return float(alpha / rank)


def _stated_settings(file: Path) -> dict[str, Any]:
    """peft's settings of all components in a file; none where it has no such metadata."""
    with safe_open(file, "pt") as opened:
        stated: dict[str, Any] = json.loads((opened.metadata() or {}).get(LORA_ADAPTER_METADATA_KEY, "{}"))
    return stated


def _read_any(pipeline_class: Any, file: Path) -> LoraContents:
    """What a pipeline's own loader finds in a file, by diffusers' names of layers, after their components."""
    try:
        tensors, *_, settings = pipeline_class.lora_state_dict(
            file.parent,
            weight_name=file.name,
            use_safetensors=True,
            local_files_only=True,
            return_lora_metadata=True,
        )
    except Exception as error:  # its converters know no class of errors
        raise UserError(
            f"{file}: holds no LoRA that {pipeline_class.__name__} can read ({' '.join(str(error).split())})"
        ) from error
    metadata = {LORA_ADAPTER_METADATA_KEY: json.dumps(settings)} if settings else {}
    return contents_of(file, tensors, metadata)


def _split(values: Mapping[str, LayerUpdate], prefixes: Sequence[str]) -> list[dict[str, LayerUpdate]]:
    """What begins with each prefix, without it.

    What begins with none of them is left to the first, whose layers then are not those that are asked for.
    """
    parts: dict[str, dict[str, LayerUpdate]] = {prefix: {} for prefix in prefixes}
    for name, value in values.items():
        prefix = next(filter(name.startswith, prefixes), prefixes[0])
        parts[prefix][name.removeprefix(prefix)] = value
    return list(parts.values())
