"""Whole runs on clips with their audio, with a tiny family that makes audio."""

import json
import shutil
from pathlib import Path

import av
import numpy as np
import pytest
import safetensors.torch
import torch
from clip_makers import write_audio_clip
from my_families.singing import Singing, tiny
from tiny_run import TinyRun, checkpoint_tensors, differing, tiny_image, write_config

from diffsynth_lite.cli.main import main
from diffsynth_lite.config import load_config
from diffsynth_lite.data.cache import TensorCache
from diffsynth_lite.doctor.examination import examine
from diffsynth_lite.doctor.examined import estimate_cache
from diffsynth_lite.training.checks import bind_family
from diffsynth_lite.training.planning.subject import counter_of, step_settings

UNWATCHED = ("validation.prompts=[]", "validation.loss_items=0", "validation.item_losses=0")
OWN_LEVELS = ("objective.audio_noise=own", "objective.timestep_density=stretched_logit_normal")


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("singing")
    tiny().save_pretrained(folder)
    return folder


@pytest.fixture
def run(tmp_path: Path, tiny_model: Path) -> TinyRun:
    """Clips of 0.9 s: a tone from the start, one that begins late, a mute track, and no track."""
    data, seconds = tmp_path / "clips", 0.9
    data.mkdir()
    times = np.arange(round(seconds * 16000)) / 16000
    tone = 0.5 * np.sin(2 * np.pi * 100 * times)[None].astype(np.float32)
    sounds = {"tone": tone, "late": np.where(times < 0.18, 0, tone), "mute": 0 * tone, "without": None}
    for name, sound in sounds.items():
        write_audio_clip(data / f"{name}.mov", sound, seconds=seconds)
        (data / f"{name}.txt").write_text("a red circle")
    return TinyRun(
        root=tmp_path,
        config=write_config(tmp_path, tiny_model, data),
        settings=(
            *("model.family=my_families.singing", "data.width=32", "data.height=32", "data.frame_counts=[9]"),
            *("data.audio=true", "train.steps=3", "validation.prompts=[a red circle]", "validation.width=32"),
            *("validation.height=32", "validation.num_frames=9", "validation.num_inference_steps=2"),
            *("validation.loss_items=4", "validation.item_losses=2", "train.global_batch_size=2"),
        ),
    )


def sounds_in(run: TinyRun) -> list[dict[str, torch.Tensor]]:
    """What the cache holds of clips with the latents of their audio, those that have some first."""
    found = [safetensors.torch.load_file(path) for path in (run.root / "cache").rglob("*.safetensors")]
    heard = [entry for entry in found if "audio_latents" in entry]
    return sorted(
        heard, key=lambda entry: (-entry["has_audio"].item(), not entry["audio_latents"][:, 0].any())
    )


def sound_of(path: Path) -> tuple[int, int, int]:
    """Sample rate, channels and samples in a file, and that they are not all 0."""
    with av.open(str(path)) as file:
        (stream,) = file.streams.audio
        assert stream.codec_context.name == "aac"
        samples = np.concatenate([frame.to_ndarray() for frame in file.decode(stream)], axis=1)
        assert samples.any()
        return stream.rate, len(samples), stream.duration


def test_audio_is_encoded_learned_reported_separately_and_generated(run: TinyRun) -> None:
    assert run.train() == 0
    tone, late, *silent = sounds_in(run)
    assert [entry["has_audio"].item() for entry in (tone, late, *silent)] == [1, 1, 0, 0]
    assert all(entry["audio_latents"].shape == (128, 9, 1, 1) for entry in (tone, late, *silent))
    assert not any(entry["audio_latents"].any() for entry in silent)
    for entry, first in ((tone, 0), (late, 5)):
        # Both channels alike; of the late one the tone begins with the 0.18 s.
        left, right = entry["audio_latents"].reshape(2, 64, 9)
        assert torch.equal(left, right)
        loudest = left.abs().amax(0)
        assert loudest[first:].min() > 0.45
        assert not first or loudest[: first - 1].max() < 0.01
    waveform = tone["audio_latents"].reshape(2, 64, 9)[0].T.flatten()
    expected = 0.5 * torch.sin(2 * torch.pi * 100 * torch.arange(len(waveform)) / 1600)
    assert (waveform - expected)[50:].abs().max() < 0.01  # the tone rings where it begins

    steps = [row for row in run.metrics() if "grad_norm" in row]
    assert len(steps) == 3
    for row in steps:
        assert row["video_loss"] < row["loss"] or "audio_loss" not in row
    assert sum("audio_loss" in row for row in steps) >= 2  # each step has two of the four clips
    measured = [row for row in run.metrics() if "train_fixed_noise_loss" in row]
    for row in measured:
        parts = [row[f"train_fixed_noise_loss/{part}"] for part in ("video", "audio")]
        # Two of the four have audio.
        assert row["train_fixed_noise_loss"] == pytest.approx(parts[0] + parts[1] / 2)
    page = (run.folder / "report.html").read_text()
    assert '<section class="previews" id="previews" data-audio>' in page
    assert "Loss of images and audio" in page
    assert "Loss of the audio on fixed noise" in page
    clips = sorted((run.folder / "previews").glob("*.mp4"))
    assert len(clips) == 2
    assert {sound_of(path) for path in clips} == {(48000, 2, 17280)}


