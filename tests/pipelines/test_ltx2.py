"""LTX-2 against diffusers' own transformer, autoencoder and pipelines."""

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import LTX2ImageToVideoPipeline, LTX2Pipeline
from diffusers_pipelines import bytes_of, generated_by
from family_sample import (
    CPU,
    NEGATIVE,
    PROMPTS,
    SIGMA,
    Sample,
    adapted_transformer,
    clip,
    mandelbrot,
    transformer_calls,
)
from release_layouts import (
    ltx_2_3,
)

from diffsynth_lite.errors import UserError
from diffsynth_lite.media import Media
from diffsynth_lite.pipelines import PipelineFolder
from diffsynth_lite.pipelines.ltx2 import LTX2, tiny

FAMILY = "ltx2"


BUILDS = {"2.0": tiny, "2.3": ltx_2_3}


def forward(transformer: Any, timestep: torch.Tensor, audio: dict[str, Any], **more: Any) -> Any:
    """The transformer's own, of two clips of 17 frames: of the clips, and of their audio."""
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
        **audio,
        **more,
    }
    return transformer(**given, return_dict=False), (latents, timestep, embeds, mask), sigma


def prompt_width(transformer: Any, stream: str = "") -> int:
    config = transformer.config
    if config.use_prompt_embeddings:
        return int(config.caption_channels)
    return int(config[f"{stream}cross_attention_dim"])


def some_audio(transformer: Any, seed: int, num_tokens: int = 18) -> dict[str, Any]:
    """All that the transformer takes of audio; other seeds make other audio and other prompts for it."""
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


def test_a_first_frame_is_what_the_pipeline_starts_from(sample: Sample) -> None:
    family, start = sample.family, mandelbrot(128, 64, 40)
    (encoded,) = family.load_media_encoder(torch.float32, CPU)(
        [Media(frames=clip(128, 64, 9, 10), first_frame=start)]
    )
    latents, mask = encoded.pop("latents")[None], encoded.pop("loss_mask")
    assert (mask[:, 0].any(), mask[:, 1:].all()) == (False, True)
    transformer = family.load_transformer(torch.float32)
    (call,) = transformer_calls(
        transformer, lambda: family.predict(transformer, latents, torch.ones(1), [sample.first | encoded])
    )
    pipeline = LTX2ImageToVideoPipeline.from_pretrained(family.folder.path)
    settings: dict[str, Any] = {"width": 128, "height": 64, "num_frames": 9, "num_inference_steps": 2}
    calls = transformer_calls(
        pipeline.transformer, lambda: pipeline(image=start, prompt=PROMPTS[0], **settings)
    )
    torch.testing.assert_close(
        call["hidden_states"][0, :8], calls[0]["hidden_states"][1, :8], rtol=1e-4, atol=1e-5
    )
    assert torch.equal(call["timestep"], calls[0]["timestep"][1:])
    assert torch.equal(call["sigma"], calls[0]["sigma"][1:])
    assert call["timestep"][0].tolist() == [0.0] * 8 + [1000.0] * 8
    assert call["isolate_modalities"]  # no audio is learned
    # Out of H.264, which these are not.
    (plain,) = family.load_media_encoder(torch.float32, CPU)([Media(frames=(start,))])
    assert not torch.allclose(plain["latents"], encoded["first_frame_latents"], atol=1e-3)


def test_a_preview_from_an_image_is_what_the_pipeline_generates(sample: Sample) -> None:
    family, start = sample.family, mandelbrot(128, 64, 40)
    request = sample.request(num_inference_steps=2, guidance_scale=3.0, seed=5)
    request = dataclasses.replace(request, inputs=(start,), num_frames=9)
    (generated,) = family.sample(family.load_transformer(torch.float32), torch.float32, [request])
    pipeline = LTX2ImageToVideoPipeline.from_pretrained(family.folder.path)
    own = {"stg_scale": 0.0, "audio_stg_scale": 0.0, "num_frames": 9}
    expected = generated_by(
        pipeline, request, image=start, prompt=PROMPTS[0], negative_prompt=NEGATIVE, **own
    )
    assert bytes_of(generated) == expected


def test_no_layer_of_the_audio_gets_a_lora(sample: Sample) -> None:
    transformer = adapted_transformer(sample.family, targets=sample.family.target_sets["all"])
    adapted = {
        name.partition(".lora_A")[0] for name, _ in transformer.named_parameters() if ".lora_A" in name
    }
    layers = {
        f"{attention}.{layer}"
        for attention in ("attn1", "attn2")
        for layer in ("to_q", "to_k", "to_v", "to_out.0")
    } | {"ff.net.0.proj", "ff.net.2"}
    assert adapted == {f"transformer_blocks.{block}.{layer}" for block in (0, 1) for layer in layers}


def with_settings(sample: Sample, root: Path, component: str, **settings: Any) -> LTX2:
    """The family on a copy of its folder with other settings, without weights."""
    copy = Path(
        shutil.copytree(
            sample.family.folder.path, root / "copy", ignore=shutil.ignore_patterns("*.safetensors")
        )
    )
    file = next((copy / component).glob("*config.json"))
    file.write_text(json.dumps(json.loads(file.read_text()) | settings))
    return LTX2(PipelineFolder(path=copy))


def test_an_autoencoder_that_mirrors_what_it_decodes_needs_more_than_one_latent(
    sample: Sample, tmp_path: Path
) -> None:
    family = with_settings(sample, tmp_path, "vae", decoder_spatial_padding_mode="reflect")
    family.check_size(64, 64, keys="data.width, data.height")
    sample.family.check_size(64, 32, keys="data.width, data.height")
    with pytest.raises(UserError, match=r"data\.width, data\.height: 64x32 has a side of 32 pixels"):
        family.check_size(64, 32, keys="data.width, data.height")
    pipeline = tiny()
    pipeline.vae.decoder.conv_in.conv.padding_mode = "reflect"
    with pytest.raises(RuntimeError, match="Padding size should be less than"):
        pipeline.vae.decode(torch.randn(1, 16, 2, 1, 2))
