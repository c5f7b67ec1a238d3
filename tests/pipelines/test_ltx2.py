"""LTX-2 against diffusers' own transformer, connectors, autoencoder and pipelines."""

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import LTX2ImageToVideoPipeline, LTX2Pipeline
from diffusers.pipelines.ltx2.pipeline_ltx2 import calculate_shift
from family_sample import (
    CPU,
    PROMPTS,
    Sample,
    adapted_transformer,
    assert_equal_under_all_flags,
    build_sample,
    clip,
    gradients,
    picture,
    transformer_calls,
)
from ltx2_layouts import of_2_3

from diffsynth_lite.errors import UserError
from diffsynth_lite.media import Media, Prompt
from diffsynth_lite.pipelines import PipelineFolder
from diffsynth_lite.pipelines.ltx2 import LTX2, model_fn_ltx2, tiny

SIGMA = torch.tensor([0.1, 0.5, 0.9])
BUILDS = {"2.0": tiny, "2.3": of_2_3}


@pytest.fixture(scope="module")
def sample(tmp_path_factory: pytest.TempPathFactory) -> Sample:
    return build_sample("ltx2", tmp_path_factory.mktemp("ltx2"))


@pytest.fixture(scope="module")
def pipeline() -> LTX2Pipeline:
    pipeline = tiny()
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def forward(transformer: Any, timestep: torch.Tensor, sound: dict[str, Any], **more: Any) -> Any:
    """The transformer's own, of two clips of 17 frames: of the clips alone, and of their sound."""
    generator = torch.Generator().manual_seed(0)
    latents, embeds = (
        torch.randn(shape, generator=generator)
        for shape in ((2, 16, 3, 2, 4), (2, 7, prompt_width(transformer)))
    )
    mask = (torch.arange(7) < torch.tensor([[7], [4]])).long()
    sigma = torch.tensor([200.0, 700.0])
    given = {
        "hidden_states": latents.flatten(2).transpose(1, 2),
        "encoder_hidden_states": embeds,
        "timestep": timestep,
        "sigma": sigma,
        "encoder_attention_mask": mask,
        "num_frames": 3,
        "height": 2,
        "width": 4,
        "fps": 24.0,
        "isolate_modalities": True,
        **sound,
        **more,
    }
    return transformer(**given, return_dict=False), (latents, timestep, embeds, mask), sigma


def of_clips(*given: Any, **settings: Any) -> torch.Tensor:
    """What the family's own forward says of clips."""
    return model_fn_ltx2(*given, **settings)[0]


def prompt_width(transformer: Any, stream: str = "") -> int:
    config = transformer.config
    if config.use_prompt_embeddings:
        return int(config.caption_channels)
    return int(config[f"{stream}cross_attention_dim"])


def some_sound(transformer: Any, seed: int, num_tokens: int = 18) -> dict[str, Any]:
    """All that the transformer takes of sound; other seeds have another one, and other prompts for it."""
    generator = torch.Generator().manual_seed(seed)
    shapes = (2, num_tokens, 16), (2, 5, prompt_width(transformer, "audio_"))
    tokens, embeds = (torch.randn(shape, generator=generator) for shape in shapes)
    return {
        "audio_hidden_states": tokens,
        "audio_encoder_hidden_states": embeds,
        "audio_encoder_attention_mask": torch.tensor([[1] * 5, [1] * (seed % 5) + [0] * (5 - seed % 5)]),
        "audio_timestep": 1000 * torch.rand(2, generator=generator),
        "audio_sigma": 1000 * torch.rand(2, generator=generator),
        "audio_num_frames": num_tokens,
        "use_cross_timestep": bool(seed % 2),
    }


@pytest.mark.parametrize("build", BUILDS.values(), ids=BUILDS)
@pytest.mark.parametrize("per_token", [False, True])
def test_model_fn_equals_the_transformers_own_forward(build: Callable[[], Any], per_token: bool) -> None:
    transformer = build().transformer
    timestep = torch.tensor([200.0, 700.0])
    if per_token:
        timestep = timestep[:, None] * torch.rand(2, 24, generator=torch.Generator().manual_seed(1))
    (reference, _), inputs, sigma = forward(transformer, timestep, some_sound(transformer, 1))
    reference = reference.transpose(1, 2).unflatten(2, (3, 2, 4))
    # Whatever it is told of the sound, which is nothing in our call, does nothing: the numbers are the same.
    assert_equal_under_all_flags(
        transformer, reference, of_clips, *inputs, sigma=sigma, frame_rate=torch.tensor([24.0, 24.0])
    )


