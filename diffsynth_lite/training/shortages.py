"""This file explains what a run lacked: device memory and what used it, host memory, disk, its processes."""

import errno
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from diffsynth_lite.core.gradient import HostBytesError
from diffsynth_lite.core.units import format_bytes
from diffsynth_lite.core.weights.sharding import local_bytes
from diffsynth_lite.data.workers import is_lost_worker
from diffsynth_lite.errors import RunStoppedError, UserError, lacks_files
from diffsynth_lite.files import DISK_FULL
from diffsynth_lite.run_folder.folder import folder_is_gone
from diffsynth_lite.training.distributed.watchdog import is_lost_process

_ACTIVATIONS_PER_INPUT = 20
"""Activations that a block keeps without checkpointing, over its input: 19 to 40 in the models measured in
docs/benchmarks.md; the least of them, so that no more is promised than is held."""
_BYTES_PER_VALUE = 2
"""Of activations under autocast."""
_NUM_LEVERS = 3
_DISK_FAILS = (errno.EIO, errno.ESTALE)
_NOT_WRITABLE = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR)
_IN_THE_WAY = (errno.EISDIR, errno.EEXIST, errno.ENOTEMPTY, errno.ELOOP)


if sys.platform != "win32":
    import resource


@dataclass(frozen=True, kw_only=True)
class Workload:
    """What decides how much memory a step takes.

    Attributes:
        tokens: of one sample of the largest bucket.
        width: values of a token between blocks; None where the model's config lacks it.
        streamable_bytes: frozen weights that would leave the device if all blocks were streamed.
        quantizable_bytes: what those on the device would take less in int8.
        num_checkpointed: blocks that are checkpointed; 0 with checkpointing off.
        offloads: whether the inputs of these are offloaded to host memory.
        blocks_on_device: how many have their inputs on the device at once, with offload on.
        has_token_budget: whether a token budget decides how many samples go through at once.
        float32_bytes: frozen weights on the device that ``model.dtype`` keeps in fp32.
    """

    tokens: int
    width: int | None
    micro_batch_size: int
    num_blocks: int
    streamable_bytes: int
    quantizable_bytes: int
    num_checkpointed: int
    offloads: bool
    blocks_on_device: int
    has_token_budget: bool
    float32_bytes: int


@dataclass(frozen=True, kw_only=True)
class MemoryUse:
    """Bytes on the device: frozen weights, trained weights with their optimizer, and the peak of all."""

    weights: int
    trained: int
    peak: int | None

    @classmethod
    def of(
        cls, model: torch.nn.Module, optimizer: torch.optim.Optimizer, *, slot_bytes: int = 0
    ) -> "MemoryUse":
        """The memory of a model and its optimizer, and the device's own count where it has one."""
        frozen = [parameter for parameter in model.parameters() if not parameter.requires_grad]
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        state = [value for entry in optimizer.state.values() for value in entry.values()]
        device = next(model.parameters()).device
        return cls(
            weights=_num_bytes(frozen) + slot_bytes,
            # Each of them has a gradient too.
            trained=2 * _num_bytes(trained) + _num_bytes(state),
            peak=torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None,
        )

    @property
    def activations(self) -> int | None:
        """Everything else at the peak: activations above all; None where the device does not count."""
        return None if self.peak is None else max(0, self.peak - self.weights - self.trained)


@contextmanager
def out_of_memory_explained(
    workload: Workload,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    plan: Callable[[], str],
    slot_bytes: int = 0,
) -> Iterator[None]:
    """Scope in which a full device ends the run with an account of its memory and of settings that help.

    Args:
        plan: describes the settings that are estimated to fit.
    """
    try:
        yield
    except torch.OutOfMemoryError as error:
        use = MemoryUse.of(model, optimizer, slot_bytes=slot_bytes)
        first_line = str(error).partition("\n")[0]
        message = (
            f"out of memory: {first_line} In use: {_in_words(use)}. What helps most: "
            f"{'; '.join(levers(workload, use)[:_NUM_LEVERS])}"
        )
        try:
            message += f". {plan()}"
        except Exception as failure:  # no failure of the estimate may hide the lack of memory
            raise RunStoppedError(f"{message}. What would fit could not be counted: {failure}") from failure
        raise RunStoppedError(message) from error


@contextmanager
def shortages_explained(run_folder: Path | None = None) -> Iterator[None]:
    """Scope in which a lack of memory, disk space or processes ends the run with what would help.

    Args:
        run_folder: once it exists; an error is explained, too, where it was removed.

    Raises:
        RunStoppedError: instead of torch's, safetensors' and the system's own errors.
        UserError: for a file or folder that may not be written, and for too little host memory.
    """
    try:
        yield
    except torch.OutOfMemoryError as error:
        first_line = str(error).partition("\n")[0]
        raise RunStoppedError(
            f"out of memory before training: {first_line} What helps: for images and clips, "
            "model.vae_tiling: true, smaller or shorter ones (data.resolutions, data.sizes, "
            "data.frame_counts), or model.vae_dtype: bfloat16; for captions, model.text_encoder_dtype: "
            "bfloat16, model.text_encoder_quantize: int8 or nf4, or memory.stream_text_encoder: true"
        ) from error
    except HostBytesError as error:
        raise UserError(
            f"memory.host_gib: {error.host_bytes / 1024**3:.3g} GiB for the offload do not hold the "
            f"{error.block_bytes / 1024**3:.3g} GiB that one block offloads; raise it, or lower "
            "train.micro_batch_size, or turn offload off"
        ) from error
    except RunStoppedError:  # explained in an inner scope
        raise
    except (RuntimeError, OSError) as error:
        if lacks_files(error):
            explained: UserError | RunStoppedError | None = _of_open_files()
        elif isinstance(error, RuntimeError):
            explained = _of_processes(error)
        else:
            explained = _of_the_disk(error, run_folder)
        if explained is None:
            raise
        raise explained from error


