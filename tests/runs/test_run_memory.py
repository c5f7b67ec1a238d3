"""Whole runs with what saves memory: it has its effect, proves it, and changes no weight."""

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from accelerate.state import AcceleratorState
from lazy_backend import LazyBackend, LazyCopy
from tiny_run import UNWATCHED, TinyRun, checkpoint_tensors, differing, make_run

from diffsynth_lite.cli.main import main
from diffsynth_lite.config import load_config
from diffsynth_lite.core.gradient import KEEP, RECOMPUTE, BlockCompiler
from diffsynth_lite.core.transfer.backends import PlainBackend
from diffsynth_lite.core.transfer.shared_memory import HostMemory
from diffsynth_lite.pipelines.qwen_image import QwenImage
from diffsynth_lite.training.planning import automatic, choices
from diffsynth_lite.training.planning.subject import (
    counter_of,
    family_without_weights,
    step_settings,
    timer_of,
)


@pytest.fixture(scope="module")
def plain_run(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> TinyRun:
    """A run that was done without anything that saves memory."""
    # Without adapters on the modulation, whose gradient would need the feed-forward part's last product.
    settings = (*UNWATCHED, "lora.target_modules=[to_q, img_mlp.net.2]", "train.steps=4")
    run = replace(make_run(tmp_path_factory.mktemp("plain"), tiny_model), settings=settings)
    assert run.train("--no-use_gradient_checkpointing") == 0
    AcceleratorState._reset_state(reset_partial_state=True)
    return run


@pytest.mark.parametrize(
    ("settings", "num_selected"),
    [
        ("--use_gradient_checkpointing", 2),
        ("--use_gradient_checkpointing_offload", 2),
        ("memory.policy=last_k memory.policy_n=1 memory.save_attention=keep", 1),
        ("memory.policy=only memory.policy_blocks=[0] memory.save_attention=park", 1),
        ("--use_gradient_checkpointing_offload memory.save_attention=park", 2),
        ("--use_gradient_checkpointing_offload memory.skip_dead_ops=off", 2),
    ],
)
def test_flags_and_policies_prove_their_effect_and_change_no_weight(
    plain_run: TinyRun, settings: str, num_selected: int, tmp_path: Path
) -> None:
    assert plain_run.train(f"output.dir={tmp_path}", *settings.split()) == 0
    assert differing(checkpoint_tensors(plain_run.folder, 4), checkpoint_tensors(tmp_path, 4)) == []
    report = next(row for row in plain_run.metrics(tmp_path) if "blocks_recomputed" in row)
    assert report["blocks_recomputed"] == 2 * num_selected  # two micro-batches
    if "attention" not in settings:
        assert (report["bytes_offloaded"] > 0) == ("offload" in settings)
    assert report["attention_saved"] == (2 * num_selected if "attention" in settings else 0)
    assert (report["attention_bytes_offloaded"] > 0) == ("attention=park" in settings)
    assert (report["dead_ops_skipped"] > 0) == ("dead_ops" not in settings)


STREAMED = ("memory.stream_blocks=all", "memory.stream_slots=1")


@pytest.mark.parametrize(
    "settings",
    [
        ("--no-use_gradient_checkpointing",),
        ("--use_gradient_checkpointing_offload", "memory.save_attention=park"),
    ],
)
def test_streamed_weights_prove_their_effect_and_change_no_weight(
    plain_run: TinyRun, settings: tuple[str, ...], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    half_way = plain_run.folder / "checkpoints" / "step-00000002"
    assert plain_run.train(f"output.dir={tmp_path}", "--resume", str(half_way), *STREAMED, *settings) == 0
    assert differing(checkpoint_tensors(plain_run.folder, 4), checkpoint_tensors(tmp_path, 4)) == []
    report = next(row for row in plain_run.metrics(tmp_path) if "blocks_streamed" in row)
    assert (report["blocks_streamed"], report["weight_bytes_copied"] > 0) == (2, True)
    runs = 2 * (2 + report["blocks_recomputed"] // 2)  # two blocks, two micro-batches
    assert report["streamed_blocks_run"] == runs
    assert "streamed        2 blocks, " in caplog.text


def test_as_few_blocks_are_streamed_as_fit_by_count(
    plain_run: TinyRun, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    settings = ("memory.stream_blocks=auto", "memory.stream_slots=1", "memory.min_bytes=0")
    config = load_config(plain_run.config, (*plain_run.settings, *settings)).config
    with family_without_weights(config) as family:
        counter, step = counter_of(config, family), step_settings(config, family)
    counts = [counter.count(replace(step, stream_blocks=number)).device / 1024**3 for number in (0, 2)]
    half_way = plain_run.folder / "checkpoints" / "step-00000002"
    start = (f"output.dir={tmp_path}", "--resume", str(half_way), *settings)

    assert plain_run.train(*start, f"memory.device_gib={counts[1] * 0.99}") == 2
    assert "memory.stream_blocks: auto; with all blocks streamed a step is estimated to take" in caplog.text
    assert plain_run.train(*start, f"memory.device_gib={sum(counts) / 2}") == 0
    assert "memory.stream_blocks: auto streams 2 of 2 blocks" in caplog.text
    assert differing(checkpoint_tensors(plain_run.folder, 4), checkpoint_tensors(tmp_path, 4)) == []
    report = next(row for row in plain_run.metrics(tmp_path) if "blocks_streamed" in row)
    assert report["blocks_streamed"] == 2
    # It is finished: nothing is loaded any more.
    assert plain_run.train(*start, f"memory.device_gib={counts[0] * 1.01}") == 0
    assert "memory.stream_blocks: auto streams 0 of 2 blocks" in caplog.text
    assert plain_run.train(*start) == 0
    assert "auto streams nothing: the device is the host" in caplog.text


COMPILED = ("train.compile=blocks", *UNWATCHED)


# torch's compiler itself does what torch warns of.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_compiled_blocks_prove_their_effect_and_a_run_may_go_on_with_them(
    plain_run: TinyRun, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level("INFO")
    # It runs the operators of a graph as they are.
    monkeypatch.setitem(BlockCompiler.__init__.__kwdefaults__, "backend", "eager")
    half_way = plain_run.folder / "checkpoints" / "step-00000002"
    start = (f"output.dir={tmp_path}", "--resume", str(half_way), *COMPILED, *STREAMED)
    assert plain_run.train(*start) == 2
    assert "set 'resume.allow=[train.compile]'" in caplog.text

    assert plain_run.train(*start, "resume.allow=[train.compile]") == 0
    assert differing(checkpoint_tensors(plain_run.folder, 4), checkpoint_tensors(tmp_path, 4)) == []
    (report,) = (row for row in plain_run.metrics(tmp_path) if "graphs_compiled" in row)
    # With padded prompts and without, and with gradients of the block's input (the second's) and without.
    assert (report["blocks_compiled"], report["graphs_compiled"], report["graph_breaks"]) == (2, 4, 0)
    assert "compiled        2 blocks, 4 graphs, 0 graph breaks, " in caplog.text
    lineage = json.loads((tmp_path / "lineage.json").read_text())
    assert lineage[-1]["changed"] == {"train.compile": {"from": "off", "to": "blocks"}}


def test_compiling_without_a_compiler_or_without_effect_stops_the_run(
    tiny_run: TinyRun, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    with torch._inductor.config.patch({"cpp.cxx": ("no-such-compiler",)}):
        assert tiny_run.train(*COMPILED) == 2
    assert "train.compile: blocks needs a C++ compiler, and none works here" in caplog.text
    assert "encoding" not in caplog.text
    others = [[torch.nn.Linear(4, 4)]]
    monkeypatch.setattr("diffsynth_lite.training.builder.blocks_by_model", lambda *_: others)
    assert tiny_run.train(*COMPILED) == 2
    assert "train.compile: on, but none of 1 blocks ran compiled" in caplog.text


class WatchedBackend(LazyBackend):
    """One that knows which ways it copied."""

    def __init__(self) -> None:
        super().__init__()
        self.directions: set[str] = set()

    def _start(self, direction: str, target: torch.Tensor, source: torch.Tensor) -> LazyCopy:
        self.directions.add(direction)
        return super()._start(direction, target, source)


def test_inputs_and_weights_of_a_run_share_one_backend_and_may_both_arrive_late(
    plain_run: TinyRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = WatchedBackend()
    monkeypatch.setattr("diffsynth_lite.training.frozen_weights.backend_for", lambda _device: backend)
    half_way = plain_run.folder / "checkpoints" / "step-00000002"
    settings = ("--use_gradient_checkpointing_offload", "memory.policy=first_k", "memory.policy_n=1")
    assert plain_run.train(f"output.dir={tmp_path}", "--resume", str(half_way), *STREAMED, *settings) == 0
    assert differing(checkpoint_tensors(plain_run.folder, 4), checkpoint_tensors(tmp_path, 4)) == []
    assert backend.directions == {"in", "out"}  # weights never go out


@pytest.mark.parametrize("quantize", ["none", "int8"])
def test_previews_and_the_lora_of_streamed_weights_are_those_of_resident_ones(
    watched_run: TinyRun, quantize: str
) -> None:
    files = []
    for name, settings in (("resident", ()), ("streamed", STREAMED)):
        folder = watched_run.root / name
        given = (f"output.dir={folder}", "train.steps=2", f"model.quantize={quantize}", *settings)
        assert watched_run.train(*given) == 0
        losses = [row for row in watched_run.metrics(folder) if "train_fixed_noise_loss" in row]
        assert len(losses) == 2
        previews = {path.name: path.read_bytes() for path in (folder / "previews").iterdir()}
        lora = safetensors.torch.load_file(folder / "lora" / "pytorch_lora_weights.safetensors")
        files.append((losses, previews, lora))
    (*of_resident, resident_lora), (*of_streamed, streamed_lora) = files
    assert of_resident == of_streamed
    # What the first previews streamed is not counted as the step's.
    report = next(row for row in watched_run.metrics(folder) if "blocks_streamed" in row)
    assert report["streamed_blocks_run"] == 2 * (2 + report["blocks_recomputed"] // 2)
    assert differing(resident_lora, streamed_lora) == []


def test_more_streamed_than_the_host_has_is_refused_before_anything_is_encoded(
    tiny_run: TinyRun, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("diffsynth_lite.training.frozen_weights.available_host_bytes", lambda: 600 * 1024)
    assert tiny_run.train(*STREAMED) == 2
    assert "memory.stream_blocks: the streamed weights take 686.0 KiB of host memory, and" in caplog.text
    assert "600.0 KiB are available; stream fewer blocks" in caplog.text
    assert "encoding" not in caplog.text


def test_the_host_needs_room_for_one_copy_where_processes_share_it_and_else_for_one_each(
    tiny_run: TinyRun, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    monkeypatch.setattr("diffsynth_lite.training.frozen_weights.available_host_bytes", lambda: 700 * 1024)
    settings = (*STREAMED, *UNWATCHED, "train.steps=1")
    for shared in (None, torch.empty(686 * 1024, dtype=torch.uint8)):
        found = HostMemory(PlainBackend(), shared, num_processes=2)
        monkeypatch.setattr(HostMemory, "of_machine", lambda *_, found=found: found)
        assert tiny_run.train(*settings) == (2 if shared is None else 0)
    assert "the streamed weights in 2 copies, as processes cannot share them, take 1.3 MiB" in caplog.text
    assert "686.0 KiB on host (shared by 2 processes)" in caplog.text


def test_a_switch_without_effect_stops_the_run(tiny_run: TinyRun, caplog: pytest.LogCaptureFixture) -> None:
    assert tiny_run.train("--use_gradient_checkpointing_offload", "memory.min_bytes=1000000000") == 2
    assert "use_gradient_checkpointing_offload" in caplog.text
    assert "min_bytes" in caplog.text


def test_a_host_memory_too_small_for_one_block_stops_the_run_before_the_first_step(
    watched_run: TinyRun, caplog: pytest.LogCaptureFixture
) -> None:
    assert watched_run.train("--use_gradient_checkpointing_offload", "memory.host_gib=0.000004") == 2
    assert "memory.host_gib: 4e-06 GiB for the offload do not hold the" in caplog.text
    assert not any("grad_norm" in row for row in watched_run.metrics())


@pytest.mark.usefixtures("counted_once")
def test_a_full_device_ends_the_run_with_the_settings_that_would_help(
    tiny_run: TinyRun, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    predict = QwenImage.predict

    def fail(self: QwenImage, model: torch.nn.Module, noisy: torch.Tensor, *given: Any) -> torch.Tensor:
        if noisy.is_meta:
            return predict(self, model, noisy, *given)
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.\nmore")

    monkeypatch.setattr("diffsynth_lite.pipelines.qwen_image.QwenImage.predict", fail)
    assert tiny_run.train() == 3
    assert "model.dtype: bfloat16 (about" in caplog.text
    assert "offload" not in caplog.text  # of two blocks, both would be on the device
    assert "train.micro_batch_size: 1" in caplog.text
    assert "KiB of frozen weights" in caplog.text
    counted = (
        r"estimated to take 1\.4 MiB of the device; with model.quantize=int8 .*, in a new run, it takes 1\.2"
    )
    assert re.search(counted, caplog.text)
    assert tiny_run.status()["state"] == "stopped"


@pytest.fixture
def counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """All starts of a test share what they count, and little; prompts count as long as the longest is."""
    shared: dict[str, Any] = {}
    for name, make in (("counter_of", counter_of), ("timer_of", timer_of)):
        monkeypatch.setattr(automatic, name, partial(_made_once, shared, name, make))
    monkeypatch.setattr(choices, "_STRATEGIES", (KEEP, RECOMPUTE))
    monkeypatch.setattr(QwenImage, "max_prompt_tokens", 21)


def _made_once(shared: dict[str, Any], name: str, make: Callable[..., Any], *given: Any) -> Any:
    if name not in shared:
        shared[name] = make(*given)
    return shared[name]


def gib(run: TinyRun, settings: Sequence[str], **changes: Any) -> float:
    """What a step takes on the CPU by count."""
    config = load_config(run.config, (*run.settings, *settings)).config
    with family_without_weights(config) as family:
        step = replace(step_settings(config, family), device_type="cpu", **changes)
        return automatic.counter_of(config, family).count(step).device / 1024**3


def reports(run: TinyRun, folder: Path) -> list[dict[str, Any]]:
    return [row for row in run.metrics(folder) if "blocks_run" in row]


@pytest.mark.usefixtures("counted_once")
def test_a_run_chooses_what_fits_compares_it_and_chooses_again_when_it_goes_on(
    plain_run: TinyRun, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    small = ("memory.stream_slots=1",)
    auto = (*small, "memory.auto=true", "memory.save_attention=keep", f"output.dir={tmp_path}")
    least = gib(plain_run, small, stream_blocks="all")
    assert plain_run.stopped_after(2, *auto, f"memory.device_gib={1.01 * least}") == 75
    assert "chose memory.stream_blocks: 2, memory.save_attention: no: " in caplog.text
    assert "in place of the config's memory.save_attention: keep" in caplog.text
    # The step's size is the largest one, and its prompts the longest.
    (row,) = [row for row in plain_run.metrics(tmp_path) if "device_bytes_measured" in row]
    assert row["step"] == 2
    assert row["device_bytes_measured"] == pytest.approx(row["device_bytes_predicted"], rel=0.05)
    caplog.clear()
    assert plain_run.train(*auto, f"memory.device_gib={10 * least}") == 0
    assert "chose train.use_gradient_checkpointing: false, memory.save_attention: no:" in caplog.text
    first, second = reports(plain_run, tmp_path)
    assert ("blocks_streamed" in first, first["blocks_recomputed"]) == (True, 4)
    assert ("blocks_streamed" in second, second["blocks_recomputed"]) == (False, 0)
    assert differing(checkpoint_tensors(plain_run.folder, 4), checkpoint_tensors(tmp_path, 4)) == []


@pytest.mark.usefixtures("counted_once")
def test_a_format_is_chosen_where_that_is_allowed_and_nothing_fits_without_and_then_it_stays(
    tiny_run: TinyRun, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    small = ("memory.stream_slots=1", "train.steps=2")
    auto = (*small, "memory.auto=true")
    allowed = (*auto, "memory.may_change=[quantize]")
    least = gib(tiny_run, small, stream_blocks="all")
    short = f"memory.device_gib={0.99 * least}"
    assert tiny_run.train(*auto, short) == 2
    assert "memory.auto: nothing fits" in caplog.text
    assert "What would help: model.quantize: int8, with which it is" in caplog.text
    assert tiny_run.stopped_after(1, *allowed, short) == 75
    assert "chose model.quantize: int8, " in caplog.text
    caplog.clear()
    assert tiny_run.train(*allowed, f"memory.device_gib={10 * least}") == 0
    assert "memory.auto: model.quantize: int8 stay as the run's first start chose" in caplog.text
    assert "layers_quantised" in reports(tiny_run, tiny_run.folder)[-1]
    caplog.clear()
    drawn = ("--prompt", "a red circle", "--steps", "2", "--scale", "1")
    assert main(["sample", "--lora", str(tiny_run.folder), *drawn]) == 0
    assert "memory.auto: model.quantize: int8 stay as the run's first start chose" in caplog.text
    assert re.search(r"quantised +28 layers", caplog.text)
