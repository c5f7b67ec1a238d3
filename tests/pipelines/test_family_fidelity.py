"""Every family's encoders and previews against its own diffusers pipeline; a new file is tested here too."""

import dataclasses
import inspect
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import diffusers_pipelines
import numpy as np
import pytest
import torch
from accelerate.utils import convert_outputs_to_fp32
from diffusers_pipelines import output_frames
from family_sample import (
    CPU,
    NEGATIVE,
    OTHER_NAMES,
    PROMPTS,
    SIGMA,
    Sample,
    as_sampled,
    build_prompts,
    encode_sample,
    items_with_images,
    longest_prompts,
    mandelbrot,
    numbers,
    seen_in_prompts,
    transformer_calls,
    with_first,
)
from krea2_edit_reference import referenced
from lazy_backend import LazyBackend
from PIL.Image import Image
from release_layouts import other_guidance, without_audio

from diffsynth_lite.config.model import ModelSettings
from diffsynth_lite.core.gradient import blocks_of
from diffsynth_lite.core.weights.stream import WeightStream
from diffsynth_lite.errors import UserError
from diffsynth_lite.media import Media, Prompt
from diffsynth_lite.pipelines import ModelFamily, PipelineFolder, PreviewRequest
from diffsynth_lite.pipelines.qwen_image_edit import TextAndImages

DTYPE, TEXT_DTYPE, VAE_DTYPE = (
    getattr(torch, ModelSettings.model_fields[name].default)
    for name in ("dtype", "text_encoder_dtype", "vae_dtype")
)
# Much, because tiny models hardly listen to their prompts.
GUIDANCE = 20.0
Calls = list[dict[str, Any]]
Encoded = list[dict[str, torch.Tensor]]


class Stepped(NamedTuple):
    """What a step of a sampler returns; some pipelines ask for it by its name."""

    prev_sample: torch.Tensor
    other: None = None


@pytest.fixture(scope="module")
def pipeline(sample: Sample) -> Any:
    """The family's pipeline, for tests that only call it."""
    return read_pipeline(sample)


def read_pipeline(sample: Sample) -> Any:
    """What diffusers itself reads from the folder.

    Not the one that was saved there: weights in other places of the memory are summed in another order.
    """
    pipeline: Any = diffusers_pipelines.read_pipeline(sample.family.folder.path)
    if sample.name == "krea2_edit":
        pipeline = referenced(pipeline)
    # Its own processor of texts and images needs torchvision.
    has_both = hasattr(pipeline, "tokenizer") and hasattr(pipeline, "processor")
    if sample.family.edits.prompt_sees_images and has_both:
        pipeline.processor = TextAndImages(tokenizer=pipeline.tokenizer, image_processor=pipeline.processor)
    if sample.name == "hidream":  # which brings each size to that of 1024 x 1024 otherwise
        request = sample.request(num_inference_steps=1, guidance_scale=1.0, seed=0)
        sample.family.call_arguments(pipeline, request)
    if sample.name == "chroma":
        # diffusers issue 12116: a mask of numbers, which torch adds to the attention's scores, hides nothing.
        pipeline.transformer.register_forward_pre_hook(
            lambda _module, args, kwargs: (
                args,
                kwargs | {"attention_mask": kwargs["attention_mask"].bool()},
            ),
            with_kwargs=True,
        )
    return pipeline


def takes_a_scale(sample: Sample) -> bool:
    """Whether the model gets a guidance scale; others are steered away from the negative prompt."""
    return bool(sample.family.folder.component_config(sample.family.trained[0]).get("guidance_embeds"))


