"""This file asks a model of transformers, which sees images and writes text, what is on them."""

import gc
import logging
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import transformers
from diffusers.training_utils import free_memory
from transformers import GenerationConfig

from diffsynth_lite.captioning.captioner import Answer, Captioner, Question
from diffsynth_lite.captioning.processors import ImageProcessor
from diffsynth_lite.captioning.tagger import Tagger, is_tagger
from diffsynth_lite.core.transfer.host_pool import available_host_bytes
from diffsynth_lite.core.units import format_bytes
from diffsynth_lite.core.weights.stream import SLOTS_TO_GENERATE
from diffsynth_lite.errors import UserError
from diffsynth_lite.pipelines.base.folder import PipelineFolder
from diffsynth_lite.pipelines.base.folder.hub import NO_FOLDER, HubCommit
from diffsynth_lite.pipelines.base.folder.index import IndexEntry
from diffsynth_lite.pipelines.base.folder.pipeline_folder import looks_local
from diffsynth_lite.pipelines.base.model_settings import building
from diffsynth_lite.pipelines.base.quantized import load_plain_component
from diffsynth_lite.pipelines.base.release_folder import empty_model
from diffsynth_lite.pipelines.base.text_encoders import TextEncoderMemory, encoder_quantizations
from diffsynth_lite.pipelines.base.transformers_loading import load_frozen_encoder
from diffsynth_lite.training.frozen_weights import require_format

logger = logging.getLogger(__name__)

Quantize = Literal["none", "int8", "nf4"]

_EXAMPLE = "such as Qwen/Qwen3-VL-4B-Instruct"
_SMALLER = "take --quantize int8 or nf4, --dtype bfloat16 or a smaller model"
_MAPPINGS = ("MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING", "MODEL_FOR_MULTIMODAL_LM_MAPPING")
"""Of transformers, by the age of their names: the classes that see images and write text."""
_SHARE_OF_WEIGHTS = 0.8
"""Of the free memory of a device; the rest is for what is computed."""
_CLEARED = (
    *("temperature", "top_k", "top_p", "min_p", "typical_p", "top_h", "epsilon_cutoff", "eta_cutoff"),
    *("max_length", "forced_eos_token_id"),
)
"""Of a generation config: what is only for sampling warns, and the others hide how an answer ended."""
_PROVIDERS = ("CUDAExecutionProvider", "ROCMExecutionProvider", "CPUExecutionProvider")
_KEYS = {
    "model.text_encoder_quantize, memory.stream_text_encoder": "--quantize, or too little memory",
    "leave both out": "leave --quantize out, and take a larger device or a smaller model",
    "memory.stream_text_encoder": "memory",
    " and model.variant": "",
    "model.path": "--model",
}
"""Settings of a run in the messages about its text encoder, and what they are here."""


def open_captioner(
    model: str,
    *,
    dtype: str | None = None,
    quantize: Quantize = "none",
    device: str | None = None,
    batch_size: int | None = None,
) -> Captioner:
    """The captioner of a model that this machine runs; its weights are downloaded and loaded on entering it.

    Args:
        model: local folder or hub id: of a model of transformers that chats about images, of Florence-2, or
            of a tagger, which has ``model.onnx`` and ``selected_tags.csv``.
        dtype: of the weights; None is bfloat16 on accelerators and float32 on the CPU.
        quantize: format of the linear layers in the transformer layers.
        device: such as "cuda:1"; None is the accelerator, or the CPU without one.
        batch_size: questions to ask at once; None is 8 on accelerators and 1 on the CPU.
    """
    with _named_as_flags():
        place = _device(device)
        folder = _find(model)
        size = batch_size or (1 if place.type == "cpu" else 8)
        if is_tagger(folder.path, folder.hub):
            if dtype is not None or quantize != "none":
                raise UserError(f"--dtype, --quantize: no effect on {model}, a tagger; leave them out")
            providers = ("CPUExecutionProvider",) if place.type == "cpu" else _PROVIDERS
            return Tagger(model, folder.path, folder.hub, providers=providers, batch_size=size)
        return CaptionModel(
            model,
            folder,
            dtype=dtype or ("float32" if place.type == "cpu" else "bfloat16"),
            quantize=quantize,
            device=place,
            batch_size=size,
        )


@dataclass(frozen=True, kw_only=True)
class _ModelFolder(PipelineFolder):
    """The folder of one model of transformers, which is a pipeline's only component, of no name."""

    def _entries(self) -> dict[str, IndexEntry]:
        return {"": IndexEntry(library="transformers", class_name="", subfolder="")}


