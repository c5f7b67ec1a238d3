"""Whole runs of a model of two experts: each step trains one of them, and leaves the other as it was."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import safetensors.torch
import torch
from diffusers import WanPipeline, WanTransformer3DModel
from original_layouts import original_layout
from tiny_run import (
    UNWATCHED,
    TinyRun,
    checkpoint_tensors,
    differing,
    forked,
    lora_metadata_of,
    tiny_image,
    write_config,
)

from diffsynth_lite.data.video import write_video
from diffsynth_lite.pipelines.wan import tiny, tiny_wan_transformer
from diffsynth_lite.run_folder.folder import RunFolder
from diffsynth_lite.run_folder.metrics import read_items

HIGH, LOW = "transformer", "transformer_2"
STEPS = 6


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("experts")
    second = tiny_wan_transformer(32, seed=1)
    WanPipeline(**tiny().components | {LOW: second}, boundary_ratio=0.5).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def from_files(experts: Path) -> tuple[str, ...]:
    """Settings that take the experts from a file each, and all else from a folder without them."""
    bare = experts.parent / "bare"
    shutil.copytree(experts, bare, ignore=shutil.ignore_patterns("diffusion_pytorch_model.*"))
    shutil.copytree(experts / "vae", bare / "vae", dirs_exist_ok=True)
    settings = [f"model.path={bare}"]
    for key, name in (("transformer_file", HIGH), ("transformer_2_file", LOW)):
        model = WanTransformer3DModel.from_pretrained(experts, subfolder=name)
        safetensors.torch.save_file(original_layout(model), bare / f"{name}.safetensors")
        settings.append(f"model.{key}={bare}/{name}.safetensors")
    return tuple(settings)


@pytest.fixture
def expert_run(tmp_path: Path, experts: Path) -> TinyRun:
    for place in range(2):
        frames = [tiny_image(32, 32, 5 + place + frame) for frame in range(5)]
        write_video(tmp_path / "clips" / f"{place}.mp4", frames, fps=16)
        (tmp_path / "clips" / f"{place}.txt").write_text("a red circle" + " that moves" * place)
    return TinyRun(
        root=tmp_path,
        config=write_config(tmp_path, experts, tmp_path / "clips"),
        settings=(
            *("model.family=wan", "data.width=32", "data.height=32", "data.frame_counts=[5]"),
            *(f"train.steps={STEPS}", "train.micro_batch_size=1", "objective.shift=none"),
            *("output.checkpoint_every_steps=1", "output.keep_checkpoints=100"),
            *("train.use_gradient_checkpointing=true", "train.use_gradient_checkpointing_offload=true"),
        ),
    )


def trained_experts(folder: Path) -> list[str]:
    """The expert of each step after the first, whose adapter and optimizer state only that step changed."""
    names = []
    for step in range(2, STEPS + 1):
        changed = differing(checkpoint_tensors(folder, step - 1), checkpoint_tensors(folder, step))
        touched = {part for name in changed for part in (HIGH, LOW) if f"/{part}." in name}
        assert {name.split("/")[0] for name in changed} >= {"adapter", "optimizer"}
        (name,) = touched
        names.append(name)
    return names


def test_each_step_trains_one_expert_and_a_resumed_run_from_files_is_the_same_bit_for_bit(
    expert_run: TinyRun, from_files: tuple[str, ...], caplog: pytest.LogCaptureFixture
) -> None:
    whole, parts = expert_run.root / "whole", expert_run.root / "parts"
    entries = (f"{{match: {HIGH}, learning_rate: 3e-3}}", f"{{match: {LOW}, learning_rate: 1e-2, rank: 2}}")
    expert_run = replace(expert_run, settings=(*expert_run.settings, f"lora.groups=[{', '.join(entries)}]"))
    assert expert_run.train(f"output.dir={whole}") == 0
    rates = [row for row in expert_run.metrics(whole) if "learning_rate" in row][-1]
    assert (rates[f"learning_rate/{HIGH}"], rates[f"learning_rate/{LOW}"]) == (3e-3, 1e-2)
    assert set(trained_experts(whole)) == {HIGH, LOW}
    report = next(row for row in expert_run.metrics(whole) if "blocks_recomputed" in row)
    assert report["blocks_recomputed"] == 2 * 4  # two blocks of one expert, four micro-batches
    assert report["bytes_offloaded"] > 0
    assert len(list((whole / "previews").glob("*.mp4"))) == 2 * 2
    clips = read_items(RunFolder(whole).items_file)
    assert [(clip.name, clip.size, bool(clip.thumbnail)) for clip in clips] == [
        (f"{place}.mp4", "32x32x5", True) for place in range(2)
    ]
    losses = [row["losses"] for row in expert_run.metrics(whole, name="item_losses.jsonl")]
    assert [len(list(filter(None, row))) for row in losses] == [2, 2]
    updates = expert_run.metrics(whole, name="layers.jsonl")[-1]["updates"]
    assert {name.partition(".")[0] for name, update in updates.items() if update} == {HIGH, LOW}

    of_parts = (f"output.dir={parts}", *UNWATCHED)
    assert expert_run.train(*of_parts, *from_files, "train.steps=3") == 0
    assert expert_run.train(*of_parts) == 2
    assert "model.weights was " in caplog.text
    streamed = ("memory.stream_blocks=all", "memory.stream_slots=1")
    settings = (*of_parts, "--no-use_gradient_checkpointing_offload", *streamed)
    assert expert_run.train(*settings, *from_files) == 0
    report = next(row for row in expert_run.metrics(parts) if "blocks_streamed" in row)
    assert report["blocks_streamed"] == 2 * 2  # two blocks of each expert
    assert differing(checkpoint_tensors(whole, STEPS), checkpoint_tensors(parts, STEPS)) == []
    files = ["pytorch_lora_weights_high_noise.safetensors", "pytorch_lora_weights_low_noise.safetensors"]
    assert sorted(path.name for path in (whole / "lora").glob("*.safetensors")) == files
    for file, timesteps in zip(files, ("500,999", "0,499"), strict=True):
        metadata = lora_metadata_of(whole / "lora", file)
        adapter = json.loads(metadata["lora_adapter_metadata"])
        assert adapter["transformer.lora_alpha"] == adapter["transformer.r"] == 4
        assert set(adapter.get("transformer.rank_pattern", {}).values()) == ({2} if "low" in file else set())
        assert metadata["modelspec.timestep_range"] == timesteps


def test_one_expert_is_trained_at_its_noise_levels_and_generates_with_the_other(
    expert_run: TinyRun, from_files: tuple[str, ...]
) -> None:
    alone = expert_run.root / "alone"
    settings = (f"output.dir={alone}", "lora.components=[transformer_2]", "train.steps=1")
    assert expert_run.train(*settings, *from_files) == 0
    assert [path.name for path in (alone / "lora").glob("*.safetensors")] == [
        "pytorch_lora_weights_low_noise.safetensors"
    ]
    assert len(list((alone / "previews").glob("*.mp4"))) == 2 * 2
    assert not any("transformer" in name for name in checkpoint_tensors(alone, 1))


def test_two_processes_agree_on_the_expert_and_leave_the_other_alone(expert_run: TinyRun) -> None:
    single, double = expert_run.root / "single", expert_run.root / "double"
    settings = ("lora.dropout=0", *UNWATCHED)
    assert expert_run.train(f"output.dir={single}", *settings) == 0
    program = forked(expert_run, *settings, f"output.dir={double}", num_processes=2)
    assert program.wait() == 0, program.printed()
    assert trained_experts(double) == trained_experts(single)
    first = checkpoint_tensors(double, 1)
    stated = {part for name in first for part in (HIGH, LOW) if name.startswith(f"optimizer/{part}.")}
    assert len(stated) == 1  # AdamW has no state of an expert that got no gradient yet
    losses = [[row["loss"] for row in expert_run.metrics(path) if "loss" in row] for path in (single, double)]
    torch.testing.assert_close(losses[0], losses[1], rtol=1e-4, atol=0)


def test_processes_that_share_each_clip_train_as_one_and_go_on_bit_for_bit(
    expert_run: TinyRun,
) -> None:
    """With shards of both experts in int8, an average, offload, losses on fixed noise and previews."""
    single, whole, parts = (expert_run.root / name for name in ("single", "whole", "parts"))
    settings = (
        *("lora.dropout=0", "model.quantize=int8", "train.ema_decay=0.9", "validation.use_ema=true"),
        *("validation.prompts=[a red circle]", "train.steps=3", "train.micro_batch_size=2"),
    )
    split, sharded = (*settings, "train.context_parallel=2"), "memory.shard_base=all"
    assert expert_run.train(f"output.dir={single}", *settings) == 0
    program = forked(expert_run, *split, sharded, f"output.dir={whole}", num_processes=2)
    assert program.wait() == 0, program.printed()
    assert "accumulation 2 x 1 x 2 processes that share each sample (ulysses)" in program.printed()
    assert "4 tokens here of 8, over 2 processes (ulysses)" in program.printed()

    # Where the weights are is free to change.
    streamed = ("memory.stream_blocks=all", "memory.stream_slots=1")
    resumed = ("--resume", str(whole / "checkpoints" / "step-00000001"), f"output.dir={parts}")
    program = forked(expert_run, *split, *streamed, *resumed, num_processes=2)
    assert program.wait() == 0, program.printed()
    assert "Continuing from" in program.printed()
    assert differing(checkpoint_tensors(whole, 3), checkpoint_tensors(parts, 3)) == []
    last, expected = (
        {path.name: path.read_bytes() for path in (folder / "previews").glob("step-00000003-*.png")}
        for folder in (parts, whole)
    )
    assert last == expected != {}

    rows = [expert_run.metrics(folder) for folder in (single, whole)]
    report = next(row for row in rows[1] if "context_parallel" in row)
    assert report["tokens_of_process"] == 4
    assert report["blocks_recomputed"] == 2 * 2  # two blocks of one expert, two micro-batches
    for one, other in zip(*rows, strict=True):
        for name in (name for name in one if "loss" in name or "samples_by_noise" in name):
            assert one[name] == pytest.approx(other[name], rel=1e-5)  # sums over tokens differ in order
    moments = checkpoint_tensors(whole, 1)
    for name, tensor in checkpoint_tensors(single, 1).items():
        if name.startswith("optimizer/"):
            torch.testing.assert_close(moments[name], tensor, rtol=1e-3, atol=1e-7)