@pytest.mark.parametrize("build", BUILDS.values(), ids=BUILDS)
def test_a_clip_that_is_kept_apart_hears_nothing_of_its_sound_and_no_gradient_goes_there(
    build: Callable[[], Any],
) -> None:
    transformer, timestep = build().transformer, torch.tensor([200.0, 700.0])
    sounds = [some_sound(transformer, seed, tokens) for seed, tokens in ((1, 18), (2, 3))]
    for sound in sounds:
        sound["audio_hidden_states"].requires_grad_(True)
        sound["audio_encoder_hidden_states"].requires_grad_(True)
    apart = [forward(transformer, timestep, sound)[0] for sound in sounds]
    together = [forward(transformer, timestep, sound, isolate_modalities=False)[0] for sound in sounds]
    assert torch.equal(apart[0][0], apart[1][0])
    assert not torch.allclose(together[0][0], together[1][0], atol=1e-4)
    heard = gradients(transformer, apart[0][0])
    assert [sound["audio_hidden_states"].grad for sound in sounds] == [None, None]
    learning = {name for name, gradient in heard.items() if gradient is not None and gradient.any()}
    of_sound = {name for name in heard if "audio" in name or name.startswith("av_cross")}
    assert not learning & of_sound
    assert "transformer_blocks.0.attn1.to_q.weight" in learning
    gradients(transformer, together[0][0])
    assert sounds[0]["audio_hidden_states"].grad.any()


def test_positions_are_those_of_the_pipeline_for_each_clip_by_its_own_frame_rate(
    sample: Sample, pipeline: LTX2Pipeline
) -> None:
    coords: list[torch.Tensor] = []
    transformer = sample.family.load_transformer(torch.float32)
    transformer.rope.register_forward_pre_hook(lambda _module, args: coords.append(args[0]))
    conditioning = [
        given | {"frame_rate": torch.tensor(rate)}
        for given, rate in zip(sample.conditioning, (24.0, 50.0, 12.5), strict=True)
    ]
    with torch.no_grad():
        sample.family.predict(transformer, sample.latents, SIGMA, conditioning)
    for row, rate in zip(coords[0], (24.0, 50.0, 12.5), strict=True):
        (expected,) = pipeline.transformer.rope.prepare_video_coords(1, 3, 2, 4, CPU, fps=rate)
        assert torch.equal(row, expected)
    (call, *_) = transformer_calls(
        transformer,
        lambda: sample.family.sample(
            transformer, torch.float32, [sample.request(num_inference_steps=2, guidance_scale=1.0, seed=0)]
        ),
    )
    assert torch.equal(call["video_coords"][0], coords[0][0])


def test_the_frame_rate_of_a_clip_is_kept_with_its_latents(sample: Sample) -> None:
    item = dataclasses.replace(sample.media[0], fps=12.5)
    (tensors,) = sample.family.load_media_encoder(torch.float32, CPU)([item])
    assert tensors["frame_rate"].item() == 12.5
    assert [given["frame_rate"].item() for given in sample.conditioning] == [24.0] * 3


