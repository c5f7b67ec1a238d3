"""Preview files and their grid, with a family that generates plain colours."""

import base64
import dataclasses
import io
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import av
import pytest
import torch
from PIL import Image, ImageStat

from diffsynth_lite import __version__
from diffsynth_lite.core.parallel import FailedWithinPassError
from diffsynth_lite.errors import RunStoppedError
from diffsynth_lite.media import frame_strip
from diffsynth_lite.pipelines import PreviewRequest
from diffsynth_lite.pipelines.base.preview_request import in_turn
from diffsynth_lite.progress_log import watched
from diffsynth_lite.training.previews import (
    Previews,
    generation_parameters,
    preview_grid,
)
from diffsynth_lite.training.stopping import PreviewsStoppedError

PROMPTS = ["red", "blue"]


def previews(folder: Path, sample, prompts=PROMPTS, shards=None, **settings) -> Previews:
    requests = [
        PreviewRequest(
            prompt=prompt,
            conditioning={},
            negative={},
            width=64,
            height=32,
            num_inference_steps=2,
            guidance_scale=1.0,
            seed=0,
            fps=8,
        )
        for prompt in prompts
    ]
    return Previews(
        family=SimpleNamespace(
            sample=sample, shards=shards, context=None, parts_of=lambda model: {"transformer": model}
        ),
        folder=folder,
        requests=requests,
        model="tiny",
        sampler="Euler",
        vae_dtype=torch.float32,
        **settings,
    )


def generate_colours(_transformer, _dtype, requests) -> list[list[Image.Image]]:
    torch.rand(1)
    return [[Image.new("RGB", (64, 32), request.prompt)] for request in requests]


def pixel_counts(path: Path) -> dict[tuple[int, int, int], int]:
    with Image.open(path) as image:
        return {colour: count for count, colour in image.convert("RGB").getcolors(1 << 24)}


class Shards:
    """Turns what fails into the error of one process that fails where others wait for it."""

    @contextmanager
    def failing_together(self) -> Iterator[None]:
        try:
            yield
        except ValueError as error:
            raise FailedWithinPassError(str(error)) from error


def test_a_failure_that_other_processes_wait_for_ends_the_run_and_one_process_writes(tmp_path: Path) -> None:
    def fail(*_arguments: object) -> None:
        raise ValueError("of one process")

    with pytest.raises(RunStoppedError, match=r"previews at step 3 failed .*: of one process What helps:"):
        previews(tmp_path, fail, shards=Shards()).generate(torch.nn.Linear(1, 1), 3)
    shown = previews(tmp_path, generate_colours, shards=Shards(), writes=False)
    assert shown.generate(torch.nn.Linear(1, 1), 3) is None
    assert list(tmp_path.iterdir()) == []


def test_the_grid_has_a_row_a_prompt_and_a_column_a_step(tmp_path: Path) -> None:
    shown = previews(tmp_path, generate_colours)
    model = torch.nn.Linear(1, 1)
    one_column = pixel_counts(shown.generate(model, 0))
    two_columns = pixel_counts(shown.generate(model, 100))
    for colour in ((255, 0, 0), (0, 0, 255)):
        assert one_column[colour] == 128 * 64  # small previews are scaled up to be seen
        assert two_columns[colour] == 2 * 128 * 64
    assert list(tmp_path.glob("*.mp4")) == []  # an image has no video
    assert sorted(path.name[:23] for path in tmp_path.iterdir()) == [
        "grid.png",
        *(f"step-{step:08d}-prompt-{place:02d}" for step in (0, 100) for place in (0, 1)),
    ]


def test_steps_generated_before_a_resume_are_in_the_grid_and_incomplete_ones_are_not(tmp_path: Path) -> None:
    model = torch.nn.Linear(1, 1)
    previews(tmp_path, generate_colours).generate(model, 0)
    first = next(tmp_path.glob("step-00000000-prompt-00-*.png"))
    first.with_name(first.name.replace("00000000", "00000050")).write_bytes(b"")  # killed before its second
    (tmp_path / "notes.txt").write_text("mine")
    path = previews(tmp_path, generate_colours).generate(model, 100)
    assert pixel_counts(path)[255, 0, 0] == 2 * 128 * 64


