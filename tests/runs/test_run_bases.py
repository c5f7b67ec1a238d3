"""Runs on a quantised or sharded base: resumed exactly, with the numbers of one process."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from card_code import assert_diffusers_loads
from tiny_run import UNWATCHED, TinyRun, checkpoint_part, checkpoint_tensors, differing, forked

from diffsynth_lite.config import load_config
from diffsynth_lite.training.checks import bind_family
from diffsynth_lite.training.planning.subject import counter_of, step_settings

INT8 = "model.quantize=int8"


@pytest.fixture(params=["int8_convrot", "nf4"])
def quantize(request: pytest.FixtureRequest) -> str:
    if request.param == "nf4":
        pytest.importorskip("bitsandbytes")
    return f"model.quantize={request.param}"


def test_a_run_says_what_it_quantised_goes_on_exactly_and_leaves_a_lora_for_the_plain_model(
    watched_run: TinyRun, tiny_model: Path, quantize: str, caplog: pytest.LogCaptureFixture
) -> None:
    whole, plain = watched_run.root / "whole", watched_run.root / "plain"
    settings = ("train.steps=2", "output.checkpoint_every_steps=1")
    offload = "train.use_gradient_checkpointing_offload=true"
    assert watched_run.train(quantize, *settings, offload, f"output.dir={whole}") == 0
    (report,) = (row for row in watched_run.metrics(whole) if "layers_quantised" in row)
    assert report["layers_quantised"] == 28
    assert 0 < report["bytes_quantised"] < report["bytes_before_quantisation"] / 3
    assert "quantised       28 layers, " in caplog.text
    assert report["blocks_recomputed"] > 0 < report["bytes_offloaded"]

    first = whole / "checkpoints" / "step-00000001"
    assert watched_run.train(quantize, *settings, *UNWATCHED, "--resume", str(first)) == 0
    trained = checkpoint_tensors(whole, 2)
    assert differing(trained, checkpoint_tensors(watched_run.folder, 2)) == []

    assert watched_run.train(*settings, f"output.dir={plain}") == 0
    assert not any("layers_quantised" in row for row in watched_run.metrics(plain))
    assert differing(checkpoint_part(whole, 2), checkpoint_part(plain, 2)) != []
    # Drawn with the quantised base, also before training.
    names = [path.name for path in sorted((plain / "previews").glob("step-00000000-*"))]
    drawn, of_plain = ([(one / "previews" / name).read_bytes() for name in names] for one in (whole, plain))
    assert len(names) == 2
    assert drawn != of_plain

    assert_diffusers_loads(watched_run.folder / "lora", checkpoint_part(whole, 2), tiny_model)


def test_two_processes_train_on_a_quantised_base_as_one_does_and_share_what_they_stream(
    tiny_run: TinyRun, quantize: str, foreign_lora: Path
) -> None:
    single, double = tiny_run.root / "single", tiny_run.root / "double"
    settings = (quantize, "lora.dropout=0", "train.micro_batch_size=1", "train.steps=3")
    settings += (quantize.replace("quantize", "text_encoder_quantize").removesuffix("_convrot"),)
    settings += ("train.optimizer=muon", "objective.loss=huber", "objective.guidance_target=2")
    settings += (f"model.training_adapter={foreign_lora}",)
    assert tiny_run.train(*settings, f"output.dir={single}") == 0
    streamed = ("memory.stream_blocks=all", "memory.stream_slots=1", "memory.stream_text_encoder=true")
    # They encode for themselves, each its share, with most of the text encoder in host memory.
    elsewhere = (f"output.dir={double}", f"data.cache_dir={tiny_run.root / 'elsewhere'}")
    program = forked(tiny_run, *settings, *streamed, *elsewhere, num_processes=2)
    assert program.wait() == 0, program.printed()
    assert "on host (shared by 2 processes)" in program.printed()
    (report,) = (row for row in tiny_run.metrics(double) if "blocks_streamed" in row)
    assert (report["weight_copies_on_host"], report["processes_on_host"]) == (1, 2)
    losses = [[row["loss"] for row in tiny_run.metrics(path) if row.get("loss")] for path in (single, double)]
    assert len(losses[0]) == 3
    torch.testing.assert_close(losses[0], losses[1], rtol=1e-4, atol=0)  # sums differ in their order


SHARDED = "memory.shard_base=all"
OF_SHARDS = (
    *("train.steps=3", "train.micro_batch_size=1", "train.ema_decay=0.9", "validation.use_ema=true"),
    *("validation.prompts=[a red circle]", "output.checkpoint_every_steps=1", "model.quantize=int8_convrot"),
    "train.use_gradient_checkpointing_offload=true",
)


def counted_weights(run: TinyRun) -> int:
    """Of the process with the largest share, by the plan."""
    config = load_config(run.config, OF_SHARDS).config
    family = bind_family(config)
    settings = replace(step_settings(config, family), num_shards=2)
    return counter_of(config, family).count(settings).weights


def test_a_sharded_run_that_is_killed_goes_on_as_one_that_is_not_sharded_and_was_left_alone(
    watched_run: TinyRun,
) -> None:
    alone, killed = watched_run.root / "alone", watched_run.root / "killed"
    # A process runs a pass of what is preserved also where the other one has it alone.
    data = watched_run.root / "data"
    both = f"[{{path: {data}}}, {{path: {data}, preserve: true, captions: none, weight: 0.5}}]"
    preserving = ("data.path=null", f"data.sources={both}")
    program = forked(watched_run, *OF_SHARDS, *preserving, f"output.dir={alone}", num_processes=2)
    assert program.wait() == 0, program.printed()

    settings = (*OF_SHARDS, *preserving, SHARDED, f"output.dir={killed}")
    program = forked(watched_run, *settings, num_processes=2)
    program.read_until("step 2/")
    program.kill()
    program = forked(watched_run, *settings, num_processes=2)
    assert program.wait() == 0, program.printed()
    assert "Continuing from" in program.printed()
    assert "base in float32 and int8_convrot, one copy in all;" in program.printed()

    assert differing(checkpoint_tensors(alone, 3), checkpoint_tensors(killed, 3)) == []
    for name in ("item_losses.jsonl", "sample_losses.jsonl", "layers.jsonl"):
        assert watched_run.metrics(killed, name=name) == watched_run.metrics(alone, name=name)
    rows, others = (watched_run.metrics(folder) for folder in (killed, alone))
    # Each start also reports what its first step did.
    losses = [[row for row in of_one if any("loss" in name for name in row)] for of_one in (rows, others)]
    assert losses[0] == losses[1] != []
    drawn, expected = (
        {path.name: path.read_bytes() for path in (folder / "previews").glob("step-*")}
        for folder in (killed, alone)
    )
    assert drawn == expected
    report = next(row for row in rows if "weight_shards" in row)
    assert report["weight_shards"] == 2
    assert 0.4 < report["weight_bytes_of_process"] / report["weight_bytes_of_all_shards"] < 0.6
    assert report["weight_bytes_of_process"] == counted_weights(watched_run)
    assert report["blocks_recomputed"] > 0 < report["bytes_offloaded"]