def call_of(sample: Sample, pipeline: Any, request: PreviewRequest) -> dict[str, Any]:
    """Arguments of the pipeline's own call for a preview of the first of ``PROMPTS``."""
    known = inspect.signature(pipeline.__call__).parameters
    is_true = "true_cfg_scale" in known and not takes_a_scale(sample)
    scale_name = "true_cfg_scale" if is_true else "guidance_scale"
    call = {
        "prompt": PROMPTS[0],
        "negative_prompt": NEGATIVE,
        "num_frames": request.num_frames,
        "layers": request.num_layers,
        # Some pipelines count the scale from 0 and not from 1; without guidance both have 0.
        scale_name: request.guidance_scale if takes_a_scale(sample) or request.guidance_scale > 1 else 0.0,
        # Some generate in a size of their own otherwise.
        "max_area": request.width * request.height,
        "use_resolution_binning": False,
        "enable_prompt_rewrite": False,
        "output_type": "pil",
        **({"image": given_images(request)} if request.inputs else {}),
        **({"mask_image": request.inpaint_mask[0]} if request.inpaint_mask else {}),
        **({"video": list(request.control), "pose_video": list(request.control)} if request.control else {}),
        **({"face_video": list(request.face)} if request.face else {}),
        "segment_frame_length": request.num_frames,
    }
    if hasattr(pipeline, "resolutions"):  # of which it takes the nearest
        pipeline.resolutions = [(request.width, request.height)]
    if is_guided_by_a_model(sample):
        call |= {"guidance_scale": request.guidance_scale, "guidance_schedule": None}
    call |= longest_prompts(sample)
    if "modality_scale" in known:
        call |= other_guidance(sample.family.folder, request.guidance_scale > 1)
    if hasattr(pipeline, "guider"):  # which knows the scale in place of the call
        pipeline.guider = pipeline.guider.new(guidance_scale=request.guidance_scale)
    return {name: value for name, value in (request.call_arguments() | call).items() if name in known}


def given_images(request: PreviewRequest) -> Image | list[Image]:
    """The images that a preview starts from; one that is split into layers has the channels of these."""
    images = [image.convert("RGBA" if request.num_layers else "RGB") for image in request.inputs]
    return images if len(images) > 1 else images[0]


def is_guided_by_a_model(sample: Sample) -> bool:
    """Whether another model takes the place of a negative prompt."""
    return "unconditional_transformer" in sample.family.components


def levels(frames: list[Image]) -> np.ndarray[Any, Any]:
    """(F, H, W, 3), or with transparency (F, H, W, 4); 0 to 255."""
    return np.stack([np.asarray(frame) for frame in frames]).astype(int)


def prompt_shapes(calls: Calls) -> list[list[torch.Size]]:
    return [[row.shape for row in call["encoder_hidden_states"]] for call in calls]


@pytest.mark.further_layouts
@pytest.mark.parametrize("scale", [1.0, GUIDANCE])
def test_a_preview_is_what_the_pipeline_generates_from_the_text(
    sample: Sample, pipeline: Any, scale: float
) -> None:
    family, frames = sample.family, []
    outputs: tuple[list[Any], list[Any]] = ([], [])
    request = sample.request(num_inference_steps=2, guidance_scale=scale, seed=5)
    if "negative_prompt" not in inspect.signature(pipeline.__call__).parameters:
        # Such a pipeline steers away from an empty prompt, if from any.
        encode = family.load_prompt_encoder(torch.float32, CPU)
        request = dataclasses.replace(request, negative=encode([Prompt(text="", is_negative=True)])[0])
    ours = streamed_model(sample) if scale == GUIDANCE else sample.model
    calls = transformer_calls(
        ours, lambda: frames.extend(family.sample(ours, torch.float32, [request])), outputs[0]
    )
    arguments, theirs = call_of(sample, pipeline, request), getattr(pipeline, *family.trained)
    their_calls = transformer_calls(theirs, lambda: frames.append(pipeline(**arguments)), outputs[1])
    generated, output = frames
    expected = output_frames(output)
    expected = expected[0] if request.num_layers else expected
    assert {frame.size for frame in generated} == {(request.width, request.height)}
    difference = np.abs(levels(generated) - levels(expected)).max()
    # Where a family cuts padding away that its pipeline hides, the same numbers are summed in another order.
    is_cut = prompt_shapes(calls) != prompt_shapes(their_calls)
    assert difference <= (1 if is_cut else 0)
    assert len(calls) == len(their_calls)
    for returned, of_pipeline in zip(*(map(numbers, each) for each in outputs), strict=True):
        if len(returned) == len(of_pipeline):  # some return the places of the prompt, too
            torch.testing.assert_close(returned, of_pipeline, rtol=1e-4, atol=1e-4)


