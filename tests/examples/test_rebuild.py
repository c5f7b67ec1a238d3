"""The scripts that rebuild the mini pipelines: their stages are exact, and the whole runs in a few steps."""

import random
import sys
from types import SimpleNamespace

import comparison
import motions
import pytest
import rebuild
import rebuild_wan
import score
import torch
import train_autoencoder
import train_clip_autoencoder
import train_clip_transformer
import train_transformer
from diffusers import QwenImagePipeline, WanPipeline
from diffusers.models.autoencoders.autoencoder_kl_qwenimage import QwenImageCausalConv3d
from one_frame import one_frame_convolutions
from safetensors.torch import load_file


@pytest.fixture
def pixels():
    rng = random.Random(0)
    return train_autoencoder.to_pixels([train_autoencoder.random_drawing(rng) for _ in range(6)])


@pytest.fixture
def vae():
    """An autoencoder whose branches do something: a fresh one has them all at zero."""
    vae = train_autoencoder.new_autoencoder(0).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in vae.parameters():
            weight += 0.02 * torch.randn(weight.shape, generator=generator)
    return vae


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
def test_adopting_the_statistics_changes_latents_and_no_image(vae, pixels):
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


@pytest.mark.parametrize(
    ("training", "size"), [(train_transformer, (64,)), (train_clip_transformer, (3, 8, 8))]
)
def test_the_velocity_from_data_to_noise_has_no_loss(training, size):
    latents = torch.randn(2, 16, *size, generator=torch.Generator().manual_seed(0))

    def know_the_answer(*, hidden_states, timestep, **_):
        level = timestep.view(-1, *[1] * (latents.ndim - 1)) / timestep_range
        return SimpleNamespace(sample=(hidden_states - latents) / level)

    timestep_range = 1 if training is train_transformer else 1000
    prompts = [None] * (2 if training is train_transformer else 1)
    generator = torch.Generator().manual_seed(1)
    loss = training.flow_matching_loss(know_the_answer, latents, *prompts, generator)
    # Zero but for the division by small noise levels.
    assert loss.item() == pytest.approx(0, abs=1e-8)


@pytest.fixture(scope="module")
def image_vae():
    return score.load_pipeline(rebuild.SHIPPED).vae


def clip_pixels(count):
    rng = random.Random(0)
    scenes = [train_clip_autoencoder.random_moving_scene(rng) for _ in range(count)]
    return train_clip_autoencoder.clips_to_pixels([motions.draw_clip(scene, rng) for scene in scenes])


@torch.no_grad()
def test_an_inflated_autoencoder_does_to_an_image_what_the_one_for_images_does_and_copies_frames(image_vae):
    vae = train_clip_autoencoder.inflate(image_vae, seed=0).eval()
    image = clip_pixels(1)[:, :, :1]
    latents = image_vae.encode(image).latent_dist.mode()
    torch.testing.assert_close(vae.encode(image).latent_dist.mode(), latents, rtol=0, atol=1e-4)
    decoded = image_vae.decode(latents).sample
    torch.testing.assert_close(vae.decode(latents).sample, decoded, rtol=0, atol=1e-4)
    clip = image.expand(-1, -1, 9, -1, -1)
    decoded = vae.decode(vae.encode(clip).latent_dist.mode()).sample
    assert decoded.shape == clip.shape
    # Better than 15 dB in the last frame, which random convolutions in time would not give.
    assert (decoded[:, :, -1] - image[:, :, 0]).square().mean() < 4 / 10**1.5


@torch.no_grad()
def test_the_latents_of_the_noted_statistics_are_normal(image_vae):
    vae = train_clip_autoencoder.inflate(image_vae, seed=0).eval()
    pixels = clip_pixels(4)
    train_clip_autoencoder.note_statistics(vae, pixels)
    latents = train_autoencoder.encode(vae, pixels)
    torch.testing.assert_close(latents.mean(dim=(0, 2, 3, 4)), torch.zeros(16), rtol=0, atol=1e-4)
    torch.testing.assert_close(latents.std(dim=(0, 2, 3, 4)), torch.ones(16), rtol=1e-3, atol=0)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("program", "pipeline_class"), [(rebuild, QwenImagePipeline), (rebuild_wan, WanPipeline)]
)
def test_a_short_rebuild_gives_a_whole_pipeline(tmp_path, monkeypatch, capsys, program, pipeline_class):
    output = tmp_path / "rebuilt"
    monkeypatch.setattr(sys, "argv", ["rebuild.py", "--smoke", "--output", str(output)])
    monkeypatch.setattr(comparison, "NUM_STEPS", 2)
    scenes = motions.known_scenes()[:2]
    monkeypatch.setattr(motions, "known_scenes", lambda: scenes)
    measure = rebuild_wan.peak_signal_to_noise
    monkeypatch.setattr(rebuild_wan, "peak_signal_to_noise", lambda vae, clips: measure(vae, clips[:1]))
    program.main()
    stored = [weight for path in output.glob("*/*.safetensors") for weight in load_file(path).values()]
    assert {weight.dtype for weight in stored} == {torch.bfloat16}
    pipeline, shipped = map(pipeline_class.from_pretrained, (output, program.SHIPPED))
    for part in ("transformer", "vae"):
        wanted = {name: weight.shape for name, weight in getattr(shipped, part).state_dict().items()}
        assert {name: weight.shape for name, weight in getattr(pipeline, part).state_dict().items()} == wanted
    assert dict(pipeline.scheduler.config) == dict(shipped.scheduler.config)
    if program is rebuild:
        assert list(pipeline.vae.config.latents_mean) == list(shipped.vae.config.latents_mean)
    for scene in motions.held_out_scenes() if program is rebuild_wan else ():
        assert len(pipeline.tokenizer.tokenize(scene.caption)) == len(scene.caption.split())
    printed = capsys.readouterr().out
    assert "rebuilt: autoencoder" in printed


def test_an_existing_folder_is_not_written_into(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["rebuild.py", "--output", str(tmp_path)])
    with pytest.raises(SystemExit):
        rebuild.parse_arguments("")
    assert "name a new folder" in capsys.readouterr().err
