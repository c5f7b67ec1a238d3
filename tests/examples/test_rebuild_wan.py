"""The rebuild of the mini Wan: each stage does what it says, and the whole runs in a few steps."""

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
from diffusers import WanPipeline
from safetensors.torch import load_file


@pytest.fixture(scope="module")
def picture_vae():
    return score.load_pipeline(rebuild.SHIPPED).vae


def draw_pixels(count):
    rng = random.Random(0)
    scenes = [train_clip_autoencoder.random_moving_scene(rng) for _ in range(count)]
    return train_clip_autoencoder.clips_to_pixels([motions.draw_clip(scene, rng) for scene in scenes])


def test_clips_become_pixels_between_minus_one_and_one():
    scene = motions.MovingScene("red", "circle", "right", "black")
    frames = motions.draw_frames(scene)
    pixels = train_clip_autoencoder.clips_to_pixels([frames, frames])
    assert pixels.shape == (2, 3, 9, 64, 64)
    for place in (0, 8):
        wanted = torch.tensor(list(frames[place].tobytes())).reshape(64, 64, 3).permute(2, 0, 1) / 127.5 - 1
        torch.testing.assert_close(pixels[1, :, place], wanted)


@torch.no_grad()
def test_an_inflated_autoencoder_does_to_a_picture_what_the_one_for_pictures_does(picture_vae):
    vae = train_clip_autoencoder.inflate(picture_vae, seed=0).eval()
    picture = draw_pixels(1)[:, :, :1]
    latents = picture_vae.encode(picture).latent_dist.mode()
    torch.testing.assert_close(vae.encode(picture).latent_dist.mode(), latents, rtol=0, atol=1e-4)
    torch.testing.assert_close(
        vae.decode(latents).sample, picture_vae.decode(latents).sample, rtol=0, atol=1e-4
    )


@torch.no_grad()
def test_an_inflated_autoencoder_copies_frames(picture_vae):
    vae = train_clip_autoencoder.inflate(picture_vae, seed=0).eval()
    picture = draw_pixels(1)[:, :, :1]
    clip = picture.expand(-1, -1, 9, -1, -1)
    decoded = vae.decode(vae.encode(clip).latent_dist.mode()).sample
    assert decoded.shape == clip.shape
    # Better than 15 dB in the last frame, which random convolutions in time would not give.
    assert (decoded[:, :, -1] - picture[:, :, 0]).square().mean() < 4 / 10**1.5


def test_the_velocity_from_clip_to_noise_has_no_loss():
    latents = torch.randn(2, 16, 3, 8, 8, generator=torch.Generator().manual_seed(0))

    def know_the_answer(*, hidden_states, timestep, **_):
        level = timestep.view(-1, 1, 1, 1, 1) / 1000
        return SimpleNamespace(sample=(hidden_states - latents) / level)

    generator = torch.Generator().manual_seed(1)
    loss = train_clip_transformer.flow_matching_loss(know_the_answer, latents, None, generator)
    # Zero but for the division by small noise levels.
    assert loss.item() == pytest.approx(0, abs=1e-8)


def test_a_short_rebuild_gives_a_whole_pipeline(tmp_path, monkeypatch, capsys):
    output = tmp_path / "rebuilt"
    monkeypatch.setattr(sys, "argv", ["rebuild_wan.py", "--smoke", "--output", str(output)])
    monkeypatch.setattr(comparison, "NUM_STEPS", 2)
    scenes = motions.known_scenes()[:2]
    monkeypatch.setattr(motions, "known_scenes", lambda: scenes)
    measure = rebuild_wan.peak_signal_to_noise
    monkeypatch.setattr(rebuild_wan, "peak_signal_to_noise", lambda vae, clips: measure(vae, clips[:1]))
    rebuild_wan.main()
    stored = [weight for path in output.glob("*/*.safetensors") for weight in load_file(path).values()]
    assert {weight.dtype for weight in stored} == {torch.bfloat16}
    pipeline = WanPipeline.from_pretrained(output)
    shipped = WanPipeline.from_pretrained(rebuild_wan.SHIPPED)
    for part in ("transformer", "vae"):
        wanted = {name: weight.shape for name, weight in getattr(shipped, part).state_dict().items()}
        assert {name: weight.shape for name, weight in getattr(pipeline, part).state_dict().items()} == wanted
    assert dict(pipeline.scheduler.config) == dict(shipped.scheduler.config)
    for scene in motions.held_out_scenes():
        assert len(pipeline.tokenizer.tokenize(scene.caption)) == len(scene.caption.split())
    assert "rebuilt: autoencoder" in capsys.readouterr().out


@torch.no_grad()
def test_the_latents_of_the_noted_statistics_are_normal(picture_vae):
    vae = train_clip_autoencoder.inflate(picture_vae, seed=0).eval()
    pixels = draw_pixels(4)
    train_clip_autoencoder.note_statistics(vae, pixels)
    latents = train_autoencoder.encode(vae, pixels)
    torch.testing.assert_close(latents.mean(dim=(0, 2, 3, 4)), torch.zeros(16), rtol=0, atol=1e-4)
    torch.testing.assert_close(latents.std(dim=(0, 2, 3, 4)), torch.ones(16), rtol=1e-3, atol=0)
