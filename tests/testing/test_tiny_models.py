"""The tiny models: reproducible, like the real ones where pipelines look, exact after reloading."""

import inspect

import pytest
import torch
from diffusers import AutoencoderKLQwenImage, AutoencoderKLWan

from diffsynth_lite.pipelines.ltx2 import tiny_gemma4
from diffsynth_lite.pipelines.wan import tiny_wan_transformer
from diffsynth_lite.testing import seeded
from diffsynth_lite.testing.autoencoders import (
    tiny_dc_vae,
    tiny_flux2_vae,
    tiny_flux_vae,
    tiny_kl,
    tiny_ltx2_audio_vae,
    tiny_ltx2_vae,
    tiny_ltx_vae,
    tiny_qwen21_vae,
    tiny_qwen_vae,
    tiny_sdxl_vae,
    tiny_wan_vae,
)
from diffsynth_lite.testing.text_encoders import (
    tiny_clip_text,
    tiny_clip_text_with_projection,
    tiny_gemma2,
    tiny_gemma3,
    tiny_mistral3,
    tiny_qwen2_5_vl,
    tiny_qwen3_lm,
    tiny_qwen3_vl,
    tiny_qwen3_vl_lm,
    tiny_t5,
    tiny_umt5,
)
from diffsynth_lite.testing.tokenizers import (
    clip_tokenizer,
    gemma_tokenizer,
    mistral_tokenizer,
    qwen2_tokenizer,
    t5_tokenizer,
)

BUILDERS = {
    "qwen2_5_vl": lambda seed: tiny_qwen2_5_vl(qwen2_tokenizer(), seed=seed),
    "qwen3": lambda seed: tiny_qwen3_lm(qwen2_tokenizer(), seed=seed),
    "qwen3_vl": lambda seed: tiny_qwen3_vl(qwen2_tokenizer(), seed=seed),
    "qwen3_vl_lm": lambda seed: tiny_qwen3_vl_lm(qwen2_tokenizer(), seed=seed),
    "umt5": lambda seed: tiny_umt5(t5_tokenizer(), seed=seed),
    "t5": lambda seed: tiny_t5(t5_tokenizer(), seed=seed),
    "clip_text": lambda seed: tiny_clip_text(clip_tokenizer(), seed=seed),
    "clip_text_with_projection": lambda seed: tiny_clip_text_with_projection(clip_tokenizer(), seed=seed),
    "gemma2": lambda seed: tiny_gemma2(gemma_tokenizer(), seed=seed),
    "gemma3": lambda seed: tiny_gemma3(gemma_tokenizer(), seed=seed),
    "gemma4": lambda seed: tiny_gemma4(gemma_tokenizer(), seed=seed),
    "mistral3": lambda seed: tiny_mistral3(mistral_tokenizer(), seed=seed),
    "qwen_vae": lambda seed: tiny_qwen_vae(seed=seed),
    "qwen21_vae": lambda seed: tiny_qwen21_vae(seed=seed),
    "wan_vae": lambda seed: tiny_wan_vae(seed=seed),
    "residual_wan_vae": lambda seed: tiny_wan_vae(residual=True, seed=seed),
    "kl": lambda seed: tiny_kl(latent_channels=4, seed=seed),
    "sdxl_vae": lambda seed: tiny_sdxl_vae(seed=seed),
    "flux_vae": lambda seed: tiny_flux_vae(seed=seed),
    "flux2_vae": lambda seed: tiny_flux2_vae(seed=seed),
    "ltx_vae": lambda seed: tiny_ltx_vae(seed=seed),
    "ltx2_vae": lambda seed: tiny_ltx2_vae(seed=seed),
    "ltx2_audio_vae": lambda seed: tiny_ltx2_audio_vae(seed=seed),
    "dc_vae": lambda seed: tiny_dc_vae(seed=seed),
    "wan_transformer": lambda seed: tiny_wan_transformer(32, seed=seed),
}


def weights(model):
    return torch.cat([weight.flatten() for weight in model.state_dict().values()])


@pytest.mark.parametrize("name", BUILDERS)
def test_only_the_seed_decides_the_weights_and_the_random_state_is_left_as_it_was(name):
    before = torch.get_rng_state()
    model = BUILDERS[name](0)
    assert torch.equal(torch.get_rng_state(), before)
    assert not model.training
    torch.rand(3)
    assert torch.equal(weights(BUILDERS[name](0)), weights(model))
    assert not torch.equal(weights(BUILDERS[name](1)), weights(model))


def test_the_random_state_is_restored_after_an_error_too():
    def fail():
        with seeded(5):
            torch.rand(3)
            raise RuntimeError("stop")

    before = torch.get_rng_state()
    with pytest.raises(RuntimeError, match="stop"):
        fail()
    assert torch.equal(torch.get_rng_state(), before)


def test_the_text_encoder_has_the_asked_width():
    tokenizer = qwen2_tokenizer()
    text_encoder = tiny_qwen2_5_vl(tokenizer, hidden_size=32)
    ids = torch.tensor([tokenizer.encode("a red circle")])
    states = text_encoder(input_ids=ids, output_hidden_states=True).hidden_states
    assert len(states) == 3
    assert states[-1].shape == (1, ids.shape[1], 32)
    assert states[-1].isfinite().all()


SHAPES = {
    "dc_vae": ((1, 3, 64, 96), (1, 32, 2, 3)),
    "flux_vae": ((1, 3, 16, 24), (1, 16, 2, 3)),
    "ltx_vae": ((1, 3, 9, 64, 32), (1, 128, 2, 2, 1)),
    "ltx2_vae": ((1, 3, 9, 64, 32), (1, 16, 2, 2, 1)),
    # Four frames of its spectrum are a latent, and the first one is.
    "ltx2_audio_vae": ((1, 2, 9, 16), (1, 4, 3, 4)),
    "qwen_vae": ((1, 3, 1, 16, 24), (1, 16, 1, 2, 3)),
    "residual_wan_vae": ((1, 3, 5, 64, 32), (1, 48, 2, 4, 2)),
    "wan_vae": ((1, 3, 5, 64, 32), (1, 16, 2, 8, 4)),
}
"""Of what an autoencoder is given and of its latents, as those of the released ones."""


@pytest.mark.parametrize("name", SHAPES)
def test_an_autoencoder_compresses_as_the_released_one_does(name):
    vae, (shape, expected) = BUILDERS[name](0), SHAPES[name]
    with torch.no_grad():
        output = vae.encode(torch.rand(shape, generator=torch.Generator().manual_seed(0)) * 2 - 1)
        latents = output.latent if hasattr(output, "latent") else output.latent_dist.mode()
        assert vae.decode(latents).sample.shape == shape
    assert latents.shape == expected


@pytest.mark.parametrize(
    ("vae_class", "build"), [(AutoencoderKLQwenImage, tiny_qwen_vae), (AutoencoderKLWan, tiny_wan_vae)]
)
def test_an_autoencoder_has_the_statistics_of_the_released_one(vae_class, build):
    defaults = inspect.signature(vae_class.__init__).parameters
    for name in ("z_dim", "latents_mean", "latents_std", "temperal_downsample"):
        assert build().config[name] == defaults[name].default
