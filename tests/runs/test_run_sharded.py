"""Runs whose base is sharded over two processes: the numbers of unsharded ones, bit for bit."""

from dataclasses import replace

import pytest
from tiny_run import TinyRun, checkpoint_tensors, differing, forked

from diffsynth_lite.config import load_config
from diffsynth_lite.training.checks import bind_family
from diffsynth_lite.training.planning.subject import counter_of, step_settings

SHARDED = "memory.shard_base=all"
SETTINGS = (
    *("train.steps=3", "train.micro_batch_size=1", "train.ema_decay=0.9", "validation.use_ema=true"),
    *("validation.prompts=[a red circle]", "output.checkpoint_every_steps=1", "model.quantize=int8"),
    "train.use_gradient_checkpointing_offload=true",
)


def counted_weights(run: TinyRun) -> int:
    """Of the process with the largest share, by the plan."""
    config = load_config(run.config, SETTINGS).config
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
    program = forked(watched_run, *SETTINGS, *preserving, f"output.dir={alone}", num_processes=2)
    assert program.wait() == 0, program.printed()

    settings = (*SETTINGS, *preserving, SHARDED, f"output.dir={killed}")
    program = forked(watched_run, *settings, num_processes=2)
    program.read_until("step 2/")
    program.kill()
    program = forked(watched_run, *settings, num_processes=2)
    assert program.wait() == 0, program.printed()
    assert "Continuing from" in program.printed()
    assert "base in float32 and int8, one copy in all;" in program.printed()

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


def test_a_run_of_one_process_has_nothing_to_shard_over(
    tiny_run: TinyRun, caplog: pytest.LogCaptureFixture
) -> None:
    assert tiny_run.train(SHARDED) == 2
    assert "memory.shard_base: all shards the base over the processes of a run" in caplog.text
