"""The rebuild scripts: each stage does what it says, and the whole runs in a few steps."""

import random
import sys
from types import SimpleNamespace

import comparison
import pytest
import rebuild
import schedule
import score
import shapes
import torch
import train_autoencoder
import train_transformer
from diffusers import QwenImagePipeline
from diffusers.models.autoencoders.autoencoder_kl_qwenimage import QwenImageCausalConv3d
from one_frame import one_frame_convolutions
from safetensors.torch import load_file


@pytest.fixture
def pixels():
    rng = random.Random(0)
    return train_autoencoder.to_pixels([train_autoencoder.random_picture(rng) for _ in range(6)])


@pytest.fixture
def vae():
    """An autoencoder whose branches do something: a fresh one has them all at zero."""
    vae = train_autoencoder.new_autoencoder(0).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in vae.parameters():
            weight += 0.02 * torch.randn(weight.shape, generator=generator)
    return vae


def test_pictures_become_pixels_between_minus_one_and_one():
    red = shapes.draw("circle", (255, 0, 0), (0, 0, 0))
    pixels = train_autoencoder.to_pixels([red, red])
    assert pixels.shape == (2, 3, 1, 64, 64)
    assert pixels[0, :, 0, 32, 32].tolist() == [1, -1, -1]


@torch.no_grad()
def test_one_frame_convolutions_compute_what_the_causal_ones_do(vae, pixels):
    forward = QwenImageCausalConv3d.forward
    latents = vae.encode(pixels).latent_dist.mode()
    decoded = vae.decode(latents).sample
    with one_frame_convolutions():
        assert QwenImageCausalConv3d.forward is not forward
        # Another order of summation.
        torch.testing.assert_close(vae.encode(pixels).latent_dist.mode(), latents, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(vae.decode(latents).sample, decoded, rtol=1e-4, atol=1e-5)
    assert QwenImageCausalConv3d.forward is forward


@torch.no_grad()
def test_adopting_the_statistics_changes_latents_and_no_picture(vae, pixels):
    before = vae.encode(pixels).latent_dist
    decoded = vae.decode(before.mode()).sample
    train_autoencoder.adopt_statistics(vae, pixels)
    normalised = train_autoencoder.encode(vae, pixels)
    torch.testing.assert_close(normalised.mean(dim=(0, 2, 3, 4)), torch.zeros(16), rtol=0, atol=1e-4)
    torch.testing.assert_close(normalised.std(dim=(0, 2, 3, 4)), torch.ones(16), rtol=1e-4, atol=0)
    after = vae.encode(pixels).latent_dist
    # Rounding only: latents of size 1 go through a scale and its inverse.
    torch.testing.assert_close(vae.decode(after.mode()).sample, decoded, rtol=1e-3, atol=1e-4)
    scale = after.mean.std(dim=(0, 2, 3, 4)) / before.mean.std(dim=(0, 2, 3, 4))
    torch.testing.assert_close(after.std / before.std, scale.view(1, -1, 1, 1, 1).expand_as(after.std))


def test_tokens_are_packed_as_the_pipeline_packs_them():
    latents = torch.arange(2 * 16 * 4 * 6.0).reshape(2, 16, 1, 4, 6)
    wanted = QwenImagePipeline._pack_latents(latents, 2, 16, 4, 6)
    assert torch.equal(train_transformer.pack(latents), wanted)


def test_a_gray_answer_costs_more_than_an_equally_wrong_one_in_colour():
    brightness = torch.full((1, 3, 1, 4, 4), 0.3)
    colour = brightness * torch.tensor([1.0, -1.0, 1.0]).view(1, 3, 1, 1, 1)
    assert train_autoencoder.reconstruction_loss(brightness) == pytest.approx(0.3 + 2 * 0.3**2)
    assert train_autoencoder.reconstruction_loss(colour) > train_autoencoder.reconstruction_loss(brightness)


def test_the_learning_rate_warms_up_and_ends_low():
    rates = [schedule.learning_rate(1.0, step, 100, 10) for step in range(100)]
    assert rates[0] == pytest.approx(0.1)
    assert max(rates) == rates[9]
    assert rates[99] < 0.03


def test_training_the_autoencoder_lowers_the_error(pixels):
    vae = train_autoencoder.new_autoencoder(0)
    with one_frame_convolutions():
        before = train_autoencoder.peak_signal_to_noise(vae, pixels)
        train_autoencoder.train(vae, num_steps=16, num_pictures=16, seed=0)
        after = train_autoencoder.peak_signal_to_noise(vae, pixels)
    assert after > before + 2


def test_the_velocity_from_picture_to_noise_has_no_loss():
    latents = torch.randn(2, 16, 64, generator=torch.Generator().manual_seed(0))

    def know_the_answer(*, hidden_states, timestep, **_):
        level = timestep.view(-1, 1, 1)
        return SimpleNamespace(sample=(hidden_states - latents) / level)

    generator = torch.Generator().manual_seed(1)
    loss = train_transformer.flow_matching_loss(know_the_answer, latents, None, None, generator)
    # Zero but for the division by small noise levels.
    assert loss.item() == pytest.approx(0, abs=1e-8)


def test_training_the_transformer_lowers_its_loss():
    pipeline = score.load_pipeline(rebuild.SHIPPED)
    pipeline.transformer = train_transformer.new_transformer(rebuild.TEXT_WIDTH, seed=0)
    scenes = shapes.known_scenes(8)
    drawings = [shapes.draw_scene(scene, random.Random(0)) for scene in scenes]
    latents = train_transformer.pack(
        train_autoencoder.encode(pipeline.vae, train_autoencoder.to_pixels(drawings))
    )
    captions = [scene.caption for scene in scenes]

    @torch.no_grad()
    def measure_loss():
        embeddings, masks = pipeline.encode_prompt([*captions, " "])
        generator = torch.Generator().manual_seed(0)
        return train_transformer.flow_matching_loss(
            pipeline.transformer, latents, embeddings[:8], masks[:8], generator
        ).item()

    before = measure_loss()
    train_transformer.train(pipeline, num_steps=12, num_pictures=32, seed=0)
    # Twelve steps are still within the warm-up: 4 % is what they give.
    assert measure_loss() < 0.98 * before
    assert not pipeline.transformer.training


def test_a_short_rebuild_gives_a_whole_pipeline(tmp_path, monkeypatch, capsys):
    output = tmp_path / "rebuilt"
    monkeypatch.setattr(sys, "argv", ["rebuild.py", "--smoke", "--output", str(output)])
    monkeypatch.setattr(comparison, "NUM_STEPS", 2)
    rebuild.main()
    stored = [weight for path in output.glob("*/*.safetensors") for weight in load_file(path).values()]
    assert {weight.dtype for weight in stored} == {torch.bfloat16}
    pipeline = QwenImagePipeline.from_pretrained(output)
    shipped = QwenImagePipeline.from_pretrained(rebuild.SHIPPED)
    for part in ("transformer", "vae"):
        wanted = {name: weight.shape for name, weight in getattr(shipped, part).state_dict().items()}
        assert {name: weight.shape for name, weight in getattr(pipeline, part).state_dict().items()} == wanted
    assert dict(pipeline.scheduler.config) == dict(shipped.scheduler.config)
    assert list(pipeline.vae.config.latents_mean) == list(shipped.vae.config.latents_mean)
    printed = capsys.readouterr().out
    assert "rebuilt: autoencoder" in printed
    assert "not as good as the shipped pipeline" in printed


def test_an_existing_folder_is_not_written_into(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["rebuild.py", "--output", str(tmp_path)])
    with pytest.raises(SystemExit):
        rebuild.parse_arguments("")
    assert "name a new folder" in capsys.readouterr().err