def test_a_long_run_shows_its_first_and_last_step_and_some_between(tmp_path: Path) -> None:
    model = torch.nn.Linear(1, 1)
    shown = previews(tmp_path, generate_colours)
    for step in range(0, 200, 10):
        path = shown.generate(model, step)
    assert pixel_counts(path)[255, 0, 0] == 12 * 128 * 64


def test_a_thumbnail_is_of_the_last_previews_up_to_a_step_and_of_a_clip_its_middle(tmp_path: Path) -> None:
    model, colours = torch.nn.Linear(1, 1), iter(["black", "red", "lime", "blue"])
    shown = previews(tmp_path / "new", lambda *_: [[Image.new("RGB", (512, 64), next(colours))]], ["one"])
    assert shown.thumbnail(0) is None
    for step in (0, 10, 20):
        shown.generate(model, step)
    seen = {step: thumbnail_of(shown, step) for step in (9, 10, 19, 20, 99)}
    assert seen[9] is None  # what the model drew before is not the LoRA's
    assert [seen[step].size for step in (10, 99)] == [(256, 32)] * 2
    assert [dominant(seen[step]) for step in (10, 19, 20, 99)] == [0, 0, 1, 1]

    frames = [Image.new("RGB", (16, 8), name) for name in ("red", "red", "lime", "blue", "blue")]
    clip = previews(tmp_path / "clip", lambda *_: [[*frames]], ["one"])
    clip = dataclasses.replace(clip, requests=[dataclasses.replace(clip.requests[0], num_frames=5)])
    clip.generate(model, 1)
    assert thumbnail_of(clip, 1).size == (16, 8)
    assert dominant(thumbnail_of(clip, 1)) == 1


def test_a_preview_that_was_damaged_is_no_thumbnail_and_stops_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shown = previews(tmp_path, generate_colours)
    shown.generate(torch.nn.Linear(1, 1), 5)
    path = next(tmp_path.glob("step-*-prompt-00-*.png"))
    for content in (b"", path.read_bytes()[:60]):
        path.write_bytes(content)
        assert shown.thumbnail(5) is None
        assert "no thumbnail of step 5" in caplog.text
        caplog.clear()


def thumbnail_of(shown: Previews, step: int) -> Image.Image | None:
    url = shown.thumbnail(step)
    return url and Image.open(io.BytesIO(base64.b64decode(url.removeprefix("data:image/jpeg;base64,"))))


def dominant(picture: Image.Image) -> int:
    """The channel that is strongest."""
    means = ImageStat.Stat(picture).mean
    return means.index(max(means))


@pytest.mark.parametrize("error", [RuntimeError, torch.OutOfMemoryError])
def test_a_failure_is_logged_and_mode_and_random_state_are_as_before(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, error: type[Exception]
) -> None:
    def fail(*_args):
        torch.rand(1)
        raise error("no memory for an image\nmore")

    model = torch.nn.Linear(1, 1).train()
    for sample, expected in ((fail, False), (generate_colours, True)):
        state = torch.get_rng_state()
        assert (previews(tmp_path, sample).generate(model, 3) is not None) is expected
        assert torch.equal(torch.get_rng_state(), state)
        assert model.training
    assert "Previews at step 3 failed" in caplog.text
    assert "no memory for an image" in caplog.text
    for setting in ("validation.width", "memory.stream_blocks: all", "model.vae_tiling: true"):
        assert (setting in caplog.text) is (error is torch.OutOfMemoryError)


