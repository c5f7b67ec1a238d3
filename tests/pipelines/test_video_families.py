"""Clips that start from an image, and what CogVideoX and HunyuanVideo have of their own."""

import dataclasses
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import test_family_fidelity as fidelity
import test_family_interface as interface
import torch
from comfyui_names import COGVIDEOX as TAKEN
from diffusers import (
    CogVideoXTransformer3DModel,
    HunyuanVideo15ImageToVideoPipeline,
    HunyuanVideoPipeline,
)
from diffusers.models.autoencoders.vae import DiagonalGaussianDistribution
from diffusers_pipelines import bytes_of
from family_sample import (
    CPU,
    PROMPTS,
    SIGMA,
    Sample,
    build_sample,
    encode_texts,
    family_fixture,
    mandelbrot,
    sample_fixture,
    transformer_calls,
)
from release_layouts import ti2v
from transformers import PreTrainedTokenizerFast

from diffsynth_lite.core.noise.paths import DiffusionPath
from diffsynth_lite.data.batches import Batch
from diffsynth_lite.data.buckets import Bucket
from diffsynth_lite.errors import UserError
from diffsynth_lite.media import Media
from diffsynth_lite.pipelines import (
    PipelineFolder,
)
from diffsynth_lite.pipelines.base.tokenizer import load_tokenizer
from diffsynth_lite.pipelines.cogvideox import CogVideoX, model_fn_cogvideox
from diffsynth_lite.pipelines.hunyuan_video import TEMPLATE, HunyuanVideo
from diffsynth_lite.pipelines.hunyuan_video_15 import HunyuanVideo15
from diffsynth_lite.releases import Release
from diffsynth_lite.training.export.usage import usage_code
from diffsynth_lite.training.objective import DenoisingObjective

FAMILY = "hunyuan_video"
TEXTS = (*PROMPTS, "", "circle " * 300)


of_15 = sample_fixture("hunyuan_video_15")
of_images = family_fixture("hunyuan_video_15 of images")


def test_a_folder_that_names_the_class_of_llama_2_is_read_as_its_file_has_it(
    sample: Sample, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(sample.family.folder.path, tmp_path / "named"))
    index, settings = folder / "model_index.json", folder / "tokenizer" / "tokenizer_config.json"
    for file, change in (
        (index, {"tokenizer": ["transformers", "LlamaTokenizerFast"]}),
        (settings, {"tokenizer_class": "LlamaTokenizerFast"}),
    ):
        file.write_text(json.dumps(json.loads(file.read_text()) | change))
    texts = [TEMPLATE.format(text) for text in (*TEXTS, "naïve\n\n42  it's")]
    expected = sample.family.load_tokenizer()(texts)["input_ids"]
    family = HunyuanVideo(PipelineFolder(path=folder))
    named = family.load_tokenizer()
    assert (named.padding_side, named(texts)["input_ids"]) == ("right", expected)
    pipeline = HunyuanVideoPipeline.from_pretrained(folder)
    # When transformers reads it rightly, ``is_misread`` can go.
    assert pipeline.tokenizer(texts)["input_ids"] != expected
    request = sample.request(num_inference_steps=2, guidance_scale=6.0, seed=5)
    settings_of_usage = {
        "dtype": "bfloat16",
        "lora": "lora",
        "prompt": "x",
        "negative_prompt": "",
        "fps": 24.0,
    }
    code = (usage_code(family, request, base=str(folder), **settings_of_usage) or "").splitlines()
    reading = f'PreTrainedTokenizerFast.from_pretrained({str(folder)!r}, subfolder="tokenizer")'
    assert {"from transformers import PreTrainedTokenizerFast", f"pipeline.tokenizer = {reading}"} <= {*code}
    mended = PreTrainedTokenizerFast.from_pretrained(str(folder), subfolder="tokenizer")
    assert mended(texts)["input_ids"] == expected
    plain = usage_code(sample.family, request, base="tiny", **settings_of_usage)
    assert "PreTrainedTokenizerFast" not in (plain or "PreTrainedTokenizerFast")
    (folder / "tokenizer" / "tokenizer.json").write_text("{")
    with pytest.raises(UserError, match=r"the tokenizer in .* cannot be loaded"):
        load_tokenizer(folder / "tokenizer", "LlamaTokenizerFast")


def test_what_is_kept_of_images_has_a_key_of_all_that_makes_it(
    sample_of: Callable[[str], Sample], tmp_path: Path
) -> None:
    starting = sample_of("hunyuan_video_15 of images")
    copy = Path(shutil.copytree(starting.family.folder.path, tmp_path / "copy"))
    fidelity.test_a_cache_key_changes_with_the_dtype_and_with_every_file_that_the_encoder_needs(
        starting, copy, "media"
    )
    interface.test_an_example_of_the_conditioning_is_what_the_encoders_give_of_a_prompt_as_long_as_may_be(
        starting
    )


