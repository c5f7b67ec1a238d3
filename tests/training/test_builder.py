"""What a run is built from has what the config asks for."""

import dataclasses
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState
from diffusers.pipelines.qwenimage.pipeline_qwenimage import calculate_shift
from prepared_run import CPU, NUM_IMAGES, PROCESS, SETTINGS, Prepared, prepare

from diffsynth_lite.core.gradient import GradientEngine
from diffsynth_lite.core.randomness import normal
from diffsynth_lite.core.weights.stream import WeightStream
from diffsynth_lite.data.batches import Batch
from diffsynth_lite.media import Prompt
from diffsynth_lite.pipelines.qwen_image import QwenImage
from diffsynth_lite.run_folder.folder import RunFolder
from diffsynth_lite.run_folder.metrics import MetricsFile
from diffsynth_lite.training.builder import TrainingObjects, build_engine, build_transformer
from diffsynth_lite.training.data_settings import shifts_by_size
from diffsynth_lite.training.layer_groups import default_size
from diffsynth_lite.training.optimization.optimizers import build_optimizer
from diffsynth_lite.training.session import build_accelerator


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Prepared:
    return prepare(tmp_path_factory.mktemp("builder"))


def test_the_kernel_of_attention_is_given_to_the_model(prepared: Prepared) -> None:
    for backend in (None, "_native_math"):
        config = prepared.config({} if backend is None else {"model.attention": backend})
        attention = build_transformer(config, prepared.checked).transformer_blocks[0].attn
        assert attention.processor._attention_backend == backend


def linear_rates(*, base: float = 0.02, warmup: int = 2, total: int = 7) -> list[float]:
    """Of the steps of the first run: up over the warm-up, then down to the total."""
    return [
        pytest.approx(
            base * min((step + 1) / warmup if step < warmup else 1, (total - step) / (total - warmup))
        )
        for step in range(5)
    ]


def facts(built: TrainingObjects, engine: GradientEngine) -> dict[str, Any]:
    """What became of the settings, by the name of what they stand for."""
    (group,) = built.optimizer.param_groups
    objective = built.validation_loss.errors.objective
    levels = objective.noise_levels
    first = next(built.batches)
    request = built.previews.requests[0]
    return {
        "lr": group["lr"],
        "beta1": group["betas"][0],
        "beta2": group["betas"][1],
        "eps": group["eps"],
        "weight_decay": group["weight_decay"],
        "rates": [built.learning_rate(step) for step in range(5)],
        "max_grad_norm": built.max_grad_norm,
        "train_seed": built.seed,
        "density": levels.density,
        "logit_mean": levels.logit_mean,
        "logit_std": levels.logit_std,
        "mode_scale": levels.mode_scale,
        "shift": levels.shift((16, 1, 4, 8)),
        "sigma_min": levels.sigma_min,
        "sigma_max": levels.sigma_max,
        "weighting": objective.weighting,
        "checkpointing": engine.flags["use_gradient_checkpointing"],
        "offload": engine.flags["use_gradient_checkpointing_offload"],
        "micro_batches": [len(batch.positions) for batch in first],
        "loss_name": built.validation_loss.name,
        "loss_seed": built.validation_loss.errors.seed,
        "loss_batch_size": built.validation_loss.errors.batch_size,
        "item_losses": (built.item_losses.errors.seed, built.item_losses.errors.batch_size),
        "prompts": [request.prompt for request in built.previews.requests],
        "vae_dtype": built.previews.vae_dtype,
        "width": request.width,
        "height": request.height,
        "num_inference_steps": request.num_inference_steps,
        "guidance_scale": request.guidance_scale,
        "preview_seed": request.seed,
    }


