"""The transformer, the optimizer, the engine and the accelerator have what the config asks for."""

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState
from prepared_run import CPU, Prepared, prepare

from diffsynth_lite.core.weights import WeightStream
from diffsynth_lite.training.builder import build_engine, build_transformer
from diffsynth_lite.training.layer_groups import usual_size
from diffsynth_lite.training.optimization.optimizers import build_optimizer
from diffsynth_lite.training.session import build_accelerator


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Prepared:
    return prepare(tmp_path_factory.mktemp("builder"))


@pytest.fixture
def _fresh_accelerate_state() -> Iterator[None]:
    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


def test_the_optimizer_has_the_adapter_and_nothing_else(prepared: Prepared) -> None:
    optimizer = build_optimizer(prepared.config(), prepared.transformer, prepared.checked.groups)
    adapter = {id(value) for name, value in prepared.transformer.named_parameters() if ".lora_" in name}
    assert {id(value) for group in optimizer.param_groups for value in group["params"]} == adapter
    assert len(adapter) == 2 * len(prepared.checked.target_layers)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, (4, 6.0, 0.125)),
        ({"lora.rank": "3"}, (3, 6.0, 0.125)),
        ({"lora.alpha": "9.0"}, (4, 9.0, 0.125)),
        ({"lora.alpha": "null"}, (4, 4.0, 0.125)),
        ({"lora.dropout": "0.25"}, (4, 6.0, 0.25)),
    ],
)
def test_the_adapter_has_the_rank_the_alpha_and_the_dropout_asked_for(
    prepared: Prepared, changes: dict[str, str], expected: tuple[int, float, float]
) -> None:
    config = prepared.config(changes)
    transformer = build_transformer(config, prepared.checked)
    layer = transformer.get_submodule(prepared.checked.target_layers[0])
    rank, alpha, dropout = expected
    assert layer.lora_A["default"].weight.shape[0] == rank
    assert layer.scaling["default"] == alpha / rank
    assert layer.lora_dropout["default"].p == dropout
    assert usual_size(config).alpha == alpha


def test_the_transformer_has_its_dtype_and_its_adapter_fp32_and_both_train(prepared: Prepared) -> None:
    transformer = build_transformer(prepared.config({"model.dtype": "bfloat16"}), prepared.checked)
    assert all(module.training for module in transformer.modules())
    for name, value in transformer.named_parameters():
        assert value.dtype == (torch.float32 if ".lora_" in name else torch.bfloat16)
        assert value.requires_grad == (".lora_" in name)


def test_the_first_values_of_the_adapter_follow_the_seed_of_the_training(prepared: Prepared) -> None:
    def first_values(seed: int) -> torch.Tensor:
        transformer = build_transformer(prepared.config({"train.seed": str(seed)}), prepared.checked)
        return transformer.get_submodule(prepared.checked.target_layers[0]).lora_A["default"].weight.detach()

    assert torch.equal(first_values(11), first_values(11))
    assert not torch.equal(first_values(11), first_values(17))


@pytest.mark.parametrize(("min_bytes", "is_offloaded"), [("4096", True), ("4097", False)])
def test_the_engine_leaves_what_is_below_its_smallest_size(
    prepared: Prepared, min_bytes: str, is_offloaded: bool
) -> None:
    engine = build_engine(prepared.config({"memory.min_bytes": min_bytes}), WeightStream([], CPU))
    assert engine.can_offload(torch.zeros(4096, dtype=torch.uint8)) is is_offloaded


@pytest.mark.parametrize(("streamed", "left"), [(0, 2**30), (2**30 - 5, 5), (2**30 + 5, 0)])
def test_the_engine_may_take_what_streamed_weights_leave_of_the_host_memory(
    prepared: Prepared, streamed: int, left: int
) -> None:
    weights: Any = SimpleNamespace(backend=None, host_bytes=streamed)
    assert build_engine(prepared.config({"memory.host_gib": "1"}), weights).host_pool.cap_bytes == left


@pytest.mark.usefixtures("_fresh_accelerate_state")
@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_the_accelerator_has_the_precision_and_the_trackers_of_the_config(
    prepared: Prepared, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, precision: str
) -> None:
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", {"no": "bf16", "bf16": "no"}[precision])
    accelerator = build_accelerator(prepared.config({"train.mixed_precision": precision}), tmp_path)
    assert accelerator.mixed_precision == precision
    assert accelerator.log_with == []
    assert accelerator.project_dir == accelerator.logging_dir == str(tmp_path)
    assert accelerator.gradient_accumulation_steps == 1
