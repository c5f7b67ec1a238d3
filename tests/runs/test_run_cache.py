"""Whole runs and their cache: killed while it is filled, used again without the media, and sealed."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from accelerate.state import AcceleratorState
from processes import wait_for
from safetensors.torch import load_file
from tiny_run import (
    REPOSITORY,
    TinyRun,
    checkpoint_tensors,
    differing,
    forked,
    garble_media,
    make_mixed_run,
    tiny_image,
)

from diffsynth_lite.cli.continuation import continuation
from diffsynth_lite.cli.main import main
from diffsynth_lite.run_folder.folder import RunFolder

NUM_IMAGES = 200
LORA = "lora/pytorch_lora_weights.safetensors"


def entries(run: TinyRun) -> dict[Path, int]:
    """The entries of the cache with their times of change."""
    return {path: path.stat().st_mtime_ns for path in (run.root / "cache").rglob("*.safetensors")}


def test_a_caching_pass_that_was_killed_goes_on_where_it_was(
    tiny_run: TinyRun, caplog: pytest.LogCaptureFixture
) -> None:
    for place in range(5, NUM_IMAGES):
        tiny_image(64, 40, 10 + place).save(tiny_run.root / "data" / f"{place}.png")
        (tiny_run.root / "data" / f"{place}.txt").write_text("a red circle")
    program = forked(tiny_run, "train.steps=1", "--resume=none")
    wait_for(lambda: len(entries(tiny_run)) >= 5)
    program.kill()
    kept = entries(tiny_run)
    assert 5 <= len(kept) < NUM_IMAGES
    assert RunFolder(tiny_run.folder).is_abandoned()

    found = continuation(tiny_run.folder)
    assert found.working_folder == REPOSITORY
    assert main(["train", *found.arguments]) == 0
    assert f"encoding {NUM_IMAGES - len(kept)} items that the cache does not hold" in caplog.text
    filled = entries(tiny_run)
    assert {path: filled[path] for path in kept} == kept

    caplog.clear()
    assert tiny_run.train("train.steps=1", f"output.dir={tiny_run.root / 'again'}") == 0
    assert "that the cache does not hold" not in caplog.text
    assert entries(tiny_run) == filled
    loras = [load_file(path / LORA) for path in (tiny_run.folder, tiny_run.root / "again")]
    assert differing(*loras) == []


def test_a_second_start_on_cached_images_reads_none_of_them(tiny_run: TinyRun) -> None:
    assert tiny_run.train("train.steps=2") == 0
    garble_media(tiny_run.root / "data")
    again = tiny_run.root / "again"
    assert tiny_run.train("train.steps=2", f"output.dir={again}") == 0
    assert differing(checkpoint_tensors(tiny_run.folder, 2), checkpoint_tensors(again, 2)) == []


WATCHED = ("validation.prompts=[a red circle]", "validation.loss_items=2", "validation.item_losses=2")


def cache(run: TinyRun, task: str, *overrides: str) -> int:
    code = main(["cache", task, *run.arguments, *overrides])
    AcceleratorState._reset_state(reset_partial_state=True)
    return code


def train(run: TinyRun, *overrides: str, steps: int | None = None) -> int:
    code = run.stopped_after(steps, *overrides) if steps else run.train(*overrides)
    AcceleratorState._reset_state(reset_partial_state=True)
    return code


def losses(run: TinyRun, folder: Path) -> list[tuple[int, float]]:
    return [(row["step"], row["loss"]) for row in run.metrics(folder) if "loss" in row]


def cache_entries(run: TinyRun) -> set[str]:
    return {path.stem for path in (run.root / "cache").rglob("*.safetensors")}


@pytest.fixture
def mixed_sealed_run(tmp_path: Path, tiny_model: Path) -> TinyRun:
    """Three sources, masks, tags, dropped captions, held-out items; all that is only watched is, too."""
    run = make_mixed_run(tmp_path, tiny_model)
    held_out = tmp_path / "held out"
    shutil.copytree(tmp_path / "drawings", held_out)
    settings = (
        *run.settings,
        *WATCHED,
        "train.steps=4",
        f"validation.data={held_out}",
        "data.on_bad_item=skip",
    )
    return replace(run, settings=settings)


def test_a_run_goes_on_from_the_seal_and_back_bit_for_bit_without_media_and_entries(
    mixed_sealed_run: TinyRun, caplog: pytest.LogCaptureFixture
) -> None:
    run = mixed_sealed_run
    (run.root / "photos" / "torn.png").write_bytes((run.root / "photos" / "0.png").read_bytes()[:-60])
    (run.root / "photos" / "torn.txt").write_text("a red circle")
    assert train(run) == 0
    sealed = f"data.sealed={run.root / 'sealed'}"
    caplog.set_level("INFO")
    assert cache(run, "seal", sealed) == 0
    assert "sealed in" in caplog.text
    assert "48 items and 70 entries" in caplog.text

    again = f"output.dir={run.root / 'again'}"
    assert train(run, again, sealed, steps=1) == 75
    assert train(run, again, steps=1) == 75
    for source in ("photos", "drawings", "masked", "masks", "held out"):
        shutil.rmtree(run.root / source)
    assert cache(run, "prune", "--yes", sealed) == 0
    assert not cache_entries(run)
    assert train(run, again, sealed) == 0
    assert not cache_entries(run)

    first, second = checkpoint_tensors(run.folder, 4), checkpoint_tensors(run.root / "again", 4)
    assert differing(first, second) == []
    for name in ("items.jsonl", "item_losses.jsonl"):
        assert run.metrics(run.root / "again", name=name) == run.metrics(name=name)
    assert losses(run, run.root / "again") == losses(run, run.folder)
    previews = [sorted((folder / "previews").glob("*.png")) for folder in (run.folder, run.root / "again")]
    assert [path.name for path in previews[0]] == [path.name for path in previews[1]]
    assert [path.read_bytes() for path in previews[0]] == [path.read_bytes() for path in previews[1]]


def test_a_seal_is_compared_with_data_and_settings_and_says_what_is_wrong(
    tiny_run: TinyRun, caplog: pytest.LogCaptureFixture
) -> None:
    run = tiny_run
    sealed = f"data.sealed={run.root / 'sealed'}"
    caplog.set_level("INFO")

    def refused(*arguments: str, task: str = "seal") -> str:
        caplog.clear()
        assert (train(run, *arguments) if task == "train" else cache(run, task, *arguments)) == 2
        return caplog.text

    assert "data.sealed: is not set in" in refused()
    assert "lacks items; fill the cache with `diffsynth-lite cache fill`" in refused(sealed)
    assert not (run.root / "sealed").exists()
    assert "holds no sealed cache; `diffsynth-lite cache seal`" in refused(sealed, task="train")
    assert "has no effect with data.cache: false" in refused(sealed, "data.cache=false", task="train")
    assert cache(run, "fill", sealed) == 0
    assert "and is not a sealed cache; name an empty or a new folder" in refused(
        f"data.sealed={run.root / 'data'}"
    )
    assert cache(run, "seal", sealed) == 0
    caplog.clear()
    assert cache(run, "seal", sealed, "train.seed=3") == 0
    assert "holds just these data already; nothing was written" in caplog.text

    other = refused(sealed, "data.width=48", "data.caption_dropout=0.1", task="train")
    assert (
        "was sealed with other settings: data.width was 64, is 48; data.caption_dropout above 0 was" in other
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("diffsynth_lite.pipelines.qwen_image.QwenImage.prompt_encoder_id", lambda *_: "new 2")
        assert "another model.path: the text encoder is new" in refused(sealed, task="train")
    (run.root / "data" / "0.txt").write_text("a red circle on a white background")
    assert "the data are not those that" in (changed := refused(sealed))
    assert "captions of data; name another folder" in changed
    (run.root / "data" / "0.txt").write_text("never seen before")
    assert "lacks captions" in refused(sealed)
    assert train(run, sealed, "train.steps=1") == 0  # it does not look at the data

    caplog.clear()
    assert cache(run, "verify", sealed) == 0
    assert "its table and 7 entries are whole" in caplog.text
    [shard] = (run.root / "sealed").rglob("data/*.lance")
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)
    assert f"in data/{shard.name}: its hash does not match" in refused(sealed, task="verify")
    caplog.clear()
    assert train(run, sealed, f"output.dir={run.root / 'damaged'}") == 3
    assert (
        f"in data/{shard.name} is damaged: its hash does not match; `diffsynth-lite cache verify`"
        in caplog.text
    )
    assert cache(run, "verify", f"data.sealed={run.root / 'none'}") == 0