EXPECTED = {
    "lr": 0.02,
    "beta1": 0.8,
    "beta2": 0.95,
    "eps": 1e-6,
    "weight_decay": 0.03,
    "rates": linear_rates(),
    "max_grad_norm": 0.7,
    "train_seed": 11,
    "density": "logit_normal",
    "logit_mean": 0.25,
    "logit_std": 1.5,
    "mode_scale": 1.29,
    "shift": 3.5,
    "sigma_min": 0.125,
    "sigma_max": 0.875,
    "weighting": "bell",
    "checkpointing": True,
    "offload": True,
    "micro_batches": [2, 2, 2],
    "loss_name": "train_fixed_noise_loss",
    "loss_seed": 13,
    "loss_batch_size": 2,
    "item_losses": (13, 2),
    "prompts": ["a red circle", "a blue square on a white background"],
    "vae_dtype": torch.float32,
    "width": 80,
    "height": 48,
    "num_inference_steps": 9,
    "guidance_scale": 2.5,
    "preview_seed": 13,
}

MODE = {
    "objective.timestep_density": "mode",
    "objective.logit_mean": "0.0",
    "objective.logit_std": "1.0",
    "objective.mode_scale": "0.5",
}

CHANGES: list[tuple[dict[str, str], dict[str, Any]]] = [
    ({}, {}),
    ({"train.learning_rate": "0.04"}, {"lr": 0.04, "rates": linear_rates(base=0.04)}),
    ({"train.warmup_steps": "4"}, {"rates": linear_rates(warmup=4)}),
    ({"train.steps": "9"}, {"rates": linear_rates(total=9)}),
    (
        {"train.lr_scheduler": "constant"},
        {"rates": [pytest.approx(rate) for rate in (0.01, 0.02, 0.02, 0.02, 0.02)]},
    ),
    ({"train.adam_beta1": "0.6"}, {"beta1": 0.6}),
    ({"train.adam_beta2": "0.9"}, {"beta2": 0.9}),
    ({"train.adam_epsilon": "1e-5"}, {"eps": 1e-5}),
    ({"train.weight_decay": "0.05"}, {"weight_decay": 0.05}),
    ({"train.max_grad_norm": "0.3"}, {"max_grad_norm": 0.3}),
    ({"train.max_grad_norm": "null"}, {"max_grad_norm": float("inf")}),
    ({"train.seed": "17"}, {"train_seed": 17}),
    (MODE, {"density": "mode", "logit_mean": 0.0, "logit_std": 1.0, "mode_scale": 0.5}),
    ({"objective.logit_mean": "-0.5"}, {"logit_mean": -0.5}),
    ({"objective.logit_std": "0.75"}, {"logit_std": 0.75}),
    ({"objective.shift_value": "2.5"}, {"shift": 2.5}),
    ({"objective.shift": "none", "objective.shift_value": "null"}, {"shift": 1.0}),
    ({"objective.sigma_min": "0.25"}, {"sigma_min": 0.25}),
    ({"objective.sigma_max": "0.75"}, {"sigma_max": 0.75}),
    ({"objective.loss_weighting": "cosmap"}, {"weighting": "cosmap"}),
    ({"train.use_gradient_checkpointing_offload": "false"}, {"offload": False}),
    (
        {
            "train.use_gradient_checkpointing": "false",
            "train.use_gradient_checkpointing_offload": "false",
        },
        {"checkpointing": False, "offload": False},
    ),
    ({"train.global_batch_size": "4"}, {"micro_batches": [2, 2]}),
    (
        {"train.micro_batch_size": "3"},
        {"micro_batches": [3, 3], "loss_batch_size": 3, "item_losses": (13, 3)},
    ),
    ({"validation.seed": "19"}, {"loss_seed": 19, "preview_seed": 19, "item_losses": (19, 2)}),
    ({"validation.width": "96"}, {"width": 96}),
    ({"validation.width": "null"}, {"width": 64}),
    ({"validation.height": "16"}, {"height": 16}),
    ({"validation.height": "null"}, {"height": 32}),
    ({"validation.num_inference_steps": "21"}, {"num_inference_steps": 21}),
    ({"validation.guidance_scale": "5.5"}, {"guidance_scale": 5.5}),
    ({"model.vae_dtype": "bfloat16"}, {"vae_dtype": torch.bfloat16}),
]