def _of_processes(error: RuntimeError) -> RunStoppedError | None:
    """The error in place of torch's about another process; None if that is about something else."""
    first_line = str(error).partition("\n")[0]
    # Raised at any place: torch learns by a signal that a worker has died.
    if is_lost_worker(error):
        return RunStoppedError(
            f"a data worker died or hangs ({first_line}): look at the host's memory and at "
            "the disk of data.cache_dir, or set data.num_workers: 0; the same command continues the run"
        )
    if is_lost_process(error):
        # NCCL gives the cause in the lines after the first, up to a stack; gloo continues with advice.
        lines = str(error).partition("\nException raised")[0].splitlines()
        reason = "; ".join(line.partition(". ")[0] for line in lines)
        return RunStoppedError(
            f"the processes of this run could not reach each other ({reason}): one of them has ended or "
            "hangs, or the network between them is cut; the output of the others shows which. The same "
            "command, on all machines, continues the run from its newest checkpoint"
        )
    return None


def _of_open_files() -> RunStoppedError:
    limit = "" if sys.platform == "win32" else f" than {resource.getrlimit(resource.RLIMIT_NOFILE)[0]}"
    return RunStoppedError(
        f"too many open files: this process, or a data worker, may open no more{limit} (ulimit -n), and each "
        "tensor that a worker hands over is one. Raise that limit, or lower data.num_workers (0 needs none); "
        "the same command continues the run"
    )


def _of_the_disk(error: OSError, run_folder: Path | None) -> UserError | RunStoppedError | None:
    """The error in place of the system's about files; None where there is none."""
    place = error.filename2 or error.filename
    if error.errno in DISK_FULL:
        return RunStoppedError(
            f"no space left on the disk ({error}); checkpoints already written are intact, "
            "and the same command continues the run"
        )
    if run_folder is not None and error.errno == errno.ENOENT and not run_folder.is_dir():
        return RunStoppedError(folder_is_gone(run_folder))
    # Linux makes a disk read-only after an error of it; in the run folder this run has written before.
    was_writable = run_folder is not None and Path(str(place)).is_relative_to(run_folder)
    if error.errno in _DISK_FAILS or (error.errno == errno.EROFS and was_writable):
        return RunStoppedError(
            f"a disk fails ({error}); once it is well, the same command continues the run from the newest "
            "checkpoint that can be read"
        )
    if error.errno in _NOT_WRITABLE:
        return UserError(f"{place}: {error.strerror}; output.dir and data.cache_dir must be writable folders")
    if error.errno in _IN_THE_WAY:
        return UserError(f"{place}: {error.strerror}; what is there is in the way of the run: move it aside")
    return None


def levers(workload: Workload, use: MemoryUse) -> list[str]:
    """The settings that would save memory, the one that saves most first, each with an estimate."""
    found = list(_of_blocks(workload)) + list(_of_batches(workload, use))
    found.append((workload.float32_bytes // 2, "model.dtype: bfloat16"))
    found.append((workload.streamable_bytes, "memory.stream_blocks: all"))
    found.append((workload.quantizable_bytes, "model.quantize: int8, in a new run"))
    known = sorted((lever for lever in found if lever[0]), key=lambda lever: -(lever[0] or 0))
    unknown = [lever for lever in found if lever[0] is None]
    return [
        f"{text} (about {format_bytes(saved)} less)" if saved else text for saved, text in (*known, *unknown)
    ]


def _of_blocks(workload: Workload) -> Iterator[tuple[int | None, str]]:
    block_input = None
    if workload.width is not None:
        samples = workload.micro_batch_size
        block_input = samples * workload.tokens * workload.width * _BYTES_PER_VALUE
    kept = workload.num_blocks - workload.num_checkpointed
    if kept:
        switch = "memory.policy: all" if workload.num_checkpointed else "--use_gradient_checkpointing"
        # The activations of one block are on the device while it is recomputed.
        yield (block_input and block_input * _ACTIVATIONS_PER_INPUT * (kept - 1)), switch
    offloaded = workload.num_checkpointed - workload.blocks_on_device
    if offloaded > 0 and not workload.offloads:
        yield (block_input and block_input * offloaded), "--use_gradient_checkpointing_offload"


def _of_batches(workload: Workload, use: MemoryUse) -> Iterator[tuple[int | None, str]]:
    half = use.activations and use.activations // 2
    if workload.has_token_budget:
        yield half, "half of train.micro_batch_tokens"
    elif workload.micro_batch_size > 1:
        yield half, f"train.micro_batch_size: {workload.micro_batch_size // 2}"
    yield half, "half of the pixels or frames (data.resolutions, data.sizes, data.frame_counts)"


def _num_bytes(tensors: list[torch.Tensor] | list[torch.nn.Parameter]) -> int:
    return local_bytes(tensor for tensor in tensors if isinstance(tensor, torch.Tensor))


def _in_words(use: MemoryUse) -> str:
    parts = [(use.weights, "of frozen weights"), (use.trained, "of the LoRA and its optimizer")]
    if use.activations is not None:
        parts.append((use.activations, "of activations and the rest, at the peak"))
    return ", ".join(f"about {format_bytes(num_bytes)} {what}" for num_bytes, what in parts)