def streamed_model(sample: Sample) -> torch.nn.Module:
    """The family's, of which the weights of one block come at a time, as late as they may."""
    model = sample.family.load_transformer(torch.float32)
    blocks = blocks_of(model, sample.family.block_lists)
    WeightStream([blocks], CPU, num_slots=1, backend=LazyBackend())
    return model


def test_a_prompt_is_encoded_in_a_batch_as_by_itself(sample: Sample) -> None:
    assert sample.first.keys() == sample.prompts[0].keys()
    for name, tensor in sample.first.items():
        torch.testing.assert_close(sample.prompts[0][name], tensor, rtol=1e-4, atol=1e-4)


def test_another_caption_and_another_negative_prompt_generate_something_else(sample: Sample) -> None:
    request = sample.request(
        num_inference_steps=sample.family.min_inference_steps, guidance_scale=GUIDANCE, seed=5
    )
    requests = [
        request,
        dataclasses.replace(request, conditioning=sample.prompts[1]),
        dataclasses.replace(request, negative=sample.prompts[1]),
    ]
    generated, of_another, steered_from_another = (
        levels(frames) for frames in sample.family.sample(sample.model, torch.float32, requests)
    )
    assert (generated != of_another).any()
    is_steered = not takes_a_scale(sample) and not is_guided_by_a_model(sample)
    is_steered &= sample.name != "minimax_h3"  # knows no negative prompt
    assert not is_steered or (generated != steered_from_another).any()


