"""What is measured between steps: losses on fixed noise, of all items and of single ones, and updates."""

import base64
import contextlib
import dataclasses
import io
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator
from PIL import Image

from diffsynth_lite.core.evaluation_mode import evaluation_mode
from diffsynth_lite.core.noise.losses import SampleLosses
from diffsynth_lite.core.randomness import normal
from diffsynth_lite.data.batches import Batch
from diffsynth_lite.data.buckets import Bucket
from diffsynth_lite.data.item_table import ItemRow
from diffsynth_lite.errors import UserError
from diffsynth_lite.lora import UpdateSize
from diffsynth_lite.run_folder.folder import RunFolder
from diffsynth_lite.run_folder.metrics import MetricsFile, read_items
from diffsynth_lite.training.evaluation import (
    FixedNoiseErrors,
    FixedNoiseLoss,
    ItemLosses,
    LayerUpdates,
    MeasuredLoss,
    SampleLossLog,
    TrackedItem,
    ValidationItem,
    thumbnail_of,
)
from diffsynth_lite.training.objective import DenoisingObjective, SampleErrors

SMALL, LARGE = Bucket(width=24, height=16), Bucket(width=40, height=16)


class Recorder:
    """Stands in for the objective: remembers what it is asked for; an item's error is its noise level."""

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self.noise_levels, self.own_audio_levels = SimpleNamespace(quantile=lambda part: part), False
        self.noise: list[torch.Tensor] = []
        self.sigma: list[float] = []
        self.batches: list[object] = []
        self.scale = 1.0

    def errors(self, model: torch.nn.Module, batch: Batch, sigma: torch.Tensor, **_: object) -> SampleErrors:
        assert not model.training
        assert not torch.is_grad_enabled()
        assert len(batch.latents) == len(batch.noise) == len(sigma) == len(batch.conditioning)
        mask = None if batch.loss_mask is None else tuple(batch.loss_mask.shape)
        self.batches.append((tuple(batch.latents.shape), mask))
        self.noise.extend(batch.noise)
        self.sigma.extend(sigma.tolist())
        return SampleErrors(total=sigma * self.scale, video=sigma * self.scale)


def fixed_noise_loss(num_items: int, batch_size: int) -> tuple[FixedNoiseLoss, Recorder]:
    recorder = Recorder()
    items = [
        ValidationItem(bucket=SMALL, latents=torch.zeros(2, 3), conditioning={}) for _ in range(num_items)
    ]
    return loss_of(items, recorder, batch_size), recorder


def loss_of(items: list[ValidationItem], recorder: Recorder, batch_size: int) -> FixedNoiseLoss:
    errors = FixedNoiseErrors(objective=recorder, seed=0, purpose="validation-noise", batch_size=batch_size)
    return FixedNoiseLoss(name="loss", items=items, errors=errors)


def test_the_levels_cover_the_path_evenly_and_each_item_has_its_noise_whatever_the_batch_size() -> None:
    noise = []
    for batch_size in (1, 3, 8):
        loss, recorder = fixed_noise_loss(4, batch_size)
        assert loss.measure(torch.nn.Identity()) == MeasuredLoss(
            values={"loss": pytest.approx(0.5)}, by_item=pytest.approx([0.125, 0.375, 0.625, 0.875])
        )
        assert recorder.sigma == pytest.approx([0.125, 0.375, 0.625, 0.875])
        noise.append(torch.stack(recorder.noise))
    assert torch.equal(noise[0], noise[1])
    assert torch.equal(noise[0], noise[2])
    assert not torch.equal(noise[0][0], noise[0][1])
    assert fixed_noise_loss(0, 1)[0].measure(torch.nn.Identity()) == MeasuredLoss()


def test_items_of_another_size_or_with_a_mask_are_measured_in_batches_of_their_own() -> None:
    recorder = Recorder()
    small = ValidationItem(bucket=SMALL, latents=torch.zeros(2, 3), conditioning={})
    large = ValidationItem(bucket=LARGE, latents=torch.zeros(2, 5), conditioning={})
    masked = dataclasses.replace(large, loss_mask=torch.ones(1, 5))
    elsewhere = dataclasses.replace(masked, loss_mask=torch.ones(1, 1))
    items = [small, small, large, masked, masked, masked, elsewhere, small]
    loss = loss_of(items, recorder, batch_size=2)
    assert loss.measure(torch.nn.Identity()).values == {"loss": pytest.approx(0.5)}
    assert recorder.batches == [
        ((2, 2, 3), None),
        ((1, 2, 5), None),
        ((2, 2, 5), (2, 1, 5)),
        ((1, 2, 5), (1, 1, 5)),
        ((1, 2, 5), (1, 1, 1)),
        ((1, 2, 3), None),
    ]


