"""What processes cannot share of samples is refused before weights load, with what would do."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from diffsynth_lite.config import Config, load_config
from diffsynth_lite.data.buckets import Bucket
from diffsynth_lite.errors import UserError
from diffsynth_lite.pipelines import flux, qwen_image, wan
from diffsynth_lite.training.distributed import agreement
from diffsynth_lite.training.distributed.context import check_context, check_split, check_tokens


def config_with(*settings: str) -> Config:
    return load_config("wan22_ti2v_5b_lora.yaml", ["data.path=clips", *settings]).config


def processes(num: int, device: str = "cuda") -> SimpleNamespace:
    return SimpleNamespace(num_processes=num, device=torch.device(device), local_process_index=0)


@pytest.mark.parametrize(
    ("settings", "num", "local", "refused"),
    [
        (("train.context_parallel=2",), 1, [0], r"this is the only one; start one for each device"),
        (
            ("train.context_parallel=3",),
            4,
            [0, 1, 2, 3],
            r"3 must divide the 4 processes .*1, 2 or 4 would",
        ),
        (("train.context_parallel=2",), 4, [0, 0, 1, 2], r"of each machine, which have 1, 3; 1 would do"),
    ],
)
def test_processes_that_cannot_share_samples_are_refused(
    monkeypatch: pytest.MonkeyPatch,
    settings: tuple[str, ...],
    num: int,
    local: list[int],
    refused: str,
) -> None:
    monkeypatch.setattr(agreement, "on_all_processes", lambda _accelerator, _work: local)
    check_context(config_with(), processes(1))
    with pytest.raises(UserError, match=rf"train\.context_parallel: .*{refused}"):
        check_context(config_with(*settings), processes(num))


def test_a_ring_is_refused_where_it_would_fail_or_be_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agreement, "on_all_processes", lambda _accelerator, _work: [0, 1])
    ring = ("train.context_parallel=2", "train.context_parallel_kind=ring")
    check_context(config_with(*ring), processes(2))
    key = r"train\.context_parallel_kind: ring"
    with pytest.raises(UserError, match=rf"{key} .*this run is on cpu; set ulysses"):
        check_context(config_with(*ring), processes(2, "cpu"))
    in_32_bits = config_with(*ring, "model.dtype=float32", "train.mixed_precision=no")
    with pytest.raises(UserError, match=rf"{key} needs attention in 16 bits, and model\.dtype: float32"):
        check_context(in_32_bits, processes(2))
    check_context(config_with(ring[0]), processes(2))


@pytest.mark.parametrize(
    "settings",
    [
        ("train.context_parallel=2", "lora.dropout=0.1"),
        ("train.context_parallel=2", "train.compile=blocks"),
        ("train.context_parallel=2", "model.dtype=float32"),
        ("train.context_parallel_kind=ring",),
        ("train.context_parallel=2", "train.context_parallel_kind=ring", "memory.save_attention=keep"),
    ],
)
def test_settings_that_context_parallelism_cannot_do_are_refused(settings: tuple[str, ...]) -> None:
    with pytest.raises(UserError, match=r"context_parallel"):
        config_with(*settings)


def split_family(**facts: Any) -> Any:
    """A family of one model with 6 heads, which prompts of 512 tokens condition."""
    config = SimpleNamespace(num_attention_heads=6)
    model = facts.pop("model", SimpleNamespace(_cp_plan={}, config=config))
    known = {
        "sequence_split": wan.Wan.sequence_split,
        "max_prompt_tokens": 512,
        "trained": ("transformer",),
        "with_audio": False,
        "parts_of": lambda model: {"transformer": model},
    }
    return SimpleNamespace(**known | facts), model


def test_models_that_cannot_be_split_are_refused_with_what_would_do() -> None:
    def refuse(text: str, *settings: str, **facts: Any) -> None:
        with pytest.raises(UserError, match=text):
            check_split(config_with(*settings), *split_family(**facts))

    check_split(config_with(), *split_family(sequence_split=None))
    check_split(config_with(), *split_family(with_audio=True))
    refuse("2: clips with audio are not split", "train.context_parallel=2", with_audio=True)
    check_split(config_with("train.context_parallel=3"), *split_family())
    refuse("4 does not divide the 6 attention heads .*; 1, 2, 3 or 6 would", "train.context_parallel=4")
    ring = ("train.context_parallel=4", "train.context_parallel_kind=ring")
    check_split(config_with(*ring), *split_family())
    refuse(
        "3 does not divide the 512 tokens of a prompt; 1 or 2 would",
        "train.context_parallel=3",
        sequence_split=flux.Flux.sequence_split,
    )
    refuse(
        "ring would compute other numbers in wan, .*; set ulysses",
        *ring,
        sequence_split=qwen_image.QwenImage.sequence_split,
    )
    refuse("has no plan to split", "train.context_parallel=2", sequence_split=None)
    refuse("has no plan to split", "train.context_parallel=2", model=torch.nn.Linear(1, 1))


def test_sizes_whose_tokens_do_not_divide_are_named() -> None:
    family: Any = SimpleNamespace(
        latents_shape=lambda width, height, frames: (frames, height // 16, width // 16),
        num_given_tokens=lambda _: 0,
        num_tokens=lambda shape: shape[0] * shape[1] * shape[2],
    )
    sizes = [Bucket(width=96, height=64), Bucket(width=96, height=48), Bucket(width=48, height=48)]
    check_tokens(config_with(), family, sizes)
    check_tokens(config_with("train.context_parallel=3"), family, sizes)
    refused = (
        r"2 does not divide the tokens of 1 of the 3 sizes of the data: 48x48 \(9 tokens\); 1 or 3 would"
    )
    with pytest.raises(UserError, match=refused):
        check_tokens(config_with("train.context_parallel=2"), family, sizes)