@pytest.mark.parametrize(
    ("changes", "expected"),
    CHANGES,
    ids=[", ".join(f"{key}={value}" for key, value in changes.items()) or "base" for changes, _ in CHANGES],
)
def test_a_setting_changes_what_it_stands_for_and_nothing_else(
    prepared: Prepared, changes: dict[str, str], expected: dict[str, Any]
) -> None:
    assert (
        facts(prepared.build(changes), build_engine(prepared.config(changes), WeightStream([], CPU)))
        == EXPECTED | expected
    )


def test_the_shift_of_the_resolution_is_that_of_the_diffusers_pipeline(prepared: Prepared) -> None:
    shift = _levels(prepared, "resolution").shift
    for num_tokens, shape in ((8, (16, 1, 4, 8)), (4096, (16, 1, 128, 128))):
        mu = calculate_shift(num_tokens, base_seq_len=256, max_seq_len=8192, base_shift=0.5, max_shift=0.9)
        assert shift(shape) == pytest.approx(torch.tensor(mu).exp().item())


def test_the_shift_of_the_family_is_the_familys_own(prepared: Prepared) -> None:
    class Shifted(QwenImage):
        def family_shift(self, latents_shape: Sequence[int]) -> float:
            return float(latents_shape[-1])

    checked = dataclasses.replace(prepared.checked, family=Shifted(prepared.checked.family.folder))
    assert _levels(prepared, "family", checked=checked).shift((16, 1, 4, 8)) == 8.0
    assert _levels(prepared, "resolution", checked=checked).shift((16, 1, 4, 8)) < 2.0


@pytest.mark.parametrize(
    ("changes", "sizes"),
    [
        ({}, {"64x32": 8.0}),
        ({"data.width": "null", "data.height": "null", "data.resolutions": [100]}, {"96x96": 12, "48x48": 6}),
        ({"data.width": "null", "data.height": "null", "data.sizes": ["32x64"]}, {"32x64": 4.0}),
    ],
)
def test_a_run_is_known_by_its_shifts_at_the_sizes_of_the_config(
    prepared: Prepared, changes: dict[str, Any], sizes: dict[str, float]
) -> None:
    config = prepared.config(changes)
    found = shifts_by_size(config, prepared.checked.family, lambda latents_shape: float(latents_shape[-1]))
    assert found == sizes


def _levels(prepared: Prepared, shift: str, **objects: Any) -> Any:
    changes = {"objective.shift": shift, "objective.shift_value": "null"}
    return prepared.build(changes, **objects).validation_loss.errors.objective.noise_levels


def test_training_and_the_fixed_noise_loss_have_one_objective(prepared: Prepared) -> None:
    built = prepared.build()
    assert built.losses.__self__ is built.validation_loss.errors.objective
    assert built.validation_loss.errors.objective.family is prepared.checked.family
    assert built.validation_loss.items is prepared.encoded.validation_items
    assert len(built.validation_loss.items) == int(SETTINGS["validation.loss_items"])
    assert built.validation_loss.name == "train_fixed_noise_loss"
    assert prepared.build({"validation.data": "elsewhere"}).validation_loss.name == "validation_loss"
    assert built.item_losses.errors.objective is built.validation_loss.errors.objective
    assert [item.position for item in built.item_losses.items] == [0, 2, 4]  # evenly spread, of five


def test_the_losses_of_single_items_are_those_of_the_plain_model_on_their_noise(
    prepared: Prepared, tmp_path: Path
) -> None:
    built = prepared.build({"train.micro_batch_size": "1"}, folder=RunFolder(tmp_path))
    built.item_losses.record(prepared.transformer, 0)
    (row,) = MetricsFile(RunFolder(tmp_path).item_losses_file).rows()
    model = prepared.transformer.eval()
    for place, levels in zip((0, 2, 4), row["by_level"], strict=True):
        kept = prepared.encoded.items.row(place)
        tensors = prepared.encoded.tensors.read(kept.media_key), prepared.encoded.tensors.read(kept.keys[1])
        latents = tensors[0]["latents"]
        for level, found in enumerate(levels):
            noise = normal(13, "item-noise", 3 * place + level, latents.shape)
            sigma = torch.tensor([(1 + 2 * level) / 6])
            noisy = (1 - sigma) * latents + sigma * noise
            with torch.no_grad():
                velocity = prepared.checked.family.predict(model, noisy[None], sigma, [tensors[1]])[0]
            assert found == pytest.approx((velocity - (noise - latents)).square().mean().item(), rel=1e-6)
    model.train()


