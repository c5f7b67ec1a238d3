"""LTX-2 that follows a control, against diffusers' own pipeline."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from diffusers import LTX2InContextPipeline
from diffusers.pipelines.ltx2 import LTX2ReferenceCondition, LTX2VideoCondition
from diffusers_pipelines import bytes_of, generated_by
from family_sample import (
    CPU,
    NEGATIVE,
    PROMPTS,
    Sample,
    adapted_transformer,
    clip,
    encode_sample,
    mandelbrot,
    transformer_calls,
)
from held_step import assert_same_cost, step_on_cpu
from PIL import Image, ImageOps
from release_layouts import ltx_2_5, other_guidance

from diffsynth_lite.data.buckets import Bucket
from diffsynth_lite.errors import UserError
from diffsynth_lite.lora import find_target_layers
from diffsynth_lite.media import Media
from diffsynth_lite.pipelines import PipelineFolder, PreviewRequest
from diffsynth_lite.pipelines.ltx2 import LTX2, tiny
from diffsynth_lite.pipelines.ltx2.generation import guidance_arguments
from diffsynth_lite.training.data_settings import num_tokens_of
from diffsynth_lite.training.planning.memory_count import MemoryCounter
from diffsynth_lite.training.planning.step import StepSettings

LAYOUTS = {"2.0": (tiny, 1), "2.0 by half": (tiny, 2), "2.5 by half": (ltx_2_5, 2)}
SIZE: dict[str, int] = {"width": 192, "height": 128, "num_frames": 17}
CONTROL, START = clip(*SIZE.values(), 30), mandelbrot(192, 128, 50)
STARTS = (None, START, None)


@pytest.fixture(scope="module", params=LAYOUTS)
def sample(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Sample:
    """With weights in place of the zeros and ones that a new model has, and audio."""
    build, downscale = LAYOUTS[request.param]
    pipeline, folder = build(), tmp_path_factory.mktemp("in_context")
    generator = torch.Generator().manual_seed(7)
    for parameter in pipeline.transformer.parameters():
        parameter.data += 0.2 * torch.randn(parameter.shape, generator=generator)
    pipeline.save_pretrained(folder)
    family = LTX2(PipelineFolder(path=folder))
    plain = encode_sample("ltx2", build, family)
    family.with_audio, family.with_controls, family.control_downscale = True, True, downscale
    media = [Media(frames=CONTROL[::-1], control=CONTROL, first_frame=one, fps=24.0) for one in STARTS]
    encoded = family.load_media_encoder(torch.float32, CPU)(media)
    latents = torch.stack([tensors.pop("latents") for tensors in encoded])
    conditioning = [prompt | tensors for prompt, tensors in zip(plain.prompts, encoded, strict=True)]
    return replace(plain, media=media, latents=latents, conditioning=conditioning)


def requests_of(sample: Sample, **settings: Any) -> Iterator[tuple[PreviewRequest, dict[str, Any]]]:
    """By a control, and also from a first frame; and what a user gives the pipeline next to prompts."""
    given: dict[str, Any] = {"reference_conditions": LTX2ReferenceCondition(frames=list(CONTROL))}
    given["reference_downscale_factor"] = sample.family.control_downscale
    request = replace(sample.request(**settings), control=CONTROL, **SIZE)
    yield request, given
    yield replace(request, inputs=(START,)), given | {"conditions": [LTX2VideoCondition(frames=START)]}


def unpacked(video_bld: torch.Tensor, audio_bld: torch.Tensor, shape: torch.Size) -> list[torch.Tensor]:
    """Latents of the first tokens, (B, C, F, H, W), and of audio, (B, C, L, M)."""
    latents = video_bld[:, : shape[1:].numel()].transpose(1, 2).reshape(-1, *shape)
    return [latents, audio_bld.unflatten(2, (4, -1)).transpose(1, 2)]


def test_at_each_step_training_gets_of_the_model_what_the_pipeline_gets(sample: Sample) -> None:
    family, shape = sample.family, sample.latents.shape[1:]
    pipeline, outputs = LTX2InContextPipeline.from_pretrained(family.folder.path), []
    pipeline.transformer.register_forward_hook(lambda _module, _args, output: outputs.append(output))
    given = requests_of(sample, num_inference_steps=3, guidance_scale=1.0, seed=1)
    for (request, arguments), of_item in zip(given, sample.conditioning, strict=False):
        outputs.clear()
        call = {"prompt": list(PROMPTS[:2]), "num_frames": 17, "output_type": "latent"} | arguments
        call |= request.call_arguments() | guidance_arguments(1.0, perturbs=False)
        theirs = transformer_calls(pipeline.transformer, partial(pipeline, **call))
        conditioning = [of_item | prompt for prompt in sample.prompts[:2]]
        assert len(theirs) == 3
        for seen, output in zip(theirs, outputs, strict=True):
            noisy = unpacked(seen["hidden_states"], seen["audio_hidden_states"], shape)
            with torch.no_grad():
                ours = family.predict_with_audio(sample.model, *noisy, seen["sigma"] / 1000, conditioning)
            for predicted, expected in zip(ours, unpacked(*output, shape), strict=True):
                assert (predicted - expected).norm() <= 1e-6 * expected.norm()


def test_a_preview_and_the_code_of_a_card_give_the_pipeline_what_its_user_does(sample: Sample) -> None:
    family = sample.family
    pipeline = LTX2InContextPipeline.from_pretrained(family.folder.path)
    read = {"load_video": lambda _: [*CONTROL, START], "load_image": lambda _: START}
    names = {**globals(), **read, "Image": Image, "ImageOps": ImageOps}
    for request, given in requests_of(sample, num_inference_steps=2, guidance_scale=3.0, seed=5):
        other = replace(request, control=CONTROL[::-1])
        ours, of_another = family.sample(sample.model, torch.float32, [request, other])
        call = {"prompt": PROMPTS[0], "negative_prompt": NEGATIVE, "num_frames": 17} | given
        theirs = generated_by(pipeline, request, **call | other_guidance(family.folder, True))
        assert bytes_of(ours.frames) == theirs != bytes_of(of_another.frames)
        code = family.usage_arguments(request)
        assert given == {name: eval(repr(code[name]), names) for name in given}


def test_all_of_a_control_is_attended_to_and_what_that_takes_is_counted(sample: Sample) -> None:
    family, shape, given = sample.family, sample.latents.shape[1:], sample.conditioning[0]
    control = given["control_latents"].clone().requires_grad_()
    seen = [given | {"control_latents": control}]
    predicted = family.predict(sample.model, sample.latents[:1], torch.tensor([0.5]), seen)
    assert torch.autograd.grad(predicted.sum(), [control])[0].abs().amin() > 0
    settings = StepSettings(mixed_precision="no", dtype=torch.float32, device_type="cpu")
    layers = find_target_layers(family.empty_transformer(), family.default_target_modules, unused_modules=[])
    inputs = {"latents_shape": shape, "audio_latents_shape": family.audio_latents_shape(17, 24.0)}
    inputs["conditioning"] = family.example_conditioning(shape)
    counted = MemoryCounter(family, layers, rank=4, **inputs).count(settings)
    held = step_on_cpu(family, adapted_transformer(family), settings, **inputs | {"conditioning": given})
    assert_same_cost(counted.step, held)
    assert num_tokens_of(Bucket(**SIZE), family) == sum(map(family.num_tokens, (shape, control.shape)))
    assert family.num_condition_values(shape) == control.numel()


def test_the_size_of_controls_is_named_in_the_lora_and_in_the_keys_of_the_cache(sample: Sample) -> None:
    family, downscale = sample.family, sample.family.control_downscale
    plain, other = LTX2(family.folder), LTX2(family.folder)
    other.learn_as(family)
    assert other.lora_metadata == family.lora_metadata
    plain.with_audio, other.control_downscale = True, 3
    assert (family.lora_metadata, plain.lora_metadata) == ({"reference_downscale_factor": str(downscale)}, {})
    assert len({one.media_encoder_id(torch.float32) for one in (family, plain, other)}) == 3
    assert family.size_divisor == 32 * downscale
    with pytest.raises(UserError, match="an item has no control, and others have one"):
        family.load_media_encoder(torch.float32, CPU)([Media(frames=CONTROL, fps=24.0)])