def test_words_in_quotes_are_read_once_each_as_by_the_pipeline(of_15: Sample) -> None:
    text = 'a sign that says "Stop" and “go”, "Stop"'
    plain, quoted = encode_texts(of_15.family, PROMPTS[0], text)
    with torch.no_grad():
        *_, glyphs, mask = of_15.fresh_pipeline().encode_prompt([text], device=CPU, batch_size=1)
    number = len('Text "Stop". Text "go". ') + 1  # and what ends it
    assert (len(plain["glyph_embeds"]), int(mask.sum())) == (0, number)
    assert torch.equal(quoted["glyph_embeds"], glyphs[0, :number])
    model, batch = of_15.family.load_transformer(torch.float32), (of_15.latents[:2], SIGMA[:2])
    with torch.no_grad():
        both = of_15.family.predict(model, *batch, [plain, quoted])
        without = of_15.family.predict(
            model, *batch, [plain, quoted | {"glyph_embeds": plain["glyph_embeds"]}]
        )
    assert torch.equal(both[0], without[0])
    assert (both[1] - without[1]).abs().max() > 1e-4


@pytest.mark.parametrize("is_named", [False, True])
def test_a_clip_starts_from_the_image_that_is_named_or_its_own_first_frame(
    of_images: HunyuanVideo15, is_named: bool
) -> None:
    clip = Media(
        frames=tuple(mandelbrot(64, 32, 10 + frame) for frame in range(5)),
        first_frame=mandelbrot(64, 32, 40) if is_named else None,
    )
    start = clip.first_frame or clip.frames[0]
    (encoded,) = of_images.load_media_encoder(torch.float32, CPU)([clip])
    assert sum(value.numel() for name, value in encoded.items() if name != "latents") == (
        of_images.num_condition_values(encoded["latents"].shape)
    )
    pipeline = HunyuanVideo15ImageToVideoPipeline.from_pretrained(of_images.folder.path)
    latents = encoded.pop("latents")[None]
    with torch.no_grad():
        given, seen = pipeline.prepare_cond_latents_and_mask(latents, start, 1, 32, 64, torch.float32, CPU)
        embeds = pipeline.encode_image(start, batch_size=1, device=CPU, dtype=torch.float32)
    (prompt,) = encode_texts(of_images, PROMPTS[0])
    model = of_images.load_transformer(torch.float32)
    (call,) = transformer_calls(
        model, lambda: of_images.predict(model, latents, SIGMA[:1], [prompt | encoded])
    )
    assert torch.equal(call["hidden_states"], torch.cat([latents, given, seen], dim=1))
    assert torch.equal(call["image_embeds"], embeds)
    assert given.any()


def test_a_clip_that_starts_from_an_image_has_other_frames(of_15: Sample, of_images: HunyuanVideo15) -> None:
    of_15.family.check_frames(1, key="data.frame_counts")
    with pytest.raises(UserError, match=r"1 frames; .* of which the first is given, such as 5 or 9"):
        of_images.check_frames(1, key="data.frame_counts")
    assert (of_images.record_kinds, of_images.needs_inputs) == (("video", "image_to_video"), True)
    assert (of_15.family.record_kinds, of_15.family.needs_inputs) == (("video", "image"), False)


