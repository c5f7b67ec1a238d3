"""Captions as people write them: the text encoders get the tokens that the pipeline's own call gives them."""

import inspect
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from family_sample import CPU, UNCLEAN, Sample
from torch.nn.modules.module import register_module_forward_pre_hook
from transformers import BatchFeature, ProcessorMixin

from diffsynth_lite.errors import UserError
from diffsynth_lite.media import Prompt
from diffsynth_lite.pipelines.qwen_image import PLACEHOLDERS
from diffsynth_lite.pipelines.qwen_image_edit import TextAndPictures


class _EncodedError(Exception):
    """The pipeline has its prompt embeddings; what it does with them is of no interest here."""


@contextmanager
def looked_up() -> Iterator[list[torch.Tensor]]:
    """The indices that all embedding tables are asked for: token ids of the text encoders among them."""
    indices: list[torch.Tensor] = []

    def record(module: torch.nn.Module, args: tuple[Any, ...]) -> None:
        if isinstance(module, torch.nn.Embedding):
            indices.append(args[0].clone())

    hook = register_module_forward_pre_hook(record)
    yield indices
    hook.remove()


def encode_in_a_call(sample: Sample, pipeline: Any, caption: str) -> None:
    """Call a pipeline with a caption, as a user would, up to its prompt embeddings."""
    known = inspect.signature(pipeline.__call__).parameters
    request = sample.request(num_inference_steps=1, guidance_scale=1.0, seed=0)
    given = request.call_arguments() | {"guidance_scale": request.guidance_scale, "guidance_schedule": None}
    if sample.name == "ideogram4":
        given["max_sequence_length"] = 128  # of 2048, which takes long
    if request.inputs:
        given["image"] = request.inputs[0]
    if request.inpaint_mask:
        given["mask_image"] = request.inpaint_mask[0]
    pipeline(prompt=caption, **{name: value for name, value in given.items() if name in known})


class CheckedProcessor(TextAndPictures):
    """With the check of transformers' processors, which need torchvision themselves."""

    image_token, video_token = PLACEHOLDERS

    def __call__(self, *, text: Sequence[str], images: Any, **settings: Any) -> BatchFeature:
        ProcessorMixin.validate_inputs(self, images=images, text=list(text))
        return super().__call__(text=text, images=images, **settings)


def called_pipeline(sample: Sample) -> Any:
    """The pipeline, whose processor takes the texts that those of the released models take."""
    pipeline = sample.fresh_pipeline()
    if sample.family.prompt_sees_images:
        pipeline.processor = CheckedProcessor(tokenizer=pipeline.tokenizer, pictures=pipeline.processor)
    if sample.name == "qwen_image_21":
        pipeline.processor.video_token = CheckedProcessor.video_token  # as Qwen3VLProcessor has it
    return pipeline


def is_equal(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    """But for zeros that pad prompts on the left."""
    return torch.equal(torch.cat([torch.zeros_like(theirs[..., : -ours.shape[-1]]), ours], dim=-1), theirs)


def stopping(encode_prompt: Callable[..., object], indices: list[torch.Tensor]) -> Callable[..., object]:
    def encode_and_stop(*args: Any, **kwargs: Any) -> object:
        indices.clear()  # those of an encoder of pictures, before it
        encode_prompt(*args, **kwargs)
        raise _EncodedError

    return encode_and_stop


def test_the_encoders_get_the_tokens_that_the_pipeline_gives_them(sample: Sample) -> None:
    pipeline = called_pipeline(sample)
    encode_prompt = pipeline.encode_prompt
    encode = sample.family.load_prompt_encoder(torch.float32, CPU)
    images = sample.media[0].inputs if sample.family.prompt_sees_images else ()
    for caption in UNCLEAN:
        with looked_up() as theirs:
            pipeline.encode_prompt = stopping(encode_prompt, theirs)
            with pytest.raises(_EncodedError):
                encode_in_a_call(sample, pipeline, caption)
        with looked_up() as ours:
            encode([Prompt(text=caption, images=images)])
        assert 0 < len(ours) <= len(theirs)  # Z-Image's pipeline encodes a negative prompt, too
        assert all(map(is_equal, ours, theirs)), caption


@pytest.mark.parametrize("token", [*PLACEHOLDERS, "<|vision_start|>", "<|im_end|>", "[IMG]"])
def test_a_caption_is_refused_where_the_pipeline_refuses_it(sample: Sample, token: str) -> None:
    pipeline, caption = called_pipeline(sample), f"a ring {token}"
    pipeline.encode_prompt = stopping(pipeline.encode_prompt, [])
    with pytest.raises((_EncodedError, ValueError)) as found:
        encode_in_a_call(sample, pipeline, caption)
    if found.type is _EncodedError:
        sample.family.check_prompt(caption, "a.png: its caption")
    else:
        assert token in str(found.value)
        with pytest.raises(UserError, match=rf"a\.png: its caption holds {re.escape(token)}, .*; remove it"):
            sample.family.check_prompt(caption, "a.png: its caption")
