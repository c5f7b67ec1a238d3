"""This file does what all families of diffusers have in common: loading components, and adapter files."""

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import diffusers
import torch
from diffusers import SchedulerMixin
from safetensors import SafetensorError
from transformers import AutoTokenizer

from diffsynth_lite.errors import UserError
from diffsynth_lite.pipelines.contract.family import LoraFile, ModelFamily


class DiffusersFamily(ModelFamily):
    """A family whose transformer and pipeline are classes of diffusers.

    Attributes:
        pipelines: the pipeline's class, or several where releases of one model differ in it.
        transformer_class: of the component ``transformer``.
        prompt_tokenizer: folder of the tokenizer that ``max_prompt_tokens`` counts by.
    """

    pipelines: ClassVar[tuple[Any, ...]]
    transformer_class: ClassVar[Any]
    prompt_tokenizer: ClassVar[str] = "tokenizer"

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if "pipelines" in vars(cls):
            cls.pipeline_classes = tuple(pipeline.__name__ for pipeline in cls.pipelines)

    @cached_property
    def pipeline(self) -> Any:
        """The one of ``pipelines`` that the folder names; it saves and loads the adapter files."""
        name = self.folder.pipeline_class_name()
        return next(pipeline for pipeline in self.pipelines if pipeline.__name__ == name)

    def load_component(self, component_class: Any, name: str, dtype: torch.dtype) -> Any:
        """A component with its weights, on the CPU in ``dtype``; pickled weights are refused.

        Args:
            component_class: of diffusers or transformers.
            name: folder of the component.
            dtype: of the weights.

        Raises:
            UserError: a weight file is damaged.
        """
        try:
            return component_class.from_pretrained(
                self.folder.path,
                subfolder=name,
                variant=self.folder.variant,
                dtype=dtype,
                use_safetensors=True,
            )
        except (SafetensorError, OSError) as error:
            raise UserError(
                f"model.path: the weights in {self.folder.path / name} cannot be read "
                f"({' '.join(str(error).split())}); get the folder again"
            ) from error

    def load_tokenizer(self, name: str = "tokenizer") -> Any:
        """A tokenizer, from its folder."""
        return AutoTokenizer.from_pretrained(self.folder.path, subfolder=name)

    def prompt_lengths(self, texts: Sequence[str]) -> list[int]:
        tokenizer = self.load_tokenizer(self.prompt_tokenizer)
        return [len(tokens) for tokens in tokenizer(list(texts))["input_ids"]]

    def load_scheduler(self) -> Any:
        """The folder's own scheduler, for previews.

        Raises:
            UserError: diffusers has no scheduler of that name.
        """
        name = self.scheduler_config.get("_class_name")
        scheduler_class: Any = getattr(diffusers, str(name), None)
        is_scheduler = isinstance(scheduler_class, type) and issubclass(scheduler_class, SchedulerMixin)
        if not is_scheduler:
            raise UserError(f"model.path: {self.folder.path / 'scheduler'} names no scheduler class: {name}")
        loaded: Any = scheduler_class
        return loaded.from_config(self.scheduler_config)

    def empty_transformer(self) -> torch.nn.Module:
        config = self.folder.component_config("transformer")
        with torch.device("meta"):
            transformer: torch.nn.Module = self.transformer_class.from_config(config)
        return transformer

    def load_transformer(self, dtype: torch.dtype) -> torch.nn.Module:
        transformer: torch.nn.Module = self.load_component(self.transformer_class, "transformer", dtype)
        return transformer.requires_grad_(False)

    def save_lora(
        self, folder: Path, tensors: Mapping[str, torch.Tensor], settings: Mapping[str, Any]
    ) -> Path:
        self.pipeline.save_lora_weights(
            folder, transformer_lora_layers=dict(tensors), transformer_lora_adapter_metadata=dict(settings)
        )
        return folder / "pytorch_lora_weights.safetensors"

    def read_lora(self, folder: Path) -> LoraFile:
        tensors, settings = self.pipeline.lora_state_dict(
            folder, use_safetensors=True, local_files_only=True, return_lora_metadata=True
        )
        prefix = f"{self.pipeline.transformer_name}."
        return (
            {name.removeprefix(prefix): tensor for name, tensor in tensors.items()},
            {name.removeprefix(prefix): value for name, value in (settings or {}).items()},
        )