@pytest.fixture(scope="module", params=["ltx_video", "wan"])
def clips(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Sample:
    """Three clips of 3 latent frames, of 8 tokens each."""
    pipeline = ti2v if request.param == "wan" else None
    return build_sample(request.param, tmp_path_factory.mktemp(request.param), pipeline)


@pytest.fixture(scope="module")
def started(clips: Sample) -> Sample:
    """The same clips, of which the last two start from an image, whose latents the VAE is sure of."""
    media = [clips.media[0]] + [
        dataclasses.replace(item, first_frame=mandelbrot(128, 64, 40 + place))
        for place, item in enumerate(clips.media[1:])
    ]
    encoded = clips.family.load_media_encoder(torch.float32, CPU)(media)
    latents = torch.stack([tensors.pop("latents") for tensors in encoded])
    assert torch.equal(latents[:, :, 1:], clips.latents[:, :, 1:])
    masks = [tensors.pop("loss_mask", None) for tensors in encoded]
    assert masks[0] is None
    assert all(torch.equal(mask, masks[1]) for mask in masks[1:])
    for tensors in encoded:
        tensors |= {name: 0 * value for name, value in tensors.items() if name == "first_frame_std"}
    conditioning = [old | new for old, new in zip(clips.conditioning, encoded, strict=True)]
    return dataclasses.replace(clips, media=media, latents=latents, conditioning=conditioning)


def test_the_latents_of_a_first_frame_are_those_of_the_clips_own(clips: Sample) -> None:
    clip = dataclasses.replace(clips.media[0], first_frame=clips.media[0].frames[0])
    (encoded,) = clips.family.load_media_encoder(torch.float32, CPU)([clip])
    # The autoencoder is causal: a first frame knows nothing of those after it.
    torch.testing.assert_close(
        encoded["first_frame_latents"], encoded["latents"][:, :1], rtol=1e-4, atol=1e-5
    )
    assert encoded["loss_mask"].shape == (1, *clips.latents.shape[2:])
    assert encoded["loss_mask"].mean((0, 2, 3)).tolist() == [0, 1, 1]


def test_the_model_sees_a_first_frame_as_in_the_image_to_video_pipeline(
    started: Sample, monkeypatch: pytest.MonkeyPatch
) -> None:
    family = started.family
    transformer, scheduler = family.load_transformer(torch.float32), family.load_scheduler()
    monkeypatch.setattr(family, "load_scheduler", lambda: scheduler)
    monkeypatch.setattr(DiagonalGaussianDistribution, "sample", lambda self, _generator: self.mode())
    calls: list[dict[str, Any]] = []
    transformer.register_forward_pre_hook(
        lambda _module, _args, kwargs: calls.append(kwargs), with_kwargs=True
    )
    request = started.request(num_inference_steps=2, guidance_scale=1.0, seed=0)
    request = dataclasses.replace(request, inputs=(started.media[1].first_frame,))
    family.sample(transformer, torch.float32, [request])
    sigma = scheduler.sigmas[1].float()
    with torch.no_grad():
        family.predict(transformer, started.latents[1:2], sigma[None], started.conditioning[1:2])
    first, second, ours = calls
    assert ours["timestep"].tolist() == [[0.0] * 8 + [(sigma * 1000).item()] * 16]
    # Some schedulers round to whole timesteps.
    torch.testing.assert_close(second["timestep"].float(), ours["timestep"], rtol=0, atol=1)
    assert torch.equal(first_frame_of(first), first_frame_of(second))
    assert torch.equal(first_frame_of(ours)[0], started.conditioning[1]["first_frame_latents"].flatten(1).T)
    torch.testing.assert_close(first_frame_of(first), first_frame_of(ours), rtol=1e-4, atol=1e-5)
    scales = [[float(scale) for scale in call.get("rope_interpolation_scale", ())] for call in (second, ours)]
    assert scales[0] == pytest.approx(scales[1])


def first_frame_of(call: dict[str, Any]) -> torch.Tensor:
    """(B, height * width, C), from the tokens of LTX-Video or from the latents of Wan."""
    hidden_states = call["hidden_states"]
    return hidden_states[:, :8] if hidden_states.ndim == 3 else hidden_states[:, :, 0].flatten(2).mT


def test_noise_on_a_first_frame_reaches_neither_the_model_nor_the_loss(started: Sample) -> None:
    transformer = started.family.load_transformer(torch.float32)
    objective = DenoisingObjective(
        family=started.family,
        noise_levels=None,
        weighting="none",
        min_snr_gamma=5.0,
        device=CPU,
    )
    loss_mask = torch.ones_like(started.latents[:, :1])
    loss_mask[1:, :, 0] = 0
    noise = torch.randn(started.latents.shape, generator=torch.Generator().manual_seed(0))
    other = noise.clone()
    other[:, :, 0] += 1
    given = Batch(
        bucket=Bucket(width=8, height=8),
        positions=[*range(len(noise))],
        names=[],
        latents=started.latents,
        noise=noise,
        uniform=SIGMA,
        conditioning=started.conditioning,
        loss_mask=loss_mask,
        step_samples=len(noise),
    )
    with torch.no_grad():
        errors, other_errors = (
            objective.errors(transformer, batch, SIGMA).total
            for batch in (given, dataclasses.replace(given, noise=other))
        )
    assert torch.equal(errors[1:], other_errors[1:])
    assert errors[0] != other_errors[0]


def test_clips_with_and_without_a_first_frame_share_a_batch(started: Sample) -> None:
    given = started.latents.clone()
    transformer = started.family.load_transformer(torch.float32)
    with torch.no_grad():
        together = started.family.predict(transformer, started.latents, SIGMA, started.conditioning)
        single = [
            started.family.predict(
                transformer, started.latents[place, None], SIGMA[place, None], [started.conditioning[place]]
            )
            for place in range(3)
        ]
    # One timestep for a single sample, and one for each token in a batch: the same products in other shapes.
    torch.testing.assert_close(together, torch.cat(single), rtol=1e-4, atol=1e-5)
    assert torch.equal(started.latents, given)


def test_a_clip_of_its_first_frame_only_is_refused(clips: Sample) -> None:
    encode = clips.family.load_media_encoder(torch.float32, CPU)
    first = mandelbrot(128, 64, 9)
    with pytest.raises(UserError, match="clip of 1 frame"):
        encode([dataclasses.replace(clips.media[0], first_frame=first, frames=(first,))])


def test_a_preview_from_an_image_has_its_size_and_follows_it(clips: Sample) -> None:
    transformer = clips.family.load_transformer(torch.float32)
    request = clips.request(num_inference_steps=2, guidance_scale=2.0, seed=5)
    requests = [
        dataclasses.replace(request, inputs=(mandelbrot(150, 150, quality),)) for quality in (5, 5, 60)
    ]
    first, again, other = clips.family.sample(transformer, torch.float32, requests)
    assert [frame.size for frame in first] == [(128, 64)] * len(clips.media[0].frames)
    assert bytes_of(first) == bytes_of(again)
    assert first[0].tobytes() != other[0].tobytes()


@pytest.fixture(scope="module", params=["cogvideox", "cogvideox 2b", "cogvideox 1.5"])
def cogvideo(request: pytest.FixtureRequest, sample_of: Callable[[str], Sample]) -> Sample:
    return sample_of(request.param)


def test_by_twos_the_first_latent_frame_is_there_twice(cogvideo: Sample) -> None:
    family, frames = cogvideo.family, cogvideo.latents[0].unbind(1)
    assert isinstance(family, CogVideoX)
    # 17 frames are 5 latent ones. By twos they are 6, of which the first two are the same.
    assert len(frames) == (6 if family._is_1_5 else 5)
    assert torch.equal(frames[0], frames[1]) == family._is_1_5
    assert (family.default_num_frames, family.default_fps) == ((81, 16.0) if family._is_1_5 else (49, 8.0))
    assert family.num_tokens(family.latents_shape(64, 32, 1)) == 2 * 4


def test_the_last_timestep_is_pure_noise_and_the_target_is_v(cogvideo: Sample) -> None:
    path = cogvideo.family.noise_path
    assert isinstance(path, DiffusionPath)
    clean, noise = torch.randn(2, 1, 16, 2, 4, 4, generator=torch.Generator().manual_seed(0))
    assert torch.equal(path.add_noise(clean, noise, torch.ones(1)), noise)
    assert torch.equal(path.target(clean, noise, torch.ones(1)), -clean)
    assert path.timestep(torch.tensor([0.0, 1.0])).tolist() == [0, 999]
    # As diffusers' training script has it: what it calls velocity of the target gives the clean latents back.
    scheduler, timestep = cogvideo.family.load_scheduler(), torch.tensor([400])
    level = (timestep + 0.5) / 1000
    noisy, v = path.add_noise(clean, noise, level), path.target(clean, noise, level)
    torch.testing.assert_close(noisy, scheduler.add_noise(clean, noise, timestep))
    torch.testing.assert_close(scheduler.get_velocity(v, noisy, timestep), clean, rtol=0, atol=1e-5)


def test_clips_beyond_the_table_of_places_are_refused(cogvideo: Sample) -> None:
    cogvideo.family.check_size(160, 128, keys="data")
    if not isinstance(cogvideo.family, CogVideoX) or not cogvideo.family._is_1_5:
        cogvideo.family.check_size(1600, 1280, keys="data")
        return
    for width, height in ((176, 128), (160, 144)):
        with pytest.raises(UserError, match=rf"data: {width}x{height}; .* of at most 160 x 128 pixels"):
            cogvideo.family.check_size(width, height, keys="data")
    transformer = cogvideo.fresh_pipeline().transformer
    inputs = torch.randn(1, 16, 2, 18, 4), torch.tensor([3]), torch.randn(1, 226, 32)
    with pytest.raises(RuntimeError, match="Sizes of tensors must match"), torch.no_grad():
        model_fn_cogvideox(transformer, *inputs)


@pytest.mark.parametrize(
    ("release", "num_layers"),
    list(zip(CogVideoX.releases, (245, 341, 342), strict=True)),
    ids=[release.hub_id for release in CogVideoX.releases],
)
def test_comfyui_has_each_linear_layer_of_a_release(release: Release, num_layers: int) -> None:
    with torch.device("meta"):
        model = CogVideoXTransformer3DModel(**release.components["transformer"].config)
    layers = [name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)]
    in_comfyui = CogVideoX.lora_spelling.for_comfyui
    keys = {in_comfyui.key(f"transformer.{layer}") for layer in layers}
    assert len(keys) == len(layers) == num_layers
    # Of 1.0 it is a convolution.
    convolutions = set() if model.config.patch_size_t else {"diffusion_model.patch_embed.proj"}
    assert {re.sub(r"\.\d+\.", ".*.", key) for key in keys} == set(TAKEN) - convolutions
