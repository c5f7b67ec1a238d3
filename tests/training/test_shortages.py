"""What runs short is named with what would help."""

import dataclasses
import errno
import re
from pathlib import Path

import pytest
import torch
from torch.distributed import DistBackendError

from diffsynth_lite.errors import RunStoppedError, UserError
from diffsynth_lite.training.shortages import (
    MemoryUse,
    Workload,
    levers,
    out_of_memory_explained,
    shortages_explained,
)

MIB = 2**20
# A block's input: 2 samples x 4096 tokens x 3072 values x 2 bytes = 48 MiB.
WORKLOAD = Workload(
    tokens=4096,
    width=3072,
    micro_batch_size=2,
    num_blocks=60,
    streamable_bytes=0,
    quantizable_bytes=0,
    num_checkpointed=60,
    offloads=False,
    blocks_on_device=2,
    has_token_budget=False,
    float32_bytes=0,
)
USE = MemoryUse(weights=40_000 * MIB, trained=600 * MIB, peak=46_600 * MIB)


def texts(use: MemoryUse = USE, **changes: object) -> list[str]:
    return levers(dataclasses.replace(WORKLOAD, **changes), use)


def test_the_setting_that_saves_most_comes_first_with_an_estimate() -> None:
    assert texts() == [
        "train.micro_batch_size: 1 (about 2.9 GiB less)",
        "half of the pixels or frames (data.resolutions, data.sizes, data.frame_counts) (about 2.9 GiB less)",
        "--use_gradient_checkpointing_offload (about 2.7 GiB less)",
    ]


def test_what_is_on_already_is_not_advised() -> None:
    assert not any("offload" in text for text in texts(offloads=True))
    assert not any("micro_batch_size" in text for text in texts(micro_batch_size=1))
    assert not any("dtype" in text for text in texts())


@pytest.mark.parametrize(
    ("changes", "first", "never"),
    [
        ({"num_checkpointed": 0}, "--use_gradient_checkpointing (about 55.3 GiB less)", "offload"),
        ({"streamable_bytes": 30_000 * MIB}, "memory.stream_blocks: all (about 29.3 GiB less)", None),
        (
            {"quantizable_bytes": 10_240 * MIB},
            "model.quantize: int8, in a new run (about 10.0 GiB less)",
            None,
        ),
        ({"float32_bytes": 40_000 * MIB}, "model.dtype: bfloat16 (about 19.5 GiB less)", None),
    ],
)
def test_what_helps_most_comes_first(changes: dict[str, int], first: str, never: str | None) -> None:
    found, *others = texts(**changes)
    assert found == first
    assert never is None or not any(never in text for text in others)
    assert first not in texts()
    assert not any("stream" in text or "quantize" in text for text in texts())


def test_blocks_that_a_policy_keeps_are_counted() -> None:
    assert "memory.policy: all (about 8.4 GiB less)" in texts(num_checkpointed=50)


def test_what_would_save_nothing_is_not_advised() -> None:
    few = {"num_blocks": 2, "num_checkpointed": 2}
    assert not any("offload" in text for text in texts(**few))
    assert any("offload (about 48.0 MiB less)" in text for text in texts(**few, blocks_on_device=1))
    # The one block that is kept would be recomputed on the device.
    assert not any("memory.policy" in text for text in texts(num_blocks=2, num_checkpointed=1))


def test_a_token_budget_is_what_is_lowered_where_there_is_one() -> None:
    assert any(text.startswith("half of train.micro_batch_tokens") for text in texts(has_token_budget=True))


def test_nothing_is_estimated_that_is_not_known() -> None:
    found = texts(use=dataclasses.replace(USE, peak=None), width=None)
    assert found == [
        "--use_gradient_checkpointing_offload",
        "train.micro_batch_size: 1",
        "half of the pixels or frames (data.resolutions, data.sizes, data.frame_counts)",
    ]