class CaptionModel:
    """A model of transformers as a :class:`~diffsynth_lite.captioning.captioner.Captioner`.

    Its answers are greedy. With ``float32`` an answer is the same in a batch as by itself; with fewer bits
    a batch of another size may round otherwise, and now and then that chooses another word.

    Args:
        name: of the model.
        folder: of it; its weights may still be on the hub.
    """

    def __init__(
        self,
        name: str,
        folder: PipelineFolder,
        *,
        dtype: str,
        quantize: Quantize,
        device: torch.device,
        batch_size: int,
    ) -> None:
        self.batch_size = batch_size
        self._folder, self._device = folder, device
        self._dtype: torch.dtype = getattr(torch, dtype)
        self._format = None if quantize == "none" else require_format(quantize, key="--quantize")
        self._class = _class_of(folder, name)
        folder.require_complete([""])
        with building(self._class, folder.path):
            config = self._class.config_class.from_pretrained(folder.path)
        self._processor = ImageProcessor(folder.path, config)
        self.name = f"{name} {self._processor.task}".strip()
        if task := self._processor.task:
            text = "%s has tasks in place of instructions: it is asked for %s, and reads no instruction."
            logger.warning(text, name, task)
        self._model: Any = None

    def __enter__(self) -> "CaptionModel":
        with _named_as_flags():
            self._folder.download_weights([""])
            try:
                self._model = self._load()
            except torch.OutOfMemoryError as error:
                raise UserError(f"--model: the weights do not fit {self._device}; {_SMALLER}") from error
        generation = self._model.generation_config
        if generation.eos_token_id is None:
            generation.eos_token_id = self._processor.tokenizer.eos_token_id
        generation.update(do_sample=False, **dict.fromkeys(_CLEARED))
        generation.pad_token_id = self._processor.tokenizer.pad_token_id
        return self

    def __exit__(self, *error: object) -> None:
        self._model = None
        gc.collect()  # what streams weights refers to itself
        free_memory()

    def answer(self, questions: Sequence[Question], *, max_tokens: int) -> list[Answer]:
        """As of the protocol; what does not fit the device at once is asked in smaller batches since then."""
        answers: list[Answer] = []
        while len(answers) < len(questions):
            batch = questions[len(answers) :][: self.batch_size]
            try:
                answers += self._generate(batch, max_tokens)
                continue
            except torch.OutOfMemoryError:
                problem = (
                    "the device's memory is full; --quantize, or a smaller --frames of a clip, takes less"
                )
            except UserError as error:
                problem = str(error)
                if len(batch) > 1:
                    answers += [self.answer([one], max_tokens=max_tokens)[0] for one in batch]
                    continue
            # Not in the handler: there the error keeps what was computed.
            free_memory()
            if len(batch) == 1:
                answers.append(Answer(problem=problem))
            else:
                self.batch_size = len(batch) // 2
                logger.warning("The device's memory is full: from now on --batch is %d.", self.batch_size)
        return answers

    @torch.inference_mode()
    def _generate(self, questions: Sequence[Question], max_tokens: int) -> list[Answer]:
        inputs = self._processor(questions).to(self._device, dtype=self._dtype)
        generated = self._model.generate(**inputs, max_new_tokens=max_tokens)
        before = 1 if self._model.config.is_encoder_decoder else inputs["input_ids"].shape[1]
        return [self._answer_of(tokens, max_tokens) for tokens in generated[:, before:].cpu()]

    def _answer_of(self, tokens: torch.Tensor, max_tokens: int) -> Answer:
        ends = self._model.generation_config.eos_token_id
        ending = torch.isin(tokens, torch.tensor(ends if isinstance(ends, list) else [ends])).nonzero()
        num_tokens = int(ending[0]) if len(ending) else len(tokens)
        return Answer(
            text=self._processor.text_of(tokens[:num_tokens]),
            num_tokens=num_tokens,
            is_unfinished=not len(ending) and num_tokens >= max_tokens,
        )

    def _load(self) -> Any:
        with building(self._class, self._folder.path):
            empty = empty_model(self._class, self._folder.component_config(""))
        empty.requires_grad_(False).to(self._dtype)
        quantizations = {}
        if self._format is not None:
            quantizations = encoder_quantizations({"": empty}, self._format, self._device)
            if not quantizations:
                raise UserError(f"--quantize: no effect on a {self._class.__name__}; leave it out")
            quantizations[""].apply_to(empty)
        memory = self._place_for(empty, TextEncoderMemory(quantizations=quantizations))
        host_blocks = memory.host_blocks(self._device)
        if host_blocks is None and not quantizations:
            model: Any = load_plain_component(self._class, self._folder, "", self._dtype)
        else:
            model = load_frozen_encoder(
                self._class, self._folder, "", self._dtype, quantizations.get(""), host_blocks
            )
        if (self._folder.path / "generation_config.json").is_file():
            # A model that is loaded in formats has none.
            model.generation_config = GenerationConfig.from_pretrained(self._folder.path)
        memory.place([model], self._device, host_blocks)
        return model

    def _place_for(self, empty: torch.nn.Module, plain: TextEncoderMemory) -> TextEncoderMemory:
        """All of the model on the device, or its layers streamed where that has no room for them."""
        needed, _ = plain.num_bytes([empty], self._device)
        host = available_host_bytes() if self._device.type == "cpu" else None
        if host is not None:
            self._require_room(needed, host)
        free = _free_bytes(self._device)
        if needed <= _SHARE_OF_WEIGHTS * free or self._folder.is_quantised(""):
            return plain
        streamed = TextEncoderMemory(quantizations=plain.quantizations, num_slots=SLOTS_TO_GENERATE)
        on_device, in_host = streamed.num_bytes([empty], self._device)
        self._require_room(on_device, free)
        logger.info(
            "The model takes %s, and the device has %s free: %s of its layers stay in host memory and "
            "visit the device, which is slow; --quantize makes it smaller.",
            *map(format_bytes, (needed, free, in_host)),
        )
        return streamed

    def _require_room(self, needed: int, free: float) -> None:
        if needed > free:
            raise UserError(
                f"--model: the weights take {format_bytes(needed)} at least, and {self._device} has "
                f"{format_bytes(free)} free; {_SMALLER}"
            )