def test_items_that_start_from_images_of_another_size_are_measured_in_batches_of_their_own() -> None:
    recorder = Recorder()
    items = [
        ValidationItem(
            bucket=dataclasses.replace(SMALL, inputs=inputs), latents=torch.zeros(2, 3), conditioning={}
        )
        for inputs in (((32, 64),), ((64, 32),), ((64, 32),))
    ]
    loss_of(items, recorder, batch_size=4).measure(torch.nn.Identity())
    assert [latents for latents, _ in recorder.batches] == [(1, 2, 3), (2, 2, 3)]


def test_the_training_mode_comes_back_also_after_an_error() -> None:
    model = torch.nn.Dropout()
    for training in (True, False):
        model.train(training)
        modes = []
        with contextlib.suppress(KeyError), evaluation_mode(model):
            modes.append(model.training)
            raise KeyError
        assert modes == [False]
        assert model.training is training
    assert torch.is_grad_enabled()


def test_the_stand_in_has_the_objectives_interface() -> None:
    assert {"device", "errors", "noise_levels"} <= {
        *DenoisingObjective.__dataclass_fields__,
        *vars(DenoisingObjective),
    }


def tracked(position: int, *, bucket: Bucket = SMALL) -> TrackedItem:
    """An item of two colours; that at position 9 has lost its file."""

    def few_frames(count: int) -> list[Image.Image]:
        if position == 9:
            raise UserError("9.png: gone")
        return [Image.new("RGB", (600, 300), colour) for colour in ("red", "blue")[:count]]

    item = SimpleNamespace(name=f"{position}.png", few_frames=few_frames)
    keys = {"media_key": f"{position:064x}", "caption_keys": (f"{position + 1:064x}",)}
    return TrackedItem(
        position=position,
        row=ItemRow(name=f"{position}.png", bucket=bucket, source=0, **keys),
        caption="a cat",
        read=lambda: ValidationItem(bucket=bucket, latents=torch.zeros(2, 3), conditioning={}),
        thumbnail=partial(thumbnail_of, item),
    )


def item_losses(
    folder: Path, *items: TrackedItem, seed: int = 0, is_average: bool = False, batch_size: int = 2
) -> tuple[ItemLosses, Recorder]:
    recorder = Recorder()
    errors = FixedNoiseErrors(objective=recorder, seed=seed, purpose="item-noise", batch_size=batch_size)
    return ItemLosses(items, errors, is_average=is_average, folder=RunFolder(folder)), recorder


def rows(folder: Path) -> list[dict[str, object]]:
    found = MetricsFile(RunFolder(folder).item_losses_file).rows()
    return [{name: value for name, value in row.items() if name != "time"} for row in found]


def test_each_item_is_measured_at_the_same_levels_with_noise_of_its_place_in_the_data(tmp_path: Path) -> None:
    items = tracked(0), tracked(4), tracked(7, bucket=LARGE)
    losses, recorder = item_losses(tmp_path, *items)
    losses.record(torch.nn.Identity(), 0)
    losses.record(torch.nn.Identity(), 5)
    levels = [1 / 6, 1 / 2, 5 / 6]
    assert recorder.sigma == pytest.approx([level for level in levels for _ in items] * 2)
    assert recorder.batches == [((2, 2, 3), None), ((1, 2, 3), None)] * 6
    expected = [
        normal(0, "item-noise", 3 * place + level, (2, 3)) for level in range(3) for place in (0, 4, 7)
    ]
    assert all(map(torch.equal, recorder.noise, [*expected, *expected]))
    assert rows(tmp_path) == [
        {"step": step, "losses": [pytest.approx(0.5)] * 3, "by_level": [pytest.approx(levels)] * 3}
        for step in (0, 5)
    ]


