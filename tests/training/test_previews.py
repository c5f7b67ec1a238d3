"""Preview files and their grid, with a family that draws plain colours."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from PIL import Image

from diffsynth_lite.training.grid import frame_strip, preview_grid
from diffsynth_lite.training.previews import Previews

PROMPTS = ["red", "blue"]


def previews(folder: Path, sample, prompts=PROMPTS) -> Previews:
    requests = [
        SimpleNamespace(prompt=prompt, width=64, height=32, seed=0, num_inference_steps=2, guidance_scale=1.0)
        for prompt in prompts
    ]
    family = SimpleNamespace(sample=sample)
    return Previews(family=family, folder=folder, prompts=prompts, requests=requests, vae_dtype=torch.float32)


def draw_colours(_transformer, _dtype, requests) -> list[list[Image.Image]]:
    torch.rand(1)
    return [[Image.new("RGB", (64, 32), request.prompt)] for request in requests]


def pixel_counts(path: Path) -> dict[tuple[int, int, int], int]:
    with Image.open(path) as image:
        return {colour: count for count, colour in image.convert("RGB").getcolors(1 << 24)}


def test_the_grid_has_a_row_a_prompt_and_a_column_a_step(tmp_path: Path) -> None:
    drawn = previews(tmp_path, draw_colours)
    model = torch.nn.Linear(1, 1)
    one_column = pixel_counts(drawn.draw(model, 0))
    two_columns = pixel_counts(drawn.draw(model, 100))
    for colour in ((255, 0, 0), (0, 0, 255)):
        assert one_column[colour] == 128 * 64  # small previews are scaled up to be seen
        assert two_columns[colour] == 2 * 128 * 64
    assert sorted(path.name[:23] for path in tmp_path.iterdir()) == [
        "grid.png",
        *(f"step-{step:08d}-prompt-{place:02d}" for step in (0, 100) for place in (0, 1)),
    ]


def test_steps_drawn_before_a_resume_are_in_the_grid_and_incomplete_ones_are_not(tmp_path: Path) -> None:
    model = torch.nn.Linear(1, 1)
    previews(tmp_path, draw_colours).draw(model, 0)
    first = next(tmp_path.glob("step-00000000-prompt-00-*.png"))
    first.with_name(first.name.replace("00000000", "00000050")).write_bytes(b"")  # killed before its second
    (tmp_path / "notes.txt").write_text("mine")
    path = previews(tmp_path, draw_colours).draw(model, 100)
    assert pixel_counts(path)[255, 0, 0] == 2 * 128 * 64


def test_a_long_run_shows_its_first_and_last_step_and_some_between(tmp_path: Path) -> None:
    model = torch.nn.Linear(1, 1)
    drawn = previews(tmp_path, draw_colours)
    for step in range(0, 200, 10):
        path = drawn.draw(model, step)
    assert pixel_counts(path)[255, 0, 0] == 12 * 128 * 64


def test_a_failure_is_logged_and_mode_and_random_state_are_as_before(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_args):
        torch.rand(1)
        raise torch.OutOfMemoryError("no memory for a picture")

    model = torch.nn.Linear(1, 1).train()
    for sample, expected in ((fail, False), (draw_colours, True)):
        state = torch.get_rng_state()
        assert (previews(tmp_path, sample).draw(model, 3) is not None) is expected
        assert torch.equal(torch.get_rng_state(), state)
        assert model.training
    assert "Previews at step 3 failed" in caplog.text
    assert "no memory for a picture" in caplog.text


def test_without_prompts_nothing_is_drawn(tmp_path: Path) -> None:
    assert previews(tmp_path / "previews", draw_colours, prompts=[]).draw(torch.nn.Linear(1, 1), 0) is None
    assert not (tmp_path / "previews").exists()


def test_long_prompts_and_tall_pictures_fit() -> None:
    tall = Image.new("RGB", (512, 2048), "green")
    grid = preview_grid([[tall, tall]], ["a very long prompt " * 40], [0, 1000])
    assert grid.height < 450
    assert grid.width < 190 + 2 * 110 + 8


def test_a_strip_has_the_first_and_the_last_frame_and_a_picture_is_its_own_strip() -> None:
    frames = [Image.new("RGB", (4, 2), (shade, 0, 0)) for shade in range(9)]
    strip = frame_strip(frames)
    assert [strip.getpixel((4 * place, 0))[0] for place in range(5)] == [0, 2, 4, 6, 8]
    assert strip.size == (20, 2)
    assert frame_strip(frames[3:4]).tobytes() == frames[3].tobytes()