def test_the_error_says_what_the_memory_was_used_for() -> None:
    model = torch.nn.Sequential(
        torch.nn.Linear(1024, 1024, bias=False), torch.nn.Linear(1024, 256, bias=False)
    )
    model[0].requires_grad_(False)
    optimizer = torch.optim.AdamW(model[1].parameters())
    model(torch.ones(1, 1024)).sum().backward()
    optimizer.step()
    use = MemoryUse.of(model, optimizer)
    # 4 MiB of weights; 1 MiB trained, with its gradient, two moments and a step count of 4 bytes.
    assert (use.weights, use.trained, use.peak) == (4 * MIB, 4 * MIB + 4, None)
    assert MemoryUse.of(model, optimizer, slot_bytes=MIB).weights == 5 * MIB
    with (
        pytest.raises(
            RunStoppedError,
            match=r"allocate 2 GiB.*4\.0 MiB of frozen weights.*helps most.*By count: x=1",
        ),
        out_of_memory_explained(WORKLOAD, model, optimizer, plan=lambda: "By count: x=1"),
    ):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.\nmore")
    with (
        pytest.raises(RunStoppedError, match=r"Tried to allocate 2 GiB.*could not be counted: division"),
        out_of_memory_explained(WORKLOAD, model, optimizer, plan=lambda: str(1 / 0)),
    ):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.\nmore")


NO_MEMORY = "CUDA out of memory. Tried to allocate 2 GiB.\nmore"
WORKER = "DataLoader worker (pid 7) is killed by signal: Killed."


@pytest.mark.parametrize(
    ("error", "folder", "expected", "message"),
    [
        (OSError(errno.ENOSPC, "No space"), None, RunStoppedError, "no space left on the disk"),
        (
            OSError(errno.EMFILE, "Too many"),
            None,
            RunStoppedError,
            r"may open no more than \d+ \(ulimit -n\)",
        ),
        (
            OSError(errno.EIO, "Input/output error", "a"),
            None,
            RunStoppedError,
            "a disk fails .*Input/output error",
        ),
        (OSError(errno.EROFS, "Read-only", "run/a"), Path("run"), RunStoppedError, "a disk fails"),
        (
            torch.OutOfMemoryError(NO_MEMORY),
            None,
            RunStoppedError,
            r"before training.*vae_tiling: true.*vae_dtype",
        ),
        (torch.OutOfMemoryError(), None, RunStoppedError, r"before training.*vae_tiling: true.*vae_dtype"),
        (OSError(errno.EROFS, "Read-only", "cache/ab"), None, UserError, "cache/ab: Read-only"),
        (
            OSError(errno.EISDIR, "Is a directory", "run/.tmp-lora", None, "run/lora"),
            *(None, UserError, r"run/lora: Is a directory; .*move it aside"),
        ),
        (FileNotFoundError(errno.ENOENT, "No file"), Path("no run"), RunStoppedError, "no run was renamed"),
        (FileNotFoundError(errno.ENOENT, "No file"), Path.cwd(), FileNotFoundError, "No file"),
        (TimeoutError(errno.ETIMEDOUT, "timed out"), None, TimeoutError, "timed out"),
        (
            RuntimeError("DataLoader timed out after 300 seconds"),
            None,
            RunStoppedError,
            r"worker died or hangs \(Da",
        ),
        (RuntimeError(WORKER), None, RunStoppedError, r"a data worker died or hangs \(DataLoader"),
        (
            RuntimeError("Caught KeyError in DataLoader worker process 0."),
            None,
            RuntimeError,
            "Caught KeyError",
        ),
        (RunStoppedError("not finite"), None, RunStoppedError, "not finite"),
    ],
)
def test_a_shortage_is_explained_and_a_bug_is_not(
    error: Exception, folder: Path | None, expected: type[Exception], message: str
) -> None:
    given = () if folder is None else (folder,)
    with pytest.raises(expected, match=message) as caught, shortages_explained(*given):
        raise error
    assert type(caught.value) is expected


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (RuntimeError("[/x/gloo/transport/tcp/pair.cc:538] Connection closed by peer"), "closed by peer"),
        (DistBackendError("NCCL error\nLast error:\nno route\nException raised from a.cpp"), "no route)"),
    ],
)
def test_a_process_that_is_gone_is_explained(error: RuntimeError, message: str) -> None:
    explained = f"^the processes of this run could not reach each other .*{re.escape(message)}.*continues"
    with pytest.raises(RunStoppedError, match=explained), shortages_explained(), shortages_explained():
        raise error