def test_what_is_measured_is_described_with_a_small_image(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    item_losses(tmp_path, tracked(0), tracked(9, bucket=LARGE))[0].record(torch.nn.Identity(), 0)
    first, second = read_items(RunFolder(tmp_path).items_file)
    assert (first.name, first.caption, first.size) == ("0.png", "a cat", "24x16")
    assert first.noise_levels == pytest.approx([1 / 6, 1 / 2, 5 / 6])
    assert (second.name, second.size, second.thumbnail) == ("9.png", "40x16", None)
    assert "No thumbnail of 9.png: 9.png: gone" in caplog.text
    assert first.thumbnail is not None
    kind, content = first.thumbnail.split(",")
    assert kind == "data:image/jpeg;base64"
    with Image.open(io.BytesIO(base64.b64decode(content))) as strip:
        assert strip.size == (256, 64)  # two frames side by side
        red, blue = strip.getpixel((30, 30)), strip.getpixel((226, 30))
    assert (red[0] > 200, red[2] < 50, blue[0] < 50, blue[2] > 200) == (True,) * 4


def test_a_resumed_run_goes_on_with_its_losses_and_makes_no_image_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    item_losses(tmp_path, tracked(0), tracked(1))[0].record(torch.nn.Identity(), 0)
    described = RunFolder(tmp_path).items_file.read_bytes()
    monkeypatch.setattr(f"{thumbnail_of.__module__}.frame_strip", lambda _: pytest.fail("made again"))
    losses, recorder = item_losses(tmp_path, tracked(0), tracked(1))
    recorder.scale = 2.0
    losses.record(torch.nn.Identity(), 3)
    assert [row["step"] for row in rows(tmp_path)] == [0, 3]
    assert RunFolder(tmp_path).items_file.read_bytes() == described
    message = (
        "After step 3: loss of 2 single items: median 1.0000, highest 0.png (1.0000); "
        "1.png (1.0000); above those of step 0: 2."
    )
    assert message in caplog.text


def test_losses_that_do_not_compare_are_never_in_one_file(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    changes: list[tuple[tuple[TrackedItem, ...], Mapping[str, object]]] = [
        ((tracked(0), tracked(1)), {}),
        ((tracked(0), tracked(2)), {}),
        ((tracked(0),), {}),
        ((tracked(0),), {"seed": 1}),
        ((tracked(0),), {"seed": 1, "is_average": True}),
    ]
    for step, (items, settings) in enumerate(changes):
        item_losses(tmp_path, *items, **settings)[0].record(torch.nn.Identity(), step)
        assert [row["step"] for row in rows(tmp_path)] == [step]
    assert caplog.text.count("are measured again from here on") == len(changes) - 1
    assert "measured from step 4 on: the start is not known" in caplog.text


def test_no_items_leave_no_file(tmp_path: Path) -> None:
    item_losses(tmp_path)[0].record(torch.nn.Identity(), 0)
    assert list(tmp_path.iterdir()) == []


def updates_of(path: Path, *ratios: float) -> LayerUpdates:
    """Those of a run of six steps, whose layers' updates are so large at each measurement."""
    found = iter([{"first": UpdateSize(ratio, 64), "second": UpdateSize(ratio / 2, 64)} for ratio in ratios])
    sizes = SimpleNamespace(measure=lambda: next(found))
    return LayerUpdates(sizes, MetricsFile(path / "layers.jsonl"), last_step=6)


def test_updates_are_written_once_a_step_and_logged_at_the_end(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    updates = updates_of(tmp_path, 0.0, 0.5)
    updates.record(2, num_skipped=0)
    assert caplog.text == ""
    updates.record(6, num_skipped=5)
    updates.record(6, num_skipped=5)
    found = MetricsFile(tmp_path / "layers.jsonl").rows()
    assert [(row["step"], row["updates"]) for row in found] == [
        (2, {"first": 0.0, "second": 0.0}),
        (6, {"first": 0.5, "second": 0.25}),
    ]
    assert "over 2 layers: median 0.5" in caplog.text
    assert "practically nothing" not in caplog.text


@pytest.mark.parametrize(("ratio", "num_skipped"), [(0.0, 0), (1e-4, 0), (0.0, 6)])
def test_a_lora_that_changes_nothing_is_warned_of_where_a_step_was_taken(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, ratio: float, num_skipped: int
) -> None:
    caplog.set_level("INFO")
    updates_of(tmp_path, ratio).record(6, num_skipped=num_skipped)
    assert [row["step"] for row in MetricsFile(tmp_path / "layers.jsonl").rows()] == [6]
    assert ("The LoRA changes practically nothing" in caplog.text) == (num_skipped == 0)
    assert bool(caplog.text) == (num_skipped == 0)


def add(losses: SampleLosses, *positions: int, loss: float = 0.5) -> None:
    names = [f"item {position % 3}" for position in positions]
    number = len(positions)
    losses.add(names, positions, torch.linspace(0.1, 0.9, number), torch.full((number,), loss))


def test_samples_are_written_by_item_after_logged_steps_and_when_asked(tmp_path: Path) -> None:
    losses, file = SampleLosses(), MetricsFile(tmp_path / "losses.jsonl")
    log = SampleLossLog(losses=losses, file=file, accelerator=Accelerator(cpu=True), every_steps=10)
    add(losses, 0, 1, 3, loss=0.123456)
    log.after_step(10)
    add(losses, 4, loss=float("nan"))
    log.after_step(11)
    log.write(12)  # as before a checkpoint, so that a run that continues from there has lost none
    log.write(12)
    rows = [(row["step"], row["samples"]) for row in file.rows()]
    samples = {"item 0": [[0.1, 0.1235], [0.9, 0.1235]], "item 1": [[0.5, 0.1235]]}
    assert rows == [(10, samples), (12, {"item 1": [[0.1, None]]})]


def test_of_a_long_run_a_share_is_kept_that_only_the_seed_and_the_positions_decide() -> None:
    def kept(*micro_batches: range, seed: int = 0) -> list[str]:
        losses = SampleLosses.of_run(seed=seed, num_samples=800_000)
        for positions in micro_batches:
            add(losses, *positions)
        return [name for name, *_ in losses.take()]

    assert SampleLosses.of_run(seed=0, num_samples=1000).share == 1
    whole = kept(range(400))
    assert 60 < len(whole) < 140  # a quarter
    assert kept(range(100), range(100, 400)) == whole
    assert kept(range(400), seed=1) != whole
    assert len(kept(*[range(400)] * 40)) <= 26 * len(whole)  # no more than 10,000 wait to be written
