"""Runs on other targets: guided ones of distilled models, a frozen adapter, items that are preserved."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from tiny_run import UNWATCHED, TinyRun, checkpoint_tensors, differing, lora_metadata_of

from diffsynth_lite.cli.main import main
from diffsynth_lite.pipelines.qwen_image import tiny

SAVING_MEMORY = (
    *("--use_gradient_checkpointing_offload", "memory.stream_blocks=all", "memory.stream_slots=1"),
    "memory.save_attention=park",
)
DRAWN = ("validation.prompts=[a red circle]", "validation.num_inference_steps=2", "validation.item_losses=0")


def losses(run: TinyRun, folder: Path) -> list[dict[str, float]]:
    names = ("loss", "preservation_loss", "train_fixed_noise_loss")
    return [{name: row[name]} for row in run.metrics(folder) for name in names if name in row]


def entries(run: TinyRun) -> set[str]:
    return {path.stem for path in (run.root / "cache").rglob("*.safetensors")}


def previews(folder: Path, step: int) -> list[bytes]:
    return [path.read_bytes() for path in sorted((folder / "previews").glob(f"step-{step:08d}-*.png"))]


def test_a_guided_run_with_an_adapter_goes_on_exactly_and_saves_memory_exactly(
    tiny_run: TinyRun, foreign_lora: Path, caplog: pytest.LogCaptureFixture
) -> None:
    learned, preserved = (f"path: {tiny_run.root / 'data'}{more}" for more in ("", ", preserve: true"))
    given = (
        *("objective.guidance_target=3", f"model.training_adapter={foreign_lora}", "train.steps=2"),
        *("model.quantize=int8", "data.path=null", f"data.sources=[{{{learned}}}, {{{preserved}}}]"),
        *(*UNWATCHED, "validation.loss_items=2", "lora.target_modules=[to_q, img_mlp.net.2]"),
    )
    whole, parts = tiny_run.root / "whole", tiny_run.root / "parts"
    assert tiny_run.train(f"output.dir={whole}", *given) == 0
    assert tiny_run.stopped_after(1, f"output.dir={parts}", *given, *SAVING_MEMORY) == 75
    assert tiny_run.train(f"output.dir={parts}", *given, *SAVING_MEMORY) == 0
    assert differing(checkpoint_tensors(whole, 2), checkpoint_tensors(parts, 2)) == []
    assert losses(tiny_run, whole) == losses(tiny_run, parts)
    # What is preserved is the model with the frozen adapter, unguided: nothing is lost of it at the start.
    assert (
        next(row["preservation_loss"] for row in losses(tiny_run, whole) if "preservation_loss" in row) < 1e-9
    )
    more = (f"output.dir={parts}", "train.steps=3")
    assert tiny_run.train(*more, *given[3:], f"model.training_adapter={foreign_lora}") == 2
    assert "objective.guidance_target was 3.0, is None" in caplog.text
    assert tiny_run.train(*more, *given[3:], "objective.guidance_target=3") == 2
    assert "model.training_adapter.weights was" in caplog.text


def test_previews_samples_and_files_lack_the_training_adapter_and_losses_have_it(
    tiny_run: TinyRun, foreign_lora: Path
) -> None:
    given = ("lora.target_modules=[to_q, img_mlp.net.2]", "train.steps=1", "lora.dropout=0", *DRAWN)
    plain, run = tiny_run.root / "plain", tiny_run.root / "with"
    assert tiny_run.train(f"output.dir={plain}", *given) == 0
    assert tiny_run.train(f"output.dir={run}", *given, f"model.training_adapter={foreign_lora}") == 0
    # Nothing is trained yet.
    assert previews(plain, 0) == previews(run, 0)
    assert all(
        one != other for one, other in zip(losses(tiny_run, plain), losses(tiny_run, run), strict=True)
    )
    assert previews(plain, 1) != previews(run, 1)
    layers = [
        {name.rpartition(".lora_")[0] for name in load_file(file)}
        for folder in (plain, run)
        for file in (folder / "lora").glob("*.safetensors")
    ]
    assert layers[0] == layers[1]
    out = tiny_run.root / "drawn"
    assert main(["sample", "--lora", str(run), "--out", str(out), "--scale", "1"]) == 0
    [drawn], [preview] = out.glob("prompt-00-*.png"), (run / "previews").glob("step-00000001-*.png")
    assert Image.open(drawn).tobytes() == Image.open(preview).tobytes()


def test_an_adapter_that_is_not_there_or_of_other_layers_is_refused_before_weights_load(
    tiny_run: TinyRun, foreign_lora: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert tiny_run.train("model.training_adapter=nowhere.safetensors") == 2
    assert "model.training_adapter: there is no nowhere.safetensors" in caplog.text
    tensors = {name: tensor[..., :5] for name, tensor in load_file(foreign_lora).items() if "down" in name}
    tensors |= {name.replace("down", "up"): torch.ones(7, 2) for name in tensors}
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, foreign_lora)
    assert tiny_run.train(f"model.training_adapter={foreign_lora}") == 2
    assert "model.training_adapter: " in caplog.text.splitlines()[-1]
    assert "Loading" not in caplog.text


@pytest.fixture(scope="module")
def distilled_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Another transformer of the same layout, with a VAE and a text encoder of its own."""
    pipeline = tiny()
    for component in (pipeline.transformer, pipeline.text_encoder, pipeline.vae):
        for weight in component.parameters():
            weight.data.mul_(1.03)
    folder = tmp_path_factory.mktemp("distilled")
    pipeline.save_pretrained(folder)
    return folder