def test_a_run_that_is_to_stop_leaves_previews_out_between_two_passes_of_the_model(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model, seen = torch.nn.Linear(1, 1), []

    def generate(model, _dtype, requests):
        for request in in_turn(requests):
            for _ in range(request.num_inference_steps):
                model(torch.ones(1))
        return generate_colours(model, _dtype, requests)

    def watch(*progress: object) -> None:
        seen.append(progress)
        if len(seen) == 6:
            raise PreviewsStoppedError

    shown = previews(tmp_path, generate)
    with watched(watch):
        assert shown.generate(model, 3) is None
    # When it begins, before each of two passes, when one is done, and before the next pass.
    assert seen == [("generating", done, 2) for done in (0, 0, 0, 1, 1, 1)]
    assert "The previews of step 3 are left out" in caplog.text
    assert (list(tmp_path.iterdir()), shown.are_missing(3)) == ([], True)
    assert shown.generate(model, 3) is not None
    assert (len(seen), shown.are_missing(3)) == (6, False)


@pytest.mark.parametrize(
    ("error", "ending"),
    [
        (torch.OutOfMemoryError(), "Previews at step 3 failed, out of memory"),
        (
            FloatingPointError("the decoded image holds NaN or infinity"),
            "training continues: the decoded image holds NaN or infinity",
        ),
    ],
)
def test_an_image_that_is_not_finite_is_logged_in_one_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, error: Exception, ending: str
) -> None:
    def fail(*_args):
        raise error

    assert previews(tmp_path, fail).generate(torch.nn.Linear(1, 1), 3) is None
    (record,) = [record for record in caplog.records if record.levelname == "WARNING"]
    assert ending in record.getMessage()
    assert isinstance(error, torch.OutOfMemoryError) or record.getMessage().endswith(ending)
    assert isinstance(error, torch.OutOfMemoryError) or not record.exc_info


def test_without_prompts_nothing_is_generated(tmp_path: Path) -> None:
    assert (
        previews(tmp_path / "previews", generate_colours, prompts=[]).generate(torch.nn.Linear(1, 1), 0)
        is None
    )
    assert not (tmp_path / "previews").exists()


def test_long_prompts_and_tall_images_fit() -> None:
    tall = Image.new("RGB", (512, 2048), "green")
    grid = preview_grid([[tall, tall]], ["a very long prompt " * 40], ["step 0", "step 1000"])
    assert grid.height < 450
    assert grid.width < 190 + 2 * 110 + 8


def test_a_strip_has_the_first_and_the_last_frame_and_an_image_is_its_own_strip() -> None:
    frames = [Image.new("RGB", (4, 2), (shade, 0, 0)) for shade in range(9)]
    strip = frame_strip(frames)
    assert [strip.getpixel((4 * place, 0))[0] for place in range(5)] == [0, 2, 4, 6, 8]
    assert strip.size == (20, 2)
    assert frame_strip(frames[3:4]).tobytes() == frames[3].tobytes()


def test_a_clip_is_kept_as_a_video_next_to_its_strip_and_the_grid_shows_the_strip(tmp_path: Path) -> None:
    def generate_clips(_transformer, _dtype, requests) -> list[list[Image.Image]]:
        shades = [Image.new("RGB", (64, 32), (shade, 0, 0)) for shade in range(0, 250, 50)]
        return [shades for _ in requests]

    grid = previews(tmp_path, generate_clips).generate(torch.nn.Linear(1, 1), 20)
    clips, strips = (sorted(tmp_path.glob(f"step-*.{suffix}")) for suffix in ("mp4", "png"))
    assert [path.stem for path in clips] == [path.stem for path in strips]
    assert len(clips) == len(PROMPTS)
    with av.open(str(clips[0])) as container:
        stream = container.streams.video[0]
        shades = [frame.to_image().getpixel((32, 16))[0] for frame in container.decode(stream)]
        assert stream.average_rate == 8
        comment = container.metadata["comment"]
    assert shades == pytest.approx(range(0, 250, 50), abs=6)  # compressed
    with Image.open(strips[0]) as strip:
        assert strip.size == (5 * 64, 32)
        assert strip.info["parameters"] == comment
    assert comment.startswith("red <lora:step-00000020:1>\nSteps: 2, Sampler: Euler, CFG scale: 1, Seed: 0, ")
    assert {(0, 0, 0), (200, 0, 0)} <= pixel_counts(grid).keys()


