"""This file makes the inputs of a captioning model from images and an instruction, without torchvision.

The processors of transformers that also take videos are made with it only. Clips are given as frames here, so
such a processor is put together without its part for videos, nor for audio.
"""

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from jinja2 import TemplateError
from transformers import (
    PROCESSOR_MAPPING,
    AutoImageProcessor,
    AutoProcessor,
    AutoTokenizer,
    BatchFeature,
    PreTrainedConfig,
    ProcessorMixin,
)

from diffsynth_lite.captioning.captioner import Question
from diffsynth_lite.errors import UserError
from diffsynth_lite.pipelines.base.model_settings import ModelSettings, read_settings, shortened

logger = logging.getLogger(__name__)

TASKS = {"florence2": "<MORE_DETAILED_CAPTION>"}
"""What models are asked for that have tasks in place of instructions, by their model_type."""
_NAMING_FILES = ("processor_config.json", "preprocessor_config.json", "tokenizer_config.json")
_WITHOUT_VIDEOS = {"SmolVLMProcessor": "Idefics3Processor"}
"""Classes that do the same with images, and need no further package for videos."""


class ImageProcessor:
    """Makes the inputs of one model."""

    def __init__(self, folder: Path, config: PreTrainedConfig) -> None:
        self._processor = _load_processor(folder, config)
        self.tokenizer = self._processor.tokenizer
        self.task = TASKS.get(config.model_type, "")
        # What is generated goes on at the end of a text.
        self.tokenizer.padding_side = "left"
        if self.tokenizer.pad_token is None:
            self.tokenizer.pad_token = self.tokenizer.eos_token
        template = getattr(self._processor, "chat_template", None) or self.tokenizer.chat_template
        if isinstance(template, dict):
            template = template.get("default")
        if not template and not self.task:
            raise UserError(
                f"--model: {folder} has no chat template, so that it reads no instruction; take a model that "
                "chats, such as Qwen/Qwen3-VL-4B-Instruct"
            )
        self._template: str = template or ""
        if not self.task:
            self._prompt("", num_images=1)

    def __call__(self, questions: Sequence[Question]) -> BatchFeature:
        """Inputs for ``generate``, on the CPU, padded on the left.

        Raises:
            UserError: the model does not take the images of one of the questions.
        """
        settings: dict[str, Any] = {"padding": True, "return_tensors": "pt"}
        if self.task:
            if any(len(one.images) > 1 for one in questions):
                raise UserError("the model sees one image at a time, and no clips or edits")
            texts = [self.task] * len(questions)
            images: list[Any] = [one.images[0] for one in questions]
        else:
            texts = [self._prompt(one.instruction, num_images=len(one.images)) for one in questions]
            images = [list(one.images) for one in questions]
            # Many templates begin with the token that tokenizers begin texts with.
            begins = self.tokenizer.bos_token is not None and texts[0].startswith(self.tokenizer.bos_token)
            settings["add_special_tokens"] = not begins
        try:
            return self._processor(text=texts, images=images, **settings)
        except ValueError as error:
            raise UserError(f"the model's processor refuses it: {shortened(error)}") from error

    def text_of(self, tokens: torch.Tensor) -> str:
        """The text of generated tokens, without the special ones."""
        text: str = self.tokenizer.decode(
            tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return text

    def _prompt(self, instruction: str, *, num_images: int) -> str:
        """The chat with a question, in which each image has its mark."""
        mark = getattr(self._processor, "image_token", None)
        pieces = [{"type": "image"}] * num_images + [{"type": "text", "text": instruction}]
        # Some templates take texts only: they put the mark of an image in, or expect it in the text.
        for content in (pieces, instruction, f"{mark or ''}\n" * num_images + instruction):
            try:
                prompt: str = self.tokenizer.apply_chat_template(
                    [{"role": "user", "content": content}],
                    chat_template=self._template,
                    add_generation_prompt=True,
                    tokenize=False,
                    # Of a model that thinks first: a caption needs no thoughts, which take minutes.
                    **({"enable_thinking": False} if "enable_thinking" in self._template else {}),
                )
            except (TemplateError, TypeError):
                continue
            if "{'type':" not in prompt and (mark is None or prompt.count(mark) == num_images):
                return prompt
        raise UserError(f"the model's chat template takes no {num_images} images with an instruction")


def _load_processor(folder: Path, config: PreTrainedConfig) -> Any:
    """The processor of a model as ``AutoProcessor`` makes it, for texts and images."""
    mapped = getattr(PROCESSOR_MAPPING.get(type(config), None), "__name__", "")
    name = _name_of_processor(folder) or mapped
    processor_class = getattr(transformers, _WITHOUT_VIDEOS.get(name, name), None)
    try:
        if processor_class is not None and not getattr(processor_class, "is_dummy", False):
            try:
                return _assembled(processor_class, folder)
            except (AttributeError, TypeError):
                logger.debug("%s needs its part for videos.", name)
        return AutoProcessor.from_pretrained(folder, trust_remote_code=False)
    except ImportError as error:
        raise UserError(
            f"--model: {name} of {folder} needs a package that is not installed ({shortened(error)}); most "
            "often it is torchvision: pip install torchvision"
        ) from error
    except Exception as error:  # of the libraries, about files
        raise UserError(
            f"--model: {folder} makes no {name or 'processor'} for texts and images: {shortened(error)}; get "
            "the folder again, or take another model"
        ) from error


def _name_of_processor(folder: Path) -> str | None:
    for file in _NAMING_FILES:
        try:
            settings: ModelSettings = read_settings(folder / file)
        except FileNotFoundError:
            continue
        if isinstance(name := settings.get("processor_class"), str):
            return name
    return None


def _assembled(processor_class: type[ProcessorMixin], folder: Path) -> Any:
    """A processor from its parts for texts and images."""
    # Pillow's also where torchvision is installed: the same images on all machines.
    parts = {
        "tokenizer": AutoTokenizer.from_pretrained(folder, trust_remote_code=False),
        "image_processor": AutoImageProcessor.from_pretrained(folder, backend="pil", trust_remote_code=False),
    }
    needed = processor_class.get_attributes()

    def check(processor: Any, name: str, part: Any) -> None:
        if part is not None:
            processor_class.check_argument_for_proper_class(processor, name, part)

    # Of the same name, by which transformers knows some of them.
    methods = {"check_argument_for_proper_class": check}
    lenient: Any = type(processor_class.__name__, (processor_class,), methods)
    settings, unused = lenient.get_processor_dict(folder)
    return lenient.from_args_and_dict([parts.get(name) for name in needed], settings, **unused)