def test_previews_are_drawn_on_another_model_as_samples_on_it_are_and_training_is_the_same(
    tiny_run: TinyRun, distilled_model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    given = ("train.steps=2", *DRAWN, "validation.loss_items=2", "train.ema_decay=0.5")
    groups = "lora.groups=[{match: transformer_blocks.0, rank: 2, alpha: 1}]"
    drawn_on = f"validation.model_path={distilled_model}"
    plain, run, out = (tiny_run.root / name for name in ("plain", "run", "out"))
    assert tiny_run.train(f"output.dir={plain}", *given, groups) == 0
    for task in (["fill", "--part", "0/2"], ["fill", "--part", "1/2"], ["prune", "--yes"]):
        assert main(["cache", *task, "--config", str(tiny_run.config), *given, groups, drawn_on]) == 0
    filled = entries(tiny_run)
    assert tiny_run.stopped_after(1, f"output.dir={run}", *given, groups, drawn_on, *SAVING_MEMORY) == 75
    assert entries(tiny_run) == filled  # the prompts of the other model, too
    assert tiny_run.train(f"output.dir={run}", *given, groups, drawn_on) == 0
    assert differing(checkpoint_tensors(plain, 2), checkpoint_tensors(run, 2)) == []
    assert losses(tiny_run, plain) == losses(tiny_run, run)
    lora, scales = str(run / "lora_ema"), "0,1"
    base = f"model.path={distilled_model}"
    assert main(["sample", "--lora", lora, "--out", str(out), "--scale", scales, base]) == 0
    for scale, step in ((0, 0), (1, 2)):
        [sample] = out.glob(f"prompt-00-*-scale-{scale}.png")
        [preview] = (run / "previews").glob(f"step-{step:08d}-*.png")
        assert Image.open(sample).tobytes() == Image.open(preview).tobytes()
        assert f"Model: {distilled_model.name}," in Image.open(preview).text["parameters"]
    assert f"a red circle (generated on {distilled_model.name})" in (run / "report.html").read_text()
    card = (run / "lora" / "README.md").read_text()
    assert f"Samples were generated on {distilled_model.name}, which it was not trained on." in card
    # Changed for a run that continues: files of their own, and none of the earlier ones in the grid.
    assert tiny_run.train(f"output.dir={run}", *given[1:], groups, "train.steps=3") == 0
    names = {path.name for path in (run / "previews").glob("step-*.png")}
    assert len({name.partition("prompt")[2] for name in names}) == 2
    assert "failed" not in caplog.text


def test_a_model_to_draw_on_that_cannot_have_the_lora_is_refused(
    tiny_run: TinyRun, distilled_model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    other = shutil.copytree(distilled_model, tmp_path / "other")
    config = other / "transformer" / "config.json"
    config.write_text(config.read_text().replace('"num_layers": 2', '"num_layers": 1'))
    assert tiny_run.train(*DRAWN, f"validation.model_path={other}") == 2
    assert "validation.model_path: " in caplog.text
    assert "transformer_blocks.1" in caplog.text
    index = other / "model_index.json"
    index.write_text(index.read_text().replace("QwenImagePipeline", "FluxPipeline"))
    assert tiny_run.train(*DRAWN, f"validation.model_path={other}") == 2
    assert f"validation.model_path: {other} holds a FluxPipeline" in caplog.text
    same = next(line for line in tiny_run.config.read_text().splitlines() if "path: " in line).split()[-1]
    assert tiny_run.train(*DRAWN, f"validation.model_path={same}") == 2
    assert "is model.path, which generates previews anyway" in caplog.text
    split = ("memory.shard_base=all", f"validation.model_path={distilled_model}")
    assert tiny_run.train(*DRAWN, *split) == 2
    assert "which cannot hold what memory.shard_base has several share" in caplog.text
    assert "Loading" not in caplog.text


def sources(data: Path, *changes: str) -> tuple[str, str]:
    """A folder that is learned, and the same one once more, which is preserved."""
    preserved = ", ".join((f"path: {data}", "preserve: true", *changes))
    return "data.path=null", f"data.sources=[{{path: {data}, trigger: ohwx}}, {{{preserved}}}]"


def test_a_run_that_preserves_goes_on_exactly_wherever_its_memory_is_and_separates_its_losses(
    watched_run: TinyRun,
) -> None:
    whole, parts = watched_run.root / "whole", watched_run.root / "parts"
    given = (
        *sources(watched_run.root / "data", "captions: none", "weight: 0.5", "loss_weight: 0.25"),
        *("train.steps=4", "output.checkpoint_every_steps=4", "model.quantize=int8"),
        *("validation.prompts=[]", "validation.item_losses=20", "data.caption_dropout=0.1"),
    )
    kept = "train.use_gradient_checkpointing=false"
    moved = (
        *("train.use_gradient_checkpointing_offload=true", "memory.stream_blocks=all"),
        "memory.stream_slots=1",
    )
    assert watched_run.train(f"output.dir={whole}", *given, kept) == 0
    assert watched_run.stopped_after(2, f"output.dir={parts}", *given, *moved) == 75
    assert watched_run.train(f"output.dir={parts}", *given, *moved) == 0
    assert differing(checkpoint_tensors(whole, 4), checkpoint_tensors(parts, 4)) == []

    steps, others = (
        [row for row in watched_run.metrics(folder) if "grad_norm" in row] for folder in (whole, parts)
    )
    assert steps == others
    assert {len(row.keys() & {"loss", "preservation_loss"}) for row in steps} == {1, 2}
    preserved = [row["preservation_loss"] for row in steps if "preservation_loss" in row]
    assert preserved[0] < 1e-9 < preserved[-1] < min(row["loss"] for row in steps if "loss" in row) / 100
    assert "Loss of what is preserved" in (whole / "report.html").read_text()
    # Only what is learned is measured and reported.
    items = [json.loads(line)["name"] for line in (whole / "items.jsonl").read_text().splitlines()]
    assert [name[:2] for name in items] == ["0/"] * 5
    metadata = lora_metadata_of(whole / "lora")
    assert metadata["modelspec.trigger_phrase"] == "ohwx"
    assert (metadata["ss_num_train_images"], metadata["ss_num_reg_images"]) == ("5", "2")


def test_what_is_preserved_has_captions_of_its_own_and_is_part_of_what_a_run_is(
    tiny_run: TinyRun, caplog: pytest.LogCaptureFixture
) -> None:
    data, folder = tiny_run.root / "data", tiny_run.root / "run"
    assert tiny_run.train("train.steps=1", *sources(data)) == 0
    assert tiny_run.train("train.steps=2", *sources(data, "captions: none")) == 2
    assert "data.items was" in caplog.text
    assert tiny_run.train("train.steps=2", *sources(data, "loss_weight: 2")) == 2
    assert "data.loss_weight was [1.0, 1.0], is [1.0, 2.0]" in caplog.text
    assert tiny_run.train("train.steps=2", *sources(data, "weight: 2"), "resume.allow=[data]") == 0
    assert [row["step"] for row in tiny_run.metrics(folder) if "grad_norm" in row] == [1, 2]