@pytest.mark.parametrize("build", BUILDS.values(), ids=BUILDS)
def test_what_is_kept_of_prompts_is_what_the_pipeline_hands_to_its_transformer(
    build: Callable[[], Any], tmp_path: Path
) -> None:
    pipeline, texts = build(), [" a red circle\n", "", "circle " * 1100]
    pipeline.save_pretrained(tmp_path)
    family = LTX2(PipelineFolder(path=tmp_path))
    encoded = family.load_prompt_encoder(torch.float32, CPU)([Prompt(text=text) for text in texts])
    lengths = []
    for text, kept in zip(texts, encoded, strict=True):
        with torch.no_grad():
            layers, mask, _, _ = pipeline.encode_prompt(text, do_classifier_free_guidance=False, device=CPU)
            *streams, shown = pipeline.connectors(layers, mask, padding_side=pipeline.tokenizer.padding_side)
        # Registers stand in the place of padding, so that nothing is hidden from the transformer.
        assert shown.all()
        assert torch.equal(kept["prompt_embeds"], streams[0][0])
        assert torch.equal(kept["audio_prompt_embeds"], streams[1][0])
        lengths.append(int(mask.sum()))
    assert lengths[-1] == family.max_prompt_tokens == 1024 < family.prompt_lengths(texts)[-1]
    assert family.prompt_lengths(texts)[:-1] == lengths[:-1]
    example = family.example_conditioning((16, 3, 2, 4))
    assert {name: row.shape for name, row in example.items()} == {
        **{name: row.shape for name, row in encoded[0].items()},
        "frame_rate": (),
    }


def test_a_picture_is_a_clip_of_one_frame(sample: Sample) -> None:
    item = Media(frames=sample.media[0].frames[:1])
    (encoded,) = sample.family.load_media_encoder(torch.float32, CPU)([item])
    assert encoded["latents"].shape == sample.family.latents_shape(128, 64, 1) == (16, 1, 2, 4)


def test_a_first_frame_is_what_the_pipeline_starts_from(sample: Sample) -> None:
    family, start = sample.family, picture(128, 64, 40)
    (encoded,) = family.load_media_encoder(torch.float32, CPU)(
        [Media(frames=clip(128, 64, 9, 10), first_frame=start)]
    )
    latents, mask = encoded.pop("latents")[None], encoded.pop("loss_mask")
    assert (mask[:, 0].any(), mask[:, 1:].all()) == (False, True)
    transformer = family.load_transformer(torch.float32)
    (told,) = transformer_calls(
        transformer, lambda: family.predict(transformer, latents, torch.ones(1), [sample.first | encoded])
    )
    pipeline = LTX2ImageToVideoPipeline.from_pretrained(family.folder.path)
    pipeline.set_progress_bar_config(disable=True)
    settings: dict[str, Any] = {"width": 128, "height": 64, "num_frames": 9, "num_inference_steps": 2}
    calls = transformer_calls(
        pipeline.transformer, lambda: pipeline(image=start, prompt=PROMPTS[0], **settings)
    )
    torch.testing.assert_close(
        told["hidden_states"][0, :8], calls[0]["hidden_states"][1, :8], rtol=1e-4, atol=1e-5
    )
    assert torch.equal(told["timestep"], calls[0]["timestep"][1:])
    assert torch.equal(told["sigma"], calls[0]["sigma"][1:])
    assert told["timestep"][0].tolist() == [0.0] * 8 + [1000.0] * 8
    # Out of H.264, which these are not.
    (plain,) = family.load_media_encoder(torch.float32, CPU)([Media(frames=(start,))])
    assert not torch.allclose(plain["latents"], encoded["first_frame_latents"], atol=1e-3)


def test_a_preview_from_a_picture_is_what_the_pipeline_draws(sample: Sample) -> None:
    family, start = sample.family, picture(128, 64, 40)
    request = sample.request(num_inference_steps=2, guidance_scale=3.0, seed=5)
    request = dataclasses.replace(request, inputs=(start,), num_frames=9)
    (drawn,) = family.sample(family.load_transformer(torch.float32), torch.float32, [request])
    pipeline = LTX2ImageToVideoPipeline.from_pretrained(family.folder.path)
    pipeline.set_progress_bar_config(disable=True)
    (expected,) = pipeline(
        image=start,
        prompt=PROMPTS[0],
        negative_prompt="blurred",
        guidance_scale=3.0,
        stg_scale=0.0,
        audio_stg_scale=0.0,
        num_frames=9,
        **request.call_arguments(),
    ).frames
    assert [np.asarray(frame).tolist() for frame in drawn] == [
        np.asarray(frame).tolist() for frame in expected
    ]


