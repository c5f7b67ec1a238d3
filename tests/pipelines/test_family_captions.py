"""Captions as people write them are encoded, cut, counted and refused as by the pipeline's own call."""

import inspect
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from diffusers.models.transformers.transformer_ideogram4 import LLM_TOKEN_INDICATOR
from family_sample import CPU, PROMPTS, UNCLEAN, Sample, longest_prompts, seen_in_prompts
from krea2_edit_reference import referenced
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils._pytree import tree_leaves
from transformers import BatchFeature, ProcessorMixin

from diffsynth_lite.errors import UserError
from diffsynth_lite.media import Prompt
from diffsynth_lite.pipelines.qwen_image import PLACEHOLDERS
from diffsynth_lite.pipelines.qwen_image_edit import TextAndImages

LONG = "circle " * 1100
WINDOWS = {"flux3": 80}
"""Tokens of which the length of a prompt, with its padding, is a multiple."""
KEPT_PADDING = {"chroma": 1}
"""Tokens of padding that the model sees."""
OF_NOTHING = {"ernie_image": 1, "sana": 2}
"""Tokens that the pipeline keeps of an empty prompt, where these are more than are counted."""


class _EncodedError(Exception):
    """The pipeline has its prompt embeddings, which this holds; what it does with them does not matter."""


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
    given["enable_prompt_rewrite"] = False
    given |= longest_prompts(sample)
    if request.inputs:
        given["image"] = list(request.inputs) if len(request.inputs) > 1 else request.inputs[0]
    if request.inpaint_mask:
        given["mask_image"] = request.inpaint_mask[0]
    if request.face:
        given |= {"pose_video": list(request.control), "face_video": list(request.face)}
    pipeline(prompt=caption, **{name: value for name, value in given.items() if name in known})


class CheckedProcessor(TextAndImages):
    """With the check of transformers' processors, which need torchvision themselves."""

    image_token, video_token = PLACEHOLDERS

    def __call__(self, *, text: Sequence[str], images: Any, **settings: Any) -> BatchFeature:
        ProcessorMixin.validate_inputs(self, images=images, text=list(text))
        return super().__call__(text=text, images=images, **settings)


@pytest.fixture(scope="module")
def unwatched(sample: Sample) -> Any:
    """The pipeline, whose processor takes the texts that those of the released models take."""
    pipeline = sample.fresh_pipeline()
    if sample.name == "krea2_edit":
        pipeline = referenced(pipeline)
    has_both = hasattr(pipeline, "tokenizer") and hasattr(pipeline, "processor")
    if sample.family.edits.prompt_sees_images and has_both:
        pipeline.processor = CheckedProcessor(
            tokenizer=pipeline.tokenizer, image_processor=pipeline.processor
        )
    if sample.name.startswith(("kandinsky5", "qwen_image_21")):
        processor = pipeline.processor if sample.name == "qwen_image_21" else pipeline.tokenizer
        processor.video_token = CheckedProcessor.video_token  # as the classes of the released models have it
    return pipeline


@pytest.fixture
def pipeline(unwatched: Any) -> Iterator[Any]:
    """The pipeline, for a test that gives it an ``encode_prompt``."""
    yield unwatched
    del unwatched.encode_prompt


