"""This file loads the components of a pipeline of diffusers, and the files of adapters on them."""

import inspect
import json
import logging
from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache, cached_property
from typing import Any, ClassVar

import diffusers
import torch
from diffusers import ModularPipeline, SchedulerMixin
from safetensors import SafetensorError
from transformers import PreTrainedModel

from diffsynth_lite.core.gradient import count_blocks
from diffsynth_lite.core.weights.packing import HostBlocks
from diffsynth_lite.errors import UserError
from diffsynth_lite.lora.loading import FileHeader, LoadedLayer, loaded_layers
from diffsynth_lite.pipelines.base.composite import Composite
from diffsynth_lite.pipelines.base.family import ModelFamily
from diffsynth_lite.pipelines.base.folder import ComponentFile
from diffsynth_lite.pipelines.base.lora_files import LoraFiles
from diffsynth_lite.pipelines.base.model_settings import (
    ModelSettings,
    building,
    require_class,
    require_kinds,
    require_possible,
)
from diffsynth_lite.pipelines.base.quantized import (
    load_frozen_component,
    load_plain_component,
    require_finite_weights,
)
from diffsynth_lite.pipelines.base.release_folder import count_parameters, empty_model
from diffsynth_lite.pipelines.base.single_file import num_blocks_in, read_single_file
from diffsynth_lite.pipelines.base.tokenizer import load_tokenizer
from diffsynth_lite.pipelines.base.transformers_loading import load_frozen_encoder
from diffsynth_lite.pipelines.base.vae_tiles import VaeTiles, tile_when_full, tiles_of
from diffsynth_lite.progress_log import current_watch

logger = logging.getLogger(__name__)

_TELLING = ("prediction_type", "use_flow_sigmas")
"""Settings of a scheduler that define what it samples."""