def _samples(built: TrainingObjects, num_steps: int) -> list[Batch]:
    return [batch for _ in range(num_steps) for batch in next(built.batches)]


def test_a_pass_shows_each_image_as_often_as_it_is_repeated(prepared: Prepared) -> None:
    changes = {"train.global_batch_size": "5", "train.micro_batch_size": "5"}
    thrice = [name for batch in _samples(prepared.build(changes), 3) for name in batch.names]
    assert set(Counter(thrice).values()) == {3}
    assert len(set(thrice[:NUM_IMAGES])) < NUM_IMAGES  # one pass of 15, not three of 5
    once = _samples(prepared.build(changes | {"data.repeats": "1"}), 2)
    assert [len(set(batch.names)) for batch in once] == [NUM_IMAGES] * 2


def test_noise_and_order_follow_the_seed_of_the_training(prepared: Prepared) -> None:
    built = {seed: _samples(prepared.build({"train.seed": str(seed)}), 5) for seed in (11, 17)}
    for seed, batches in built.items():
        assert torch.equal(batches[0].noise[1], normal(seed, "noise", 1, (16, 1, 4, 8)))
    first, second = ([name for batch in batches for name in batch.names] for batches in built.values())
    assert first != second


def test_the_data_have_their_size_and_go_on_at_the_step_that_the_run_starts_with(prepared: Prepared) -> None:
    batches = _samples(prepared.build(start_step=4), 1)
    assert [batch.positions for batch in batches] == [[24, 25], [26, 27], [28, 29]]
    assert batches[0].latents.shape == (2, 16, 1, 32 // 8, 64 // 8)


def test_each_process_takes_its_own_share(prepared: Prepared) -> None:
    def positions(process_index: int) -> list[list[int]]:
        accelerator = SimpleNamespace(
            **vars(PROCESS) | {"num_processes": 3, "process_index": process_index, "is_main_process": False}
        )
        return [batch.positions for batch in _samples(prepared.build(accelerator=accelerator), 1)]

    assert [positions(index) for index in range(3)] == [[[0, 1]], [[2, 3]], [[4, 5]]]


def test_previews_are_conditioned_on_their_prompt_and_the_negative_one(
    prepared: Prepared, tmp_path: Path
) -> None:
    folder = RunFolder(tmp_path)
    built, config = prepared.build(folder=folder), prepared.config().validation
    assert built.previews.folder == folder.previews_folder
    assert built.previews.family is prepared.checked.family
    encode = prepared.checked.family.load_prompt_encoder(torch.float32, CPU)
    *prompts, negative = (
        encode([Prompt(text=text)])[0]["prompt_embeds"] for text in (*config.prompts, config.negative_prompt)
    )
    assert len({len(embeds) for embeds in (*prompts, negative)}) == 3  # none can be in for another
    for request, embeds in zip(built.previews.requests, prompts, strict=True):
        # Encoded in a batch: other sums of fp32 numbers.
        torch.testing.assert_close(request.conditioning["prompt_embeds"], embeds)
        torch.testing.assert_close(request.negative["prompt_embeds"], negative)


def test_the_run_trains_the_model_and_the_optimizer_that_it_was_given(prepared: Prepared) -> None:
    given: list[torch.nn.Module] = []
    under_autocast = torch.nn.Identity()

    def prepare_model(model: torch.nn.Module, *, evaluation_mode: bool) -> torch.nn.Module:
        assert evaluation_mode  # else DDP is put around it
        given.append(model)
        return under_autocast

    accelerator = SimpleNamespace(**vars(PROCESS) | {"prepare_model": prepare_model})
    optimizer = build_optimizer(prepared.config(), prepared.transformer, prepared.checked.groups)
    built = prepared.build(accelerator=accelerator, optimizer=optimizer)
    assert given == [prepared.transformer]
    assert built.transformer is under_autocast
    assert built.optimizer is optimizer
    assert built.accelerator is accelerator


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
    assert default_size(config).alpha == alpha


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