def _class_of(folder: PipelineFolder, name: str) -> Any:
    """The class of transformers that sees images and writes text, for the model in a folder."""
    if not (folder.path / "config.json").is_file():
        raise UserError(
            f"--model: {name} has no config.json, as models of transformers have, nor model.onnx and "
            f"selected_tags.csv, as taggers; take another, {_EXAMPLE}"
        )
    settings = folder.component_config("")
    model_type = str(settings.get("model_type"))
    if model_type not in transformers.CONFIG_MAPPING:
        if "auto_map" in settings:
            raise UserError(
                f"--model: {name} needs code from its repository (auto_map in config.json), which is not "
                f"run: take a model that transformers has a class for, {_EXAMPLE}, or serve it (--endpoint)"
            )
        raise UserError(
            f"--model: {name} has the model_type {model_type}, which transformers "
            f"{transformers.__version__} does not have: pip install --upgrade transformers, or take another"
        )
    config_class = transformers.CONFIG_MAPPING[model_type]
    for mapping in _MAPPINGS:
        if (found := getattr(transformers, mapping, {}).get(config_class, None)) is not None:
            return found
    raise UserError(f"--model: {name}, a {model_type}, does not see images; take one that does, {_EXAMPLE}")


def _find(model: str) -> _ModelFolder:
    """The folder of a model with its settings: a local one, or that in the hub's cache."""
    local = Path(model).expanduser()
    if local.is_dir():
        return _ModelFolder(path=local)
    if local.exists():
        raise UserError(f"--model: {model} is a file; give the model's folder, or a hub id")
    if looks_local(model):
        raise UserError(
            f"--model: there is no folder {model}; check the path, or give a hub id, which has the form "
            f"owner/name, {_EXAMPLE}"
        )
    hub = HubCommit.find_with(model, None, "", why="", besides=NO_FOLDER)
    return _ModelFolder(path=hub.path, hub=hub)


def _device(name: str | None) -> torch.device:
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if name is None:
        return found or torch.device("cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise UserError(f"--device: {name} is not a device; give cpu, cuda or cuda:1") from None
    num = 1 if device.type == "cpu" else 0
    if found is not None and device.type == found.type:
        num = torch.accelerator.device_count()
    if (device.index or 0) >= num:
        raise UserError(f"--device: torch has no {name} on this machine; give {found or 'cpu'}")
    return device


def _free_bytes(device: torch.device) -> float:
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else math.inf


@contextmanager
def _named_as_flags() -> Iterator[None]:
    """Scope in which messages about a run's settings name the flags of this command."""
    try:
        yield
    except UserError as error:
        message = str(error)
        for key, flag in _KEYS.items():
            message = message.replace(key, flag)
        raise UserError(message) from error