@pytest.mark.parametrize("own", [(), OWN_LEVELS], ids=["shared", "own"])
def test_a_run_with_sound_goes_on_as_if_it_had_not_ended(run: TinyRun, own: tuple[str, ...]) -> None:
    whole = run.root / "whole"
    settings = ("data.silent_clips=learn", "objective.audio_loss_weight=0.5", *UNWATCHED, *own)
    assert run.train(f"output.dir={whole}", *settings) == 0
    assert all({"video_loss", "audio_loss"} <= row.keys() for row in run.metrics(whole) if "grad_norm" in row)
    assert run.stopped_after(1, *settings) == 75
    assert run.train(*settings, "--no-use_gradient_checkpointing", "data.cache=false") == 0
    assert differing(checkpoint_tensors(whole, 3), checkpoint_tensors(run.folder, 3)) == []
    # What decides its numbers may not change.
    assert run.train(*settings[1:], "train.steps=4") == 2
    assert run.train(settings[0], *UNWATCHED, *own, "train.steps=4") == 2


def test_levels_of_its_own_change_what_audio_is_learned_at_and_not_what_clips_are(
    run: TinyRun, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = (*UNWATCHED[:1], "validation.item_losses=1", "train.learning_rate=1e-12")
    found, levels = {}, {}
    for noise in ("shared", "own"):
        folder = run.root / noise
        assert run.train(f"output.dir={folder}", *settings, f"objective.audio_noise={noise}") == 0
        found[noise] = [row for row in run.metrics(folder) if "grad_norm" in row]
        rows = map(json.loads, (folder / "sample_losses.jsonl").read_text().splitlines())
        losses = [row["samples"] for row in rows]
        levels[noise] = [[level for level, _ in samples] for row in losses for samples in row.values()]
    for shared, own in zip(found["shared"], found["own"], strict=True):
        # Nothing is learned at this rate, so that each step compares.
        assert shared["video_loss"] == own["video_loss"]
        assert ("audio_loss" in shared) is ("audio_loss" in own)
        assert "audio_loss" not in own or shared["audio_loss"] != own["audio_loss"]
    assert levels["shared"] == levels["own"]
    fixed = {
        noise: [row for row in run.metrics(run.root / noise) if "train_fixed_noise_loss" in row][-1]
        for noise in found
    }
    parts = {noise: row["train_fixed_noise_loss/audio"] for noise, row in fixed.items()}
    assert parts["shared"] != parts["own"]
    own = ("objective.audio_noise=own", f"output.dir={run.root / 'own'}")
    assert run.train(*settings, own[1], "train.steps=4") == 2
    assert "objective.audio_noise was 'own', is 'shared'" in caplog.text
    # Of 9 tokens there is another shift than of the clip's 2, so the doctor has a row for it.
    page = ("--page", str(run.root / "doctor.html"))
    assert main(["doctor", *run.arguments, *own, "objective.shift=resolution", *page]) == 0
    text = capsys.readouterr().out
    assert " audio " in text[text.index("Noise levels") :]


def test_without_the_switch_the_run_is_that_of_a_family_without_sound(
    run: TinyRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("diffsynth_lite.data.items.read_audio", None)
    monkeypatch.setattr("diffsynth_lite.data.media_index.check_audio", None)
    plain = run.root / "plain"
    settings = ("data.audio=false", "validation.loss_items=0")
    assert run.train(f"output.dir={plain}", *settings, "model.family=ltx_video") == 0
    entries = {path: path.stat().st_mtime_ns for path in (run.root / "cache").rglob("*.safetensors")}
    assert run.train(*settings) == 0
    assert differing(checkpoint_tensors(plain, 3), checkpoint_tensors(run.folder, 3)) == []
    # Nor are there other entries.
    assert entries == {path: path.stat().st_mtime_ns for path in (run.root / "cache").rglob("*.safetensors")}
    assert '<section class="previews" id="previews">' in (run.folder / "report.html").read_text()
    for drawn, same in zip(
        *(sorted((one / "previews").glob("*")) for one in (plain, run.folder)), strict=True
    ):
        assert drawn.read_bytes() == same.read_bytes()


def test_samples_have_sound_and_the_doctor_says_what_has_none(
    run: TinyRun, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    page = run.root / "doctor.html"
    assert main(["doctor", *run.arguments, "--page", str(page)]) == 0
    printed = capsys.readouterr()
    text = " ".join((printed.out + printed.err).split())
    assert "3 of 4 clips: 3 files of 16000 Hz and 1 channel; learned at 1600 Hz, 2 channels" in text
    assert "1 clip without audio, of which only the images are learned" in text
    assert page.read_text().count("no audio") == 2
    assert main(["doctor", *run.arguments, "data.audio=false", "--page", str(page)]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "3 clips with audio, which is ignored: data.audio: true would learn it" in text
    assert "no audio" not in page.read_text()

    assert run.train(*UNWATCHED) == 0
    lora = ("--lora", str(run.folder), "--prompt", "a red circle", "--size", "32x32")
    assert main(["sample", *lora, "--frames", "9", "--steps", "2"]) == 0
    assert caplog.messages[-1].endswith("0001/grid.png; the clips: " + str(run.folder / "samples/0001/*.mp4"))
    base, with_lora = sorted((run.folder / "samples" / "0001").glob("*.mp4"))
    assert sound_of(base) == sound_of(with_lora) == (48000, 2, 17280)
    assert base.read_bytes() != with_lora.read_bytes()


def test_what_cannot_be_learned_is_refused_before_weights_load(
    run: TinyRun, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(Singing, "load_component", None)
    assert run.train("model.family=ltx_video") == 2
    assert "data.audio: true, but the model of ltx_video makes no audio" in caplog.text
    assert run.train("model.family=ltx_video", "data.audio=false", "data.control_downscale=2") == 2
    assert "data.control_downscale: 2, but ltx_video takes no controls that are smaller" in caplog.text
    clips = run.root / "clips"
    for name in ("tone", "late", "mute"):
        write_audio_clip(clips / f"{name}.mov", None, seconds=0.9)
    assert run.train() == 2
    assert "data.audio: true, but none of 4 clips has audio" in caplog.text
    assert run.train("data.frame_counts=[1]", "data.silent_clips=learn") == 2
    assert "data.audio: true has no effect, as there are no clips of more than one frame" in caplog.text


def test_what_a_step_and_the_cache_take_is_counted_with_the_sound(run: TinyRun, tmp_path: Path) -> None:
    taken, estimated = {}, {}
    for audio in ("true", "false"):
        settings = (*run.settings, f"data.audio={audio}", "train.use_gradient_checkpointing=false")
        config = load_config(run.config, settings).config
        family = bind_family(config)
        taken[audio] = counter_of(config, family).count(step_settings(config, family)).step
        (data,) = examine(config, sheet_size=0).data
        estimated[audio] = estimate_cache(data, TensorCache(tmp_path / "none"))
    # The same blocks run twice, for 2 latents of the images and 9 of the audio.
    assert 2 * taken["false"].kept < taken["true"].kept < 9 * taken["false"].kept
    assert estimated["true"].num_missing == estimated["false"].num_missing
    assert estimated["true"].missing_bytes - estimated["false"].missing_bytes == 4 * 4 * 128 * 9


def test_a_sealed_cache_has_the_sound(run: TinyRun) -> None:
    pytest.importorskip("lance")
    sealed = f"data.sealed={run.root / 'sealed'}"
    # Images next to the clips have no audio, and are learned as images.
    for place in range(4):
        tiny_image(32, 32, 30 + place).save(run.root / "clips" / f"{place}.png")
        (run.root / "clips" / f"{place}.txt").write_text("a blue square")
    assert run.train(*UNWATCHED, f"output.dir={run.root / 'plain'}") == 0
    steps = [row for row in run.metrics(run.root / "plain") if "grad_norm" in row]
    assert {"video_loss" in row for row in steps} == {True, False}
    assert not any("audio_loss" in row for row in steps if "video_loss" not in row)
    assert main(["cache", "seal", *run.arguments, *UNWATCHED, sealed]) == 0
    for path in (run.root / "clips").iterdir():
        path.unlink()
    shutil.rmtree(run.root / "cache")
    assert run.train(*UNWATCHED, sealed, "data.audio=false") == 2
    assert run.train(*UNWATCHED, sealed) == 0
    assert differing(checkpoint_tensors(run.root / "plain", 3), checkpoint_tensors(run.folder, 3)) == []