def test_the_metadata_of_an_image_is_read_back_by_the_rules_of_the_program_that_it_is_for() -> None:
    (request,) = previews(Path(), generate_colours, prompts=["red"]).requests
    request = dataclasses.replace(
        request, prompt="ein Hündchen,\n\U0001f436", negative_prompt="blurry", guidance_scale=4.5
    )
    clip = dataclasses.replace(request, num_frames=9, fps=16)
    names = {"model": 'a: "b", c', "sampler": "Euler"}
    text = generation_parameters(clip, [("mine", 0.7), ("other", 1.0)], **names)
    # A last line with three settings or more holds these; what a setting needs quotes for is json.
    *lines, last = text.split("\n")
    assert lines == ["ein Hündchen,", "\U0001f436 <lora:mine:0.7> <lora:other:1>", "Negative prompt: blurry"]
    found = re.findall(r'\s*(\w[\w \-/]+):\s*("(?:\\.|[^\\"])+"|[^,]*)(?:,|$)', last)
    assert {name: json.loads(value) if value[:1] == '"' else value for name, value in found} == {
        "Steps": "2",
        "Sampler": "Euler",
        "CFG scale": "4.5",
        "Seed": "0",
        "Size": "64x32",
        "Model": names["model"],
        "Frames": "9",
        "FPS": "16",
        "Version": f"diffsynth_lite {__version__}",
    }
    unguided = generation_parameters(dataclasses.replace(request, guidance_scale=1.0), [], **names)
    assert "Negative" not in unguided
    assert "FPS" not in unguided


def test_another_input_image_negative_prompt_or_number_of_layers_is_another_preview(tmp_path: Path) -> None:
    shown = previews(tmp_path, generate_colours)

    def marks(**changes: object) -> list[str]:
        requests = [dataclasses.replace(request, **changes) for request in shown.requests]
        return dataclasses.replace(shown, requests=requests).marks

    assert marks() == marks(negative_prompt="blurry")  # the guidance scale is 1, so it steers nothing
    guided, otherwise = marks(guidance_scale=4.0), marks(guidance_scale=4.0, negative_prompt="blurry")
    green, yellow = (marks(inputs=(Image.new("RGB", (8, 8), name),)) for name in ("green", "yellow"))
    layers = marks(num_layers=2)
    assert len({*marks(), *guided, *otherwise, *green, *yellow, *layers}) == 6 * len(PROMPTS)


def test_layers_are_kept_as_images_with_transparency_and_the_grid_shows_them_over_a_board(
    tmp_path: Path,
) -> None:
    def generate_layers(_transformer, _dtype, requests) -> list[list[Image.Image]]:
        return [
            [Image.new("RGBA", (64, 32), (0, 0, shade, 255 * (shade > 0))) for shade in range(0, 240, 40)]
            for _ in requests
        ]

    layered = previews(tmp_path, generate_layers, prompts=["red"])
    taken_apart = [dataclasses.replace(request, num_layers=6) for request in layered.requests]
    layered = dataclasses.replace(layered, requests=taken_apart)
    layered.generate(torch.nn.Linear(1, 1), 20)
    [strip] = tmp_path.glob("step-*.png")
    files = sorted(strip.with_suffix("").iterdir())
    assert [file.name for file in files] == [f"layer-{place}.png" for place in range(1, 7)]
    for place, file in enumerate(files):
        with Image.open(file) as layer:
            assert (layer.mode, layer.size) == ("RGBA", (64, 32))
            assert layer.getpixel((0, 0)) == (0, 0, 40 * place, 255 * (place > 0))
            assert "Layers: 6" in layer.info["parameters"]
    with Image.open(strip) as shown:
        assert shown.size == (6 * 64, 32)  # all of them
        empty, middle = (shown.crop((left, 0, left + 64, 32)) for left in (0, 3 * 64))
        assert sorted(empty.getcolors()) == [(1024, (204, 204, 204)), (1024, (255, 255, 255))]
        assert empty.getpixel((0, 0)) != empty.getpixel((8, 0)) == empty.getpixel((0, 8))
        thumbnail = thumbnail_of(layered, 20)
        assert thumbnail is not None
        assert abs(thumbnail.getpixel((9, 9))[2] - middle.getpixel((9, 9))[2]) < 6