class DiffusersComponents(ModelFamily):
    """A family whose components are classes of diffusers and transformers.

    Attributes:
        pipelines: the pipeline's class, or several where releases of one model differ in it.
        transformer_class: of ``trainable`` components that ``encoder_classes`` does not name.
        lora_prefixes: what the names of a component's layers begin with in a pipeline, where that is not the
            component's.
        float16_vae: whether the autoencoder works in float16 though ``force_upcast`` is in its settings.
    """

    pipelines: ClassVar[tuple[Any, ...]]
    transformer_class: ClassVar[Any]
    lora_prefixes: ClassVar[Mapping[str, str]] = {}
    float16_vae: ClassVar[bool] = True

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if "pipelines" in vars(cls):
            cls.pipeline_classes = tuple(pipeline.__name__ for pipeline in cls.pipelines)

    @cached_property
    def pipeline(self) -> Any:
        """The one of ``pipelines`` that the folder names; it saves and loads the adapter files."""
        name = self.folder.pipeline_class_name()
        return next(pipeline for pipeline in self.pipelines if pipeline.__name__ == name)

    @property
    def pipeline_settings(self) -> Mapping[str, Any]:
        """What a pipeline is made with next to its components, for prompts, media and previews."""
        return {}

    @cached_property
    def scheduler_config(self) -> ModelSettings:
        """Settings of the folder's scheduler, read once: the shift is asked for with every batch."""
        return self.folder.component_config("scheduler")

    def check_folder(self, *, with_weights: bool = True) -> None:
        super().check_folder(with_weights=with_weights)
        for component in self.components:
            component_class, settings = (
                self.component_class(component),
                self.folder.component_config(component),
            )
            require_class(component_class, settings)
            require_kinds(component_class, settings)
            self._num_weights(component)
        for component, file in self.folder.files.items():
            if component in self.denoisers:
                self._take_depth(component, file)
            stored = read_single_file(file, self.empty_component(component))
            logger.info("%s of %s: %s.", component, file.path, stored.described())
        # Seconds; else the captions of a run would find out, or a download of gigabytes before them.
        for name in self.tokenizers:
            self.load_tokenizer(name)
        # Else missed at the first preview, which only warns, or generated with a sampler of another kind.
        self.check_scheduler(self.load_scheduler())

    def _take_depth(self, component: str, file: ComponentFile) -> None:
        """Have a model as many blocks as its file: people make some deeper than the release is."""
        model: Any = self.empty_component(component)
        taken = self.folder.num_blocks
        for block_list, num in num_blocks_in(file, model, self.block_lists).items():
            released = count_blocks(model, [block_list])
            depths = [key for key, value in model.config.items() if "layers" in key and value == released]
            for key in depths if num != released else ():
                own = {**taken.get(component, {}), key: num}
                self.folder = replace(self.folder, num_blocks={**taken, component: own})
                if count_blocks(self.empty_component(component), [block_list]) == num:
                    logger.info("%s has %d %s, the folder %d.", file.path, num, block_list, released)
                    taken = self.folder.num_blocks
                    break
                self.folder = replace(self.folder, num_blocks=taken)

    def check_scheduler(self, scheduler: Any) -> None:
        """Check that the folder's sampler goes the way from noise to data that the family is trained on."""
        if not matches_flows(scheduler):
            raise UserError(
                f"model.path: {self.folder.place('scheduler')}: {described(scheduler)} is not a sampler of "
                "flow matching, which this family trains; get the folder's own scheduler again, or check "
                "model.path and model.family"
            )

    @property
    @abstractmethod
    def encoder_classes(self) -> Mapping[str, Any]:
        """Classes of the text encoders, the autoencoder and the like, by folder; often a plain attribute."""

    @property
    def components(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys((*self.trainable, *self.encoder_classes)))

    @property
    def denoisers(self) -> tuple[str, ...]:
        return tuple(name for name in self.trainable if name not in self.encoder_classes)

    def component_class(self, name: str) -> Any:
        """The class, of diffusers or transformers, that the family loads a component with."""
        return self.encoder_classes.get(name, self.transformer_class)

    def load_component(self, name: str, dtype: torch.dtype, encoder_blocks: HostBlocks | None = None) -> Any:
        """A component with its weights in ``dtype``, on the CPU; pickled weights are refused.

        Where ``quantization``, ``host_blocks`` or ``shards`` is set, models outside of ``encoder_classes``
        are loaded by it, and to its device; text encoders by ``text_encoder_memory``. The autoencoder,
        ``vae``, works in ``vae_tiles``. A component that the folder has a file of its own for is read from
        that file.

        Args:
            encoder_blocks: the layers of a text encoder that are loaded to host memory, and the device that
                all else of it goes to; None loads it as any other.
        """
        current_watch()("loading", 0, 0)
        component_class = self.component_class(name)
        source = component_class, self.folder, name, dtype
        placing: tuple[Any, ...] = self.quantization, self.host_blocks, self.shards
        load: Callable[..., torch.nn.Module] = load_frozen_component
        if name in self.encoder_classes:
            placing = self.text_encoder_memory.quantizations.get(name), encoder_blocks
            if issubclass(component_class, PreTrainedModel):
                load = load_frozen_encoder
        try:
            if any(placing) or name in self.folder.files:
                component = load(*source, *placing)
            else:
                self.folder.require_as_many_numbers(name, component_class, self._num_weights(name))
                component = load_plain_component(*source)
        except (SafetensorError, OSError) as error:
            raise UserError(
                f"model.path: the weights in {self.folder.place(name)} cannot be read "
                f"({' '.join(str(error).split())}); get the folder again"
            ) from error
        if name not in (*self.denoisers, *self.text_encoders):  # these are looked at on their device
            require_finite_weights(self.folder, name, component)
        if name == "vae" and self.vae_tiles is not None:
            self.vae_tiles.apply_to(component)
        return component

    @property
    def known_vae_tiles(self) -> VaeTiles | None:
        vae_class = self.encoder_classes.get("vae")
        return vae_class and tiles_of(vae_class, self.folder.component_config("vae"))

    def check_vae_dtype(self, dtype: torch.dtype) -> None:
        if self.float16_vae or dtype != torch.float16:
            return
        if self.folder.component_config("vae").get("force_upcast", True):
            raise UserError(
                f"model.vae_dtype: float16 is too narrow for the VAE in {self.folder.path / 'vae'} "
                "(force_upcast in its config): images turn black; use float32"
            )

    def load_preview_vae(self, dtype: torch.dtype, device: torch.device) -> Any:
        """The autoencoder for previews: what it cannot decode as a whole on a full device goes in tiles.

        It raises FloatingPointError where an image holds NaN or infinity, which diffusers shows in black.
        """
        vae = self.load_component("vae", dtype).to(device)
        vae.decoder.register_forward_hook(lambda _module, _inputs, output: _require_finite(output))
        if self.vae_tiles is None and self.known_vae_tiles is not None:
            tile_when_full(vae, self.known_vae_tiles)
        return vae

    def load_tokenizer(self, name: str = "tokenizer") -> Any:
        """A tokenizer, from its folder."""
        _, class_name = self.folder.parts().get(name, ("", None))
        return load_tokenizer(self.folder.place(name).path, class_name)

    def load_scheduler(self) -> Any:
        """The folder's own scheduler, for previews."""
        name = self.scheduler_config.get("_class_name")
        scheduler_class: Any = getattr(diffusers, str(name), None)
        is_scheduler = isinstance(scheduler_class, type) and issubclass(scheduler_class, SchedulerMixin)
        if not is_scheduler:
            raise UserError(f"model.path: {self.folder.place('scheduler')} names no scheduler class: {name}")
        loaded: Any = scheduler_class
        require_kinds(loaded, self.scheduler_config)
        with building(loaded, self.scheduler_config.file):
            return loaded.from_config(self.scheduler_config)

    def load_text_encoders(self, dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
        """All text encoders, frozen, by folder, on the device or where ``text_encoder_memory`` puts them."""
        memory = self.text_encoder_memory
        blocks = memory.host_blocks(device)
        encoders = {name: self.load_component(name, dtype, blocks) for name in self.text_encoders}
        for encoder in encoders.values():
            settings = encoder.config.get_text_config()
            if hasattr(settings, "use_cache"):
                settings.use_cache = False  # no tokens follow that would need keys and values of these
        memory.place(list(encoders.values()), device, blocks)
        for name, encoder in encoders.items():
            require_finite_weights(self.folder, name, encoder)
        return encoders

    def empty_transformer(self) -> torch.nn.Module:
        return self._trained_model(self.empty_component)

    def load_transformer(self, dtype: torch.dtype) -> torch.nn.Module:
        model = self._trained_model(lambda name: self.load_component(name, dtype))
        return model.requires_grad_(False)

    def _trained_model(self, make: Callable[[str], torch.nn.Module]) -> torch.nn.Module:
        if len(self.trained) == 1:
            return make(self.trained[0])
        return Composite({name: make(name) for name in self.trained})

    def empty_component(self, name: str) -> torch.nn.Module:
        component_class, settings = self.component_class(name), self.folder.component_config(name)
        with building(component_class, settings.file):
            model = empty_model(component_class, settings)
            require_possible(model)
        return model

    def _num_weights(self, name: str) -> int:
        component_class, settings = self.component_class(name), self.folder.component_config(name)
        with building(component_class, settings.file):
            return count_parameters(component_class, json.dumps(settings))

    @property
    def lora_file_names(self) -> Mapping[str, str]:
        """Of the LoRA of each component that is not in the usual file."""
        return {}

    @cached_property
    def lora_files(self) -> LoraFiles:
        return LoraFiles(
            pipeline=self.pipeline,
            models={name: self.component_class(name) for name in self.trained},
            spelling=self.lora_spelling,
            layers=self.lora_layers,
            prefixes=self.lora_prefixes,
            names=self.lora_file_names,
            ask_loader=self._ask_loader,
        )

    def _ask_loader(
        self, names: Mapping[str, str], header: FileHeader
    ) -> Mapping[tuple[str, str], LoadedLayer]:
        components = {
            name: (self.component_class(component), json.dumps(self.folder.component_config(component)))
            for name, component in names.items()
        }
        return _loaded_layers(self.pipeline, tuple(components.items()), header)

    def unused_modules(self, model: torch.nn.Module) -> list[str]:
        if not self.unused_in_last_block:
            return []
        names = []
        for component, part in self.parts_of(model).items():
            *_, last_list = self.block_lists
            last_block = f"{last_list}.{count_blocks(part, [last_list]) - 1}"
            prefix = last_block if part is model else f"{component}.{last_block}"
            names += [f"{prefix}.{ending}" for ending in self.unused_in_last_block]
        return names


@cache
def _loaded_layers(
    pipeline_class: Any, components: tuple[tuple[str, tuple[Any, str]], ...], header: FileHeader
) -> Mapping[tuple[str, str], LoadedLayer]:
    """Kept: it is the same for all files that a run writes."""
    models = {name: empty_model(class_, json.loads(config)) for name, (class_, config) in components}
    has_loader = hasattr(pipeline_class, "load_lora_weights")
    return loaded_layers(assemble(pipeline_class, **models) if has_loader else None, models, header)


def assemble(pipeline_class: Any, **parts: Any) -> Any:
    """A pipeline with these components and settings, and None for what else it asks for.

    What it does with the parts that it has, such as ``encode_prompt`` with a text encoder, works. A modular
    pipeline has the blocks of its class.
    """
    if issubclass(pipeline_class, ModularPipeline):
        pipeline = pipeline_class()
        pipeline.update_components(**parts)
        return pipeline
    parameters = inspect.signature(pipeline_class).parameters.values()
    required = [parameter.name for parameter in parameters if parameter.default is parameter.empty]
    return pipeline_class(**dict.fromkeys(required) | parts)


def _require_finite(decoded: torch.Tensor | tuple[torch.Tensor, ...]) -> None:
    """Check the output of a decoder; that of CogVideoX's also returns what it keeps for the next frames."""
    pixels = decoded[0] if isinstance(decoded, tuple) else decoded
    if pixels.is_meta:  # counted, not generated
        return
    if not torch.isfinite(pixels).all():
        raise FloatingPointError("the decoded image holds NaN or infinity")


def matches_flows(scheduler: Any) -> bool:
    """Whether a scheduler of diffusers takes what a model predicts for a velocity, at noise levels in [0, 1].

    Classes that take ``prediction_type`` do where it is set so. Of the others, those without a table of a
    diffusion's noise do; a setting that a class does not take may be in its file all the same.
    """
    if "prediction_type" not in inspect.signature(type(scheduler)).parameters:
        return not hasattr(scheduler, "alphas_cumprod")
    config = scheduler.config
    return config.prediction_type == "flow_prediction" and bool(config.get("use_flow_sigmas"))


def described(scheduler: Any) -> str:
    """Class of a scheduler, with the settings that define what it samples."""
    settings = [f"{name} {scheduler.config[name]}" for name in _TELLING if name in scheduler.config]
    return " with ".join(filter(None, [type(scheduler).__name__, " and ".join(settings)]))
