"""CogVideoX against diffusers' own transformer, autoencoder and pipeline, in all layouts of its releases."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from comfyui_names import COGVIDEOX as TAKEN
from diffusers import CogVideoXDDIMScheduler, CogVideoXPipeline, CogVideoXTransformer3DModel
from family_sample import (
    CPU,
    PROMPTS,
    Sample,
    adapted_transformer,
    assert_equal_under_all_flags,
    build_sample,
    clip,
    transformer_calls,
)

from diffsynth_lite.core.noise import DiffusionPath
from diffsynth_lite.errors import UserError
from diffsynth_lite.lora import adapter_settings, adapter_tensors
from diffsynth_lite.lora.conversion import FamilyNames, convert
from diffsynth_lite.lora.reading import read_contents
from diffsynth_lite.lora.spelling import COGVIDEOX_IN_COMFYUI
from diffsynth_lite.media import Media, Prompt
from diffsynth_lite.pipelines.cogvideox import (
    CogVideoX,
    model_fn_cogvideox,
    tiny,
    tiny_cogvideox_transformer,
)
from diffsynth_lite.releases import Release
from diffsynth_lite.releases.cogvideox import COGVIDEOX as RELEASES

# 2B adds places to its tokens; 1.5 makes one token of two latent frames. The sampler is the folders'.
LAYOUTS: dict[str, dict[str, Any]] = {
    "2b": {"use_rotary_positional_embeddings": False},
    "5b": {},
    "1.5": {"patch_size_t": 2, "patch_bias": False, "sample_width": 20, "sample_height": 16},
}


def layout(name: str) -> CogVideoXPipeline:
    pipeline = tiny()
    scheduler = CogVideoXDDIMScheduler.from_config(
        pipeline.scheduler.config, snr_shift_scale=3.0 if name == "2b" else 1.0
    )
    transformer = tiny_cogvideox_transformer(32, **LAYOUTS[name])
    return CogVideoXPipeline(**pipeline.components | {"transformer": transformer, "scheduler": scheduler})


@pytest.fixture(scope="module", params=LAYOUTS)
def sample(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Sample:
    name = request.param
    return build_sample("cogvideox", tmp_path_factory.mktemp(name), lambda: layout(name))


def test_model_fn_equals_the_transformers_own_forward(sample: Sample) -> None:
    """With the positions that the pipeline's own method makes, where the model has rotary ones.

    Its other optional inputs are those of the models for image to video and of a LoRA's scale.
    """
    pipeline = sample.fresh_pipeline()
    transformer = pipeline.transformer
    generator = torch.Generator().manual_seed(0)
    latents = torch.randn(2, 16, 4, 6, 10, generator=generator)
    prompts = torch.randn(2, 226, 32, generator=generator)
    timestep = torch.tensor([0, 999])
    rotary = None
    if transformer.config.use_rotary_positional_embeddings:
        rotary = pipeline._prepare_rotary_positional_embeddings(48, 80, 4, CPU)
    reference = transformer(
        hidden_states=latents.transpose(1, 2),
        encoder_hidden_states=prompts,
        timestep=timestep,
        image_rotary_emb=rotary,
        return_dict=False,
    )[0].transpose(1, 2)
    expected = assert_equal_under_all_flags(
        transformer, reference, model_fn_cogvideox, latents, timestep, prompts
    )
    # No layer of the last block is unused.
    assert all(gradient is not None for gradient in expected.values())


def test_a_clip_is_drawn_of_the_latents_and_places_that_it_is_trained_with(sample: Sample) -> None:
    family, model = sample.family, sample.family.load_transformer(torch.float32)
    assert isinstance(family, CogVideoX)
    request = sample.request(num_inference_steps=2, guidance_scale=1.0, seed=5)
    drawn = transformer_calls(model, lambda: family.sample(model, torch.float32, [request]))[0]
    batch = sample.latents[:1], torch.ones(1), sample.conditioning[:1]
    trained = transformer_calls(model, lambda: family.predict(model, *batch))[0]
    assert drawn["hidden_states"].shape == trained["hidden_states"].shape
    for one, other in zip(drawn["image_rotary_emb"] or (), trained["image_rotary_emb"] or (), strict=True):
        assert torch.equal(one, other)
    # 17 frames are 5 latent ones. By twos they are 6, of which the first two are the same.
    frames = sample.latents[0].unbind(1)
    assert len(frames) == (6 if family._is_1_5 else 5)
    assert torch.equal(frames[0], frames[1]) == family._is_1_5
    assert (family.default_num_frames, family.default_fps) == ((81, 16.0) if family._is_1_5 else (49, 8.0))


def test_latents_are_the_inverse_of_what_the_pipeline_decodes(sample: Sample) -> None:
    pipeline, family = sample.fresh_pipeline(), sample.family
    media = sample.media[:1]
    pixels = pipeline.video_processor.preprocess_video(list(media[0].frames))
    with torch.no_grad():
        expected = pipeline.vae.encode(pixels).latent_dist.mode()
    (encoded,) = family.load_media_encoder(torch.float32, CPU)(media)
    latents = encoded["latents"][None, :, -expected.shape[2] :]
    torch.testing.assert_close(latents / pipeline.vae_scaling_factor_image, expected)
    with torch.no_grad():
        assert pipeline.decode_latents(latents.transpose(1, 2)).shape == pixels.shape
        # Of an even number of latent frames it makes more than there were: why clips have 8 k + 1 frames.
        assert pipeline.vae.encode(pixels[:, :, :5]).latent_dist.mode().shape[2] == 2
        assert pipeline.decode_latents(latents[:, :, :2].transpose(1, 2)).shape[2] == 8


def test_prompts_are_encoded_as_by_the_pipeline(sample: Sample) -> None:
    texts = [*PROMPTS, "", "circle " * 100]
    rows = sample.family.load_prompt_encoder(torch.float32, CPU)([Prompt(text=text) for text in texts])
    with torch.no_grad():
        expected, _ = sample.fresh_pipeline().encode_prompt(texts, do_classifier_free_guidance=False)
    assert torch.equal(torch.stack([row["prompt_embeds"] for row in rows]), expected)
    assert expected.shape[1] == 226 < sample.family.prompt_lengths(texts)[-1]


def test_the_last_timestep_is_pure_noise_and_the_target_is_v(sample: Sample) -> None:
    path = sample.family.noise_path
    assert isinstance(path, DiffusionPath)
    clean, noise = torch.randn(2, 1, 16, 2, 4, 4, generator=torch.Generator().manual_seed(0))
    assert torch.equal(path.add_noise(clean, noise, torch.ones(1)), noise)
    assert torch.equal(path.target(clean, noise, torch.ones(1)), -clean)
    assert path.timestep(torch.tensor([0.0, 1.0])).tolist() == [0, 999]
    # As diffusers' training script has it: what it calls velocity of the target gives the clean latents back.
    scheduler, timestep = sample.family.load_scheduler(), torch.tensor([400])
    level = (timestep + 0.5) / 1000
    noisy, v = path.add_noise(clean, noise, level), path.target(clean, noise, level)
    torch.testing.assert_close(noisy, scheduler.add_noise(clean, noise, timestep))
    torch.testing.assert_close(scheduler.get_velocity(v, noisy, timestep), clean, rtol=0, atol=1e-5)


def test_clips_beyond_the_table_of_places_are_refused(sample: Sample) -> None:
    sample.family.check_size(160, 128, keys="data")
    if not isinstance(sample.family, CogVideoX) or not sample.family._is_1_5:
        sample.family.check_size(1600, 1280, keys="data")
        return
    for width, height in ((176, 128), (160, 144)):
        with pytest.raises(UserError, match=rf"data: {width}x{height}; .* of at most 160 x 128 pixels"):
            sample.family.check_size(width, height, keys="data")
    transformer = sample.fresh_pipeline().transformer
    inputs = torch.randn(1, 16, 2, 18, 4), torch.tensor([3]), torch.randn(1, 226, 32)
    with pytest.raises(RuntimeError, match="Sizes of tensors must match"), torch.no_grad():
        model_fn_cogvideox(transformer, *inputs)


def test_a_picture_is_a_clip_of_one_frame(sample: Sample) -> None:
    (picture,) = clip(64, 32, 1, 10)
    (encoded,) = sample.family.load_media_encoder(torch.float32, CPU)([Media(frames=(picture,))])
    shape = sample.family.latents_shape(64, 32, 1)
    assert encoded["latents"].shape == shape
    assert sample.family.num_tokens(shape) == 2 * 4


def in_blocks_of_all(key: str) -> str:
    return re.sub(r"\.\d+\.", ".*.", key)


def test_a_lora_is_converted_to_the_names_that_comfyui_has_and_back_to_the_same_file(
    sample: Sample, tmp_path: Path
) -> None:
    family = sample.family
    transformer = adapted_transformer(sample, targets=family.target_sets["all"])
    (file,) = family.save_lora(tmp_path, adapter_tensors(transformer), adapter_settings(transformer))
    before = read_contents(file)
    names = FamilyNames(layers=family.lora_layers, comfyui=family.lora_spelling)
    there = convert(before, names, "comfyui", tmp_path / "for_comfyui.safetensors")
    layers = {in_blocks_of_all(name.rpartition(".lora_")[0]) for name in there.tensors}
    assert layers == {name for name in TAKEN if ".blocks." in name}
    assert there.difference == 0
    back = convert(there.contents, names, "diffusers", file)
    assert back.difference == 0
    again, original = back.contents.pairs, before.pairs
    assert again.keys() == original.keys()
    for layer, pair in original.items():
        assert torch.equal(again[layer].down, pair.down), layer
        assert torch.equal(again[layer].up, pair.up), layer


@pytest.mark.parametrize(
    ("release", "num_layers"),
    list(zip(RELEASES, (245, 341, 342), strict=True)),
    ids=[release.hub_id for release in RELEASES],
)
def test_comfyui_has_each_linear_layer_of_a_release(release: Release, num_layers: int) -> None:
    with torch.device("meta"):
        model = CogVideoXTransformer3DModel(**release.components["transformer"].config)
    layers = [name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)]
    keys = {COGVIDEOX_IN_COMFYUI.key(f"transformer.{layer}") for layer in layers}
    assert len(keys) == len(layers) == num_layers
    # Of 1.0 it is a convolution.
    convolutions = set() if model.config.patch_size_t else {"diffusion_model.patch_embed.proj"}
    assert set(map(in_blocks_of_all, keys)) == set(TAKEN) - convolutions