def is_equal(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    """But for zeros that pad prompts on the left."""
    return torch.equal(torch.cat([torch.zeros_like(theirs[..., : -ours.shape[-1]]), ours], dim=-1), theirs)


def stopping(encode_prompt: Callable[..., object], indices: list[torch.Tensor]) -> Callable[..., object]:
    def encode_and_stop(*args: Any, **kwargs: Any) -> object:
        indices.clear()  # those of an encoder of images, before it
        raise _EncodedError(encode_prompt(*args, **kwargs))

    return encode_and_stop


def test_the_encoders_get_the_tokens_that_the_pipeline_gives_them(sample: Sample, pipeline: Any) -> None:
    encode_prompt = pipeline.encode_prompt
    encode = sample.family.load_prompt_encoder(torch.float32, CPU)
    images = seen_in_prompts(sample.family, sample.media[0])
    for caption in UNCLEAN:
        with looked_up() as theirs:
            pipeline.encode_prompt = stopping(encode_prompt, theirs)
            with pytest.raises(_EncodedError):
                encode_in_a_call(sample, pipeline, caption)
        with looked_up() as ours:
            encode([Prompt(text=caption, images=images)])
        assert 0 < len(ours) <= len(theirs)  # Z-Image's pipeline encodes a negative prompt, too
        assert all(map(is_equal, ours, theirs)), caption


def embeddings_of(sample: Sample, pipeline: Any, text: str) -> list[torch.Tensor]:
    """All tensors that the pipeline makes of a prompt in its call, as it hands them to its transformer."""
    with pytest.raises(_EncodedError) as caught:
        encode_in_a_call(sample, pipeline, text)
    (made,) = caught.value.args
    if sample.name == "hidream":  # of Llama those of the layers that the model reads
        return [made[0], made[2][[0, 2, 3], 0], made[4]]
    if sample.name == "ltx2":
        side = pipeline.tokenizer.padding_side
        return list(pipeline.connectors(made[0], made[1], padding_side=side))
    if sample.name == "ideogram4":
        return [made[0][made[3] == LLM_TOKEN_INDICATOR]]
    if sample.name in ("anima", "flux3", "minimax_h3"):
        return [made[-1].get("prompt_embeds")]
    return tree_leaves(made)


def is_among(ours: torch.Tensor, theirs: Sequence[torch.Tensor]) -> bool:
    """Whether the rows are those of one of the tensors, but for what masks hide or others are padded with."""
    for one in (one for one in theirs if isinstance(one, torch.Tensor)):
        tensor = one[0] if one.ndim > ours.ndim else one
        if tensor.ndim != ours.ndim or tensor.shape[-1] != ours.shape[-1]:
            continue
        masks = [one[0].bool() for one in theirs if one is not None and one.shape == (1, len(tensor))]
        for rows in (tensor, *(tensor[mask] for mask in masks)):
            for kept in (rows[: len(ours)], rows[-len(ours) :]):
                if kept.shape == ours.shape and torch.allclose(kept, ours, rtol=1e-4, atol=1e-5):
                    return not masks or len(ours) >= masks[0].sum()
    return False


@pytest.mark.further_layouts
def test_prompts_are_encoded_and_cut_as_by_the_pipeline_and_counted(sample: Sample, pipeline: Any) -> None:
    family = sample.family
    pipeline.encode_prompt = stopping(pipeline.encode_prompt, [])
    images = seen_in_prompts(family, sample.media[0])
    texts = [*PROMPTS[:2], "", LONG]
    refused = {
        "ideogram4": LONG,
        "longcat_image_edit": LONG,  # diffusers issue 13636: its pipeline fails where it would cut
        "minimax_h3": "",
        "qwen_image_layered": "",
    }  # the last one's pipeline describes the image instead
    texts = [text for text in texts if text != refused.get(sample.name)]
    encode, lengths = family.load_prompt_encoder(torch.float32, CPU), []
    for text in texts:
        (ours,) = encode([Prompt(text=text, images=images)])
        lengths.append(len(ours["prompt_embeds"]))
        with torch.no_grad():
            theirs = embeddings_of(sample, pipeline, text)
        for name, tensor in ours.items():
            if tensor.is_floating_point():
                assert is_among(tensor, theirs), (name, text)
    assert family.keeps_padding == (len({*lengths}) == 1)
    counted = family.prompt_lengths(texts)
    assert texts[-1] != LONG or counted[-1] > family.max_prompt_tokens
    # Some are padded to one length, and those with images are counted without these.
    if len({*lengths}) > 1 and not images:
        kept = KEPT_PADDING.get(sample.name, 0)
        window = WINDOWS.get(sample.name, 1)
        expected = [
            min(-(-(length + kept) // window) * window, family.max_prompt_tokens) for length in counted
        ]
        if "" in texts:
            expected[texts.index("")] = OF_NOTHING.get(sample.name, expected[texts.index("")])
        assert lengths == expected


def test_a_caption_is_refused_where_the_pipeline_refuses_it(sample: Sample, pipeline: Any) -> None:
    pipeline.encode_prompt = stopping(pipeline.encode_prompt, [])
    for token in (*PLACEHOLDERS, "<|vision_start|>", "<|im_end|>", "[IMG]"):
        caption = f"a ring {token}"
        with pytest.raises((_EncodedError, ValueError)) as found:
            encode_in_a_call(sample, pipeline, caption)
        if found.type is _EncodedError:
            sample.family.check_prompt(caption, "a.png: its caption")
        else:
            assert token in str(found.value) or "image tokens do not match" in str(found.value)
            words = rf"a\.png: its caption holds {re.escape(token)}, .*; remove it"
            with pytest.raises(UserError, match=words):
                sample.family.check_prompt(caption, "a.png: its caption")