def test_no_layer_of_the_sound_gets_a_lora(sample: Sample) -> None:
    transformer = adapted_transformer(sample, targets=sample.family.target_sets["all"])
    adapted = {
        name.partition(".lora_A")[0] for name, _ in transformer.named_parameters() if ".lora_A" in name
    }
    layers = {
        f"{attention}.{layer}"
        for attention in ("attn1", "attn2")
        for layer in ("to_q", "to_k", "to_v", "to_out.0")
    } | {"ff.net.0.proj", "ff.net.2"}
    assert adapted == {f"transformer_blocks.{block}.{layer}" for block in (0, 1) for layer in layers}


@pytest.mark.parametrize(("num_frames", "num_tokens"), [(1, 384), (73, 3840), (121, 6144)])
def test_the_shift_is_the_one_of_the_pipelines_sampler_up_to_the_end_of_its_line(
    pipeline: LTX2Pipeline, sample: Sample, num_frames: int, num_tokens: int
) -> None:
    family, config = sample.family, pipeline.scheduler.config
    shape = family.latents_shape(768, 512, num_frames)
    assert family.num_tokens(shape) == num_tokens
    line = config.base_image_seq_len, config.max_image_seq_len, config.base_shift, config.max_shift
    assert family.resolution_shift(shape) == pytest.approx(np.exp(calculate_shift(num_tokens, *line)))
    at_the_end = np.exp(calculate_shift(min(num_tokens, 4096), *line))
    assert family.family_shift(shape) == pytest.approx(at_the_end)


def changed(sample: Sample, root: Path, component: str, **settings: Any) -> LTX2:
    """The family on a copy of its folder with other settings, without weights."""
    copy = Path(
        shutil.copytree(
            sample.family.folder.path, root / "copy", ignore=shutil.ignore_patterns("*.safetensors")
        )
    )
    file = next((copy / component).glob("*config.json"))
    file.write_text(json.dumps(json.loads(file.read_text()) | settings))
    return LTX2(PipelineFolder(path=copy))


def test_a_sampler_without_a_line_has_its_own_shift(sample: Sample, tmp_path: Path) -> None:
    family = changed(sample, tmp_path, "scheduler", use_dynamic_shifting=False, shift=3.0)
    assert family.family_shift((16, 16, 16, 24)) == 3.0


def test_ltx_2_5_is_refused_by_its_settings(sample: Sample, tmp_path: Path) -> None:
    family = changed(sample, tmp_path, "transformer", use_keyframes_abs_pos_embedding=True)
    with pytest.raises(UserError, match=r"transformer has use_keyframes_abs_pos_embedding: an LTX-2\.5"):
        family.check_folder(with_weights=False)


def test_an_autoencoder_that_mirrors_what_it_decodes_needs_more_than_one_latent(
    sample: Sample, tmp_path: Path
) -> None:
    family = changed(sample, tmp_path, "vae", decoder_spatial_padding_mode="reflect")
    family.check_size(64, 64, keys="data.width, data.height")
    sample.family.check_size(64, 32, keys="data.width, data.height")
    with pytest.raises(UserError, match=r"data\.width, data\.height: 64x32 has a side of 32 pixels"):
        family.check_size(64, 32, keys="data.width, data.height")
    pipeline = tiny()
    pipeline.vae.decoder.conv_in.conv.padding_mode = "reflect"
    with pytest.raises(RuntimeError, match="Padding size should be less than"):
        pipeline.vae.decode(torch.randn(1, 16, 2, 1, 2))


def test_in_tiles_clips_are_encoded_in_parts_but_decoded_whole(
    sample: Sample, monkeypatch: pytest.MonkeyPatch
) -> None:
    family = LTX2(sample.family.folder)
    vaes: list[Any] = []
    load = family.load_component
    monkeypatch.setattr(family, "load_component", lambda *given: vaes.append(load(*given)) or vaes[-1])
    for expected in ([(False, False), (False, False)], [(True, True), (True, False)]):
        vaes.clear()
        family.load_media_encoder(torch.float32, CPU)
        family.load_preview_vae(torch.float32, CPU)
        assert [(vae.use_tiling, vae.use_framewise_decoding) for vae in vaes] == expected
        family.tile_vae()