@pytest.mark.further_layouts
def test_the_latents_that_are_trained_are_those_that_the_pipeline_decodes(
    sample: Sample, pipeline: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    family, vae_class, scheduler_class = sample.family, type(pipeline.vae), type(pipeline.scheduler)
    encode, decode = vae_class.encode, vae_class.decode
    encoded: list[torch.Tensor] = []
    decoded: list[torch.Tensor] = []

    def watched_encode(vae: Any, pixels: torch.Tensor, **settings: Any) -> Any:
        output = encode(vae, pixels, **settings)
        encoded.append(output.latent_dist.mode() if hasattr(output, "latent_dist") else output.latent)
        return output

    def watched_decode(vae: Any, latents: torch.Tensor, *args: Any, **settings: Any) -> Any:
        decoded.append(latents)
        return decode(vae, latents, *args, **settings)

    monkeypatch.setattr(vae_class, "encode", watched_encode)
    monkeypatch.setattr(vae_class, "decode", watched_decode)
    (tensors,) = family.load_media_encoder(torch.float32, CPU)(sample.media[:1])
    model, latents, conditioning = sample.model, tensors["latents"][None], [sample.conditioning[0]]
    is_learned = tensors.get("loss_mask", torch.ones(()))
    (call,) = transformer_calls(model, lambda: family.predict(model, latents, torch.ones(1), conditioning))
    # Whatever the model returns and else this step is given, it ends at the clean latents.
    monkeypatch.setattr(
        scheduler_class,
        "step",
        lambda _scheduler, output, *_, **__: Stepped(clean_latents(sample, call["hidden_states"], output)),
    )
    family.sample(
        model,
        torch.float32,
        [sample.request(num_inference_steps=sample.family.min_inference_steps, guidance_scale=1.0, seed=5)],
    )
    for latents in decoded[0].split(1):  # of each layer by itself
        of_this_shape = [each for each in encoded if each.shape == latents.shape]
        assert any(
            torch.allclose(latents * is_learned, each * is_learned, rtol=1e-4, atol=1e-5)
            for each in of_this_shape
        )


@pytest.mark.further_layouts
def test_what_the_model_returns_of_a_place_comes_back_at_that_place(sample: Sample) -> None:
    signature = inspect.signature(sample.model.forward)

    def echo(_model: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        given = signature.bind(*args, **kwargs).arguments
        (latents,) = (
            value for name, value in given.items() if OTHER_NAMES.get(name, name) == "hidden_states"
        )
        echoed = latents if isinstance(latents, list) else as_sampled(latents, output[0])
        return with_first(output, echoed)

    hook = sample.model.register_forward_hook(echo, with_kwargs=True)
    predicted = sample.family.predict(sample.model, sample.latents, SIGMA, sample.conditioning)
    hook.remove()
    # Some models return the opposite of what a family predicts.
    assert torch.equal(predicted.abs(), sample.latents.abs())


def clean_latents(sample: Sample, hidden_states: Any, output: torch.Tensor) -> torch.Tensor:
    """Those of the tokens that the transformer was given; Ideogram 4 has those of the prompt before them.

    MiniMax-H3 has a second sampler, for audio, which is left as it is.
    """
    if sample.name == "minimax_h3" and output.numel() != hidden_states.numel():
        return output
    if sample.name == "ideogram4":
        hidden_states = hidden_states[:, -output.shape[1] :]
    return as_sampled(hidden_states, output)


@pytest.mark.further_layouts
@pytest.mark.usefixtures("mode_of_the_vae")
def test_all_that_the_model_gets_in_training_is_what_the_pipeline_gives_it(sample: Sample) -> None:
    family, model = sample.family, sample.model

    def given_to(one: Sample, place: int) -> dict[str, Any]:
        # No latent is in both, also where two items have the same corner.
        batch = sample.latents[place, None] + place, torch.ones(1), one.conditioning[:1]
        return transformer_calls(model, lambda: family.predict(model, *batch))[0]

    for one in (sample, *(one for one in items_with_images(sample) if one.media[0].inputs)):
        ours, other = given_to(one, 0), given_to(one, 1)
        request = one.request(num_inference_steps=family.min_inference_steps, guidance_scale=1.0, seed=5)
        theirs = transformer_calls(
            model, lambda request=request: family.sample(model, torch.float32, [request])
        )[0]
        if sample.name in ("ltx2", "minimax_h3"):
            ours, theirs = without_audio(ours), without_audio(theirs)
        assert [name for name in theirs.keys() ^ ours.keys() if len(numbers((theirs | ours)[name]))] == []
        # Noise levels and prompts, which may be padded and masked in one of the two, have their own tests.
        others = {"timestep", "hidden_states", "encoder_hidden_states"}
        # Some pipelines hand a scale also to a model that has no use for it.
        others |= set() if takes_a_scale(sample) else {"guidance"}
        for name in (theirs.keys() & ours.keys()) - others:
            if "mask" not in name:
                given, expected = numbers(ours[name]), numbers(theirs[name])
                # What belongs to no token, and is masked, may be left out.
                padding = expected.new_zeros(len(expected) - len(given))
                torch.testing.assert_close(torch.cat([given, padding]), expected, msg=name)
        # After the noisy latents, in the tokens or in the channels, may be those of other images.
        clean = numbers(ours["hidden_states"]) == numbers(other["hidden_states"])
        tokens, expected = (numbers(call["hidden_states"])[clean] for call in (ours, theirs))
        torch.testing.assert_close(tokens, expected, rtol=1e-4, atol=1e-5)


def test_latents_are_channel_first(sample: Sample) -> None:
    """(C, H, W) or (C, F, H, W): masks and the memory plan count on it."""
    family, divisor, media = sample.family, sample.family.size_divisor, sample.media[0]
    num_frames = len(media.frames) + len(media.layers)
    *others, height, width = sample.latents.shape[1:]
    assert len(others) == 2 or (len(others) == 1 and family.frame_step is None)
    assert family.latents_shape(8 * divisor, 2 * divisor, num_frames) == (*others, height, 2 * width)
    assert family.latents_shape(4 * divisor, 4 * divisor, num_frames) == (*others, 2 * height, width)
    if family.frame_step is not None:
        longer = family.latents_shape(4 * divisor, 2 * divisor, num_frames + family.frame_step)
        assert longer == (others[0], longer[1], height, width)
        assert longer[1] > others[1]
    if family.frame_step is not None and "image" in family.record_kinds:
        still = Media(frames=media.frames[:1])
        (encoded,) = family.load_media_encoder(torch.float32, CPU)([still])
        assert encoded["latents"].shape == family.latents_shape(*still.frames[0].size, 1)
        assert encoded["latents"].shape[1] < others[1]


@pytest.fixture
def folder(sample: Sample, tmp_path: Path) -> Path:
    """A copy of the family's folder."""
    return Path(shutil.copytree(sample.family.folder.path, tmp_path / "copy"))


def bound(sample: Sample, folder: Path) -> ModelFamily:
    """The family as a new run would have it."""
    return type(sample.family)(PipelineFolder(path=folder))


def identity(sample: Sample, folder: Path, encoder: str, dtype: torch.dtype = torch.float32) -> str:
    """The encoder's part of the cache's keys."""
    found: str = getattr(bound(sample, folder), f"{encoder}_encoder_id")(dtype)
    return found


def load_encoder(sample: Sample, folder: Path, encoder: str) -> Callable[[Any], Encoded]:
    load = getattr(bound(sample, folder), f"load_{encoder}_encoder")
    loaded: Callable[[Any], Encoded] = load(torch.float32, CPU)
    return loaded


def can_be_loaded(sample: Sample, folder: Path, encoder: str) -> bool:
    try:
        load_encoder(sample, folder, encoder)
    except (UserError, OSError):
        return False
    return True


def changed_by(file: Path, identify: Callable[[], str]) -> bool:
    """Whether an encoder is another one where there is a byte more in a file."""
    before, content = identify(), file.read_bytes()
    file.write_bytes(content + b" ")
    after = identify()
    file.write_bytes(content)
    return after != before


@pytest.mark.parametrize("encoder", ["prompt", "media"])
def test_a_cache_key_changes_with_the_dtype_and_with_every_file_that_the_encoder_needs(
    sample: Sample, folder: Path, encoder: str
) -> None:
    before = identity(sample, folder, encoder)
    assert identity(sample, folder, encoder, torch.bfloat16) != before
    for component in folder.glob("*/"):
        files = list(component.iterdir())
        changing = [file for file in files if changed_by(file, lambda: identity(sample, folder, encoder))]
        assert changing in ([], files), component
        if not changing:
            for file in list(component.glob("*.safetensors")) or files:
                file.unlink()
    # Nothing else is needed.
    assert can_be_loaded(sample, folder, encoder)


def is_equal(first: Encoded, second: Encoded) -> bool:
    return all(
        row.keys() == other.keys() and all(torch.equal(row[name], other[name]) for name in row)
        for row, other in zip(first, second, strict=True)
    )


def test_a_prompts_cache_key_changes_with_the_length_at_which_it_is_cut(
    sample: Sample, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit = sample.family.max_prompt_tokens // 2
    seen = seen_in_prompts(sample.family, sample.media[0])
    prompts = [Prompt(text="circle " * limit, images=seen)]
    before, encoded = identity(sample, folder, "prompt"), load_encoder(sample, folder, "prompt")(prompts)
    monkeypatch.setattr(type(sample.family), "max_prompt_tokens", limit)
    cut = load_encoder(sample, folder, "prompt")(prompts)
    assert is_equal(cut, encoded) or identity(sample, folder, "prompt") != before


@pytest.mark.parametrize("encoder", ["prompt", "media"])
def test_a_cache_key_changes_with_the_folders_index_where_another_one_encodes_otherwise(
    sample: Sample, folder: Path, encoder: str
) -> None:
    before, (index,) = identity(sample, folder, encoder), folder.glob("*model_index.json")
    captions = build_prompts(sample.family, sample.media)
    empty = dataclasses.replace(captions[0], text="", is_negative=True)
    given = [captions[0], empty] if encoder == "prompt" else sample.media[:1]
    encoded, settings = load_encoder(sample, folder, encoder)(given), json.loads(index.read_text())
    others = [{"_class_name": name} for name in sample.family.pipeline_classes]
    others += [{name: not value} for name, value in settings.items() if isinstance(value, bool)]
    others = [changes for changes in others if settings | changes != settings]
    for changes in others:
        index.write_text(json.dumps(settings | changes))
        try:
            bound(sample, folder).check_folder()
        except UserError:
            continue  # it has other components, too
        if identity(sample, folder, encoder) == before:
            assert is_equal(load_encoder(sample, folder, encoder)(given), encoded), changes


def requests_of(sample: Sample, scale: float) -> Iterator[PreviewRequest]:
    """With the inputs that the family takes and, where it needs none, without."""
    steps = sample.family.min_inference_steps
    request = sample.request(num_inference_steps=steps, guidance_scale=scale, seed=5)
    yield request
    if not request.inputs and {"edit", "image_to_video"} & set(sample.family.record_kinds):
        yield dataclasses.replace(request, inputs=(mandelbrot(100, 80, 20),))


def test_a_model_in_the_default_dtypes_trains_and_samples(sample: Sample) -> None:
    default_sample = encode_sample(sample.name, sample.build, sample.family, (TEXT_DTYPE, VAE_DTYPE))
    model = sample.family.load_transformer(DTYPE)
    assert_trains_and_samples(default_sample, model, VAE_DTYPE, GUIDANCE)
    # What accelerate does to a model.
    model.forward = convert_outputs_to_fp32(torch.autocast("cpu", torch.bfloat16)(model.forward))
    assert_trains_and_samples(default_sample, model, DTYPE, 1.0)


def assert_trains_and_samples(
    sample: Sample, model: torch.nn.Module, vae_dtype: torch.dtype, scale: float
) -> None:
    with torch.no_grad():
        velocity = sample.family.predict(model, sample.latents, SIGMA, sample.conditioning)
    assert velocity.shape == sample.latents.shape
    assert velocity.isfinite().all()
    requests = [*requests_of(sample, scale)]
    for request, frames in zip(requests, sample.family.sample(model, vae_dtype, requests), strict=True):
        num_images = request.num_layers or request.num_frames
        assert [frame.size for frame in frames] == [(request.width, request.height)] * num_images


def test_a_prompt_counts_the_same_by_itself_and_next_to_longer_ones(sample: Sample) -> None:
    def predict(conditioning: Encoded, places: slice) -> torch.Tensor:
        # With gradients, as in training: without, diffusers calls the blocks at another place of its code.
        batch = sample.latents[places], SIGMA[places], conditioning[places]
        return sample.family.predict(sample.model, *batch)

    together = predict(sample.conditioning, slice(3))
    single = [predict(sample.conditioning, slice(place, place + 1)) for place in range(3)]
    # A longer row sums the same numbers in another order.
    torch.testing.assert_close(together, torch.cat(single), rtol=1e-4, atol=1e-5)
    others = [
        own | prompt
        for own, prompt in zip(sample.conditioning, sample.prompts[1:] + sample.prompts[:1], strict=True)
    ]
    assert not torch.allclose(predict(others, slice(3)), together, rtol=1e-4, atol=1e-4)
