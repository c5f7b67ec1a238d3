"""HunyuanVideo from images: batches at each step of the pipeline, and which image a prompt is read with."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import HunyuanVideoImageToVideoPipeline
from family_sample import CPU, PROMPTS, Sample, mandelbrot

from diffsynth_lite.config import load_config
from diffsynth_lite.data.buckets import BucketRule
from diffsynth_lite.data.media_index import FileMemory, MediaIndex
from diffsynth_lite.data.plan import PlanRules, plan_items
from diffsynth_lite.data.records import Record
from diffsynth_lite.data.video import write_video
from diffsynth_lite.errors import UserError
from diffsynth_lite.media import Prompt
from diffsynth_lite.training.distributed.agreement import FolderGroup
from diffsynth_lite.training.encoding.job import EncodingJob

FAMILY = "hunyuan_video_i2v"
RELEASES = [FAMILY, f"{FAMILY} 33ch"]


@pytest.mark.parametrize("name", RELEASES)
def test_a_batch_is_predicted_as_at_each_step_of_the_pipeline_from_the_texts_and_images(
    name: str, sample_of: Callable[[str], Sample]
) -> None:
    sample = sample_of(name)
    family, (*_, num_frames, height, width) = sample.family, sample.latents.shape
    pipeline = HunyuanVideoImageToVideoPipeline.from_pretrained(family.folder.path)
    generator, steps = torch.Generator().manual_seed(0), []
    for name_of_weight, weight in pipeline.transformer.named_parameters():
        if "norm" in name_of_weight:
            weight.data += torch.randn(weight.shape, generator=generator) / 4

    def keep(_module: Any, _args: Any, given: dict[str, Any], output: Any) -> None:
        steps.append((given["hidden_states"], given["timestep"], output[0]))

    hook = pipeline.transformer.register_forward_hook(keep, with_kwargs=True)
    pipeline(
        image=[item.frames[0] for item in sample.media],
        prompt=list(PROMPTS),
        height=8 * height,
        width=8 * width,
        num_frames=4 * num_frames - 3,
        num_inference_steps=3,
        generator=generator,
        output_type="latent",
    )
    hook.remove()
    assert len(steps) == 3
    for hidden_states, timestep, output in steps:
        noisy = hidden_states[:, : output.shape[1]].clone()
        if name == FAMILY:
            noisy[:, :, 0] = torch.nan  # the image takes its place
        with torch.no_grad():
            ours = family.predict(pipeline.transformer, noisy, timestep / 1000, sample.conditioning)
        assert (ours - output).abs().max() <= 1e-6 * output.abs().max()


def test_a_negative_prompt_is_read_with_a_black_image(sample: Sample) -> None:
    encode = sample.family.load_prompt_encoder(torch.float32, CPU)
    shown = [Prompt(text="x", images=(mandelbrot(64, 32, quality),)) for quality in (10, 40)]
    black = [replace(prompt, is_negative=True) for prompt in shown]
    first, second, *others = (one["prompt_embeds"] for one in encode([*shown, *black, Prompt(text="x")]))
    assert all(torch.equal(others[0], other) for other in others)
    assert all((first - other).abs().max() > 1e-4 for other in (second, others[0]))


def test_a_caption_is_read_with_what_its_clip_starts_from_and_an_empty_one_once_for_all_clips(
    sample: Sample, tmp_path: Path
) -> None:
    rules = PlanRules(buckets=BucketRule(divisor=16, step=16, sizes=((32, 16),), frame_counts=(5,)))
    clip = [mandelbrot(64, 48, quality) for quality in range(10, 16)]
    write_video(tmp_path / "a.mp4", clip, fps=24)
    clip[0].save(tmp_path / "start.png")
    given = {"source": 0, "target": tmp_path / "a.mp4", "captions": ("a ring", "")}
    records = [Record(name="a", **given), Record(name="b", first_frame=tmp_path / "start.png", **given)]
    with FileMemory(tmp_path / "index.sqlite") as memory:
        plan = plan_items(records, index=MediaIndex(memory), rules=rules)
    assert len(plan.items) == 2
    job = EncodingJob(load_config(f"{FAMILY}_lora.yaml").config, sample.family, CPU, FolderGroup())
    job.add_dataset(plan, has_unconditional=True)
    assert [(one.images, one.has_media) for one in job.prompts.values()] == [
        ((), True),
        ((), False),
        ((), True),
    ]
    first, empty, second = (item.load() for item in job.prompts.values())
    assert empty == Prompt(text="", is_negative=True)
    starts = [media.first_frame or media.frames[0] for media in (item.load() for item in plan.items)]
    shown = [(prompt.text, prompt.images[0].tobytes()) for prompt in (first, second)]
    assert shown == [("a ring", start.tobytes()) for start in starts]
    assert len({pixels for _, pixels in shown}) == 2


@pytest.mark.parametrize("name", RELEASES)
def test_what_is_kept_of_a_clip_next_to_its_latents_is_counted(
    name: str, sample_of: Callable[[str], Sample]
) -> None:
    sample = sample_of(name)
    latents, *others = sample.family.load_media_encoder(torch.float32, CPU)(sample.media[:1])[0].items()
    kept = sum(value.numel() for _, value in others)
    assert (latents[0], kept) == ("latents", sample.family.num_condition_values(latents[1].shape))


def test_a_clip_of_only_the_given_frame_is_refused(sample: Sample) -> None:
    with pytest.raises(UserError, match=r"1 frames; .* of which the first is given, such as 5 or 9"):
        sample.family.check_frames(1, key="data.frame_counts")
