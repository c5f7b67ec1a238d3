"""DiffSynth-Studio's own training loop, on the mini Qwen-Image."""

import importlib.machinery
import importlib.util
import sys
import tempfile
import threading
import types
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import transformers
from accelerate import Accelerator
from safetensors.torch import load_file
from torch import Tensor, nn

from peer_loops import LEARNING_RATE, WEIGHT_DECAY, MicroBatch, Work, padded

_NEVER = 10**9


@contextmanager
def _torchvision_there() -> Iterator[None]:
    """Scope in which torchvision can be imported, also where none is installed for this torch.

    DiffSynth-Studio reads images by it, and nothing of that is measured.
    """
    if importlib.util.find_spec("torchvision") is not None:
        yield
        return
    # First, and without it: what transformers imports would take the empty module for the real one.
    assert transformers.Qwen2_5_VLForConditionalGeneration
    empty = types.ModuleType("torchvision")
    empty.__spec__ = importlib.machinery.ModuleSpec("torchvision", None)
    sys.modules["torchvision"] = empty
    try:
        yield
    finally:
        del sys.modules["torchvision"]


with _torchvision_there():
    from diffsynth.core.data.unified_dataset import UnifiedDataset
    from diffsynth.diffusion.logger import ModelLogger
    from diffsynth.diffusion.loss import FlowMatchSFTLoss
    from diffsynth.diffusion.runner import launch_training_task
    from diffsynth.diffusion.training_module import DiffusionTrainingModule
    from diffsynth.models.general_modules import AdaLayerNorm, RMSNorm, TimestepEmbeddings
    from diffsynth.models.qwen_image_dit import QwenEmbedRope, QwenImageDiT, QwenImageTransformerBlock
    from diffsynth.pipelines.qwen_image import QwenImagePipeline


class MiniDiT(QwenImageDiT):
    """Its Qwen-Image in the sizes of the mini base; the class has those of the release written into it."""

    def __init__(self) -> None:
        nn.Module.__init__(self)
        self.pos_embed = QwenEmbedRope(theta=10000, axes_dim=[8, 12, 12], scale_rope=True)
        self.time_text_embed = TimestepEmbeddings(
            256, 128, diffusers_compatible_format=True, scale=1000, align_dtype_to_timestep=False
        )
        self.txt_norm = RMSNorm(64, eps=1e-6)
        self.img_in, self.txt_in = nn.Linear(64, 128), nn.Linear(64, 128)
        self.transformer_blocks = nn.ModuleList(
            QwenImageTransformerBlock(dim=128, num_attention_heads=4, attention_head_dim=32) for _ in range(6)
        )
        self.norm_out = AdaLayerNorm(128, single=True)
        self.proj_out = nn.Linear(128, 64)


class TrainingModule(DiffusionTrainingModule):
    """The module of its ``examples/qwen_image/model_training/train.py``, which is not in the package.

    Args:
        pipe: with the model that gets the adapter.
        work: says which.
        begin_step: called where a step begins.
    """

    def __init__(self, pipe: QwenImagePipeline, work: Work, begin_step: Callable[[], None]) -> None:
        super().__init__()
        task = "sft:train"
        self.pipe = self.split_pipeline_units(task, pipe, None, "dit")
        layers = ",".join(work.layers)
        self.switch_pipe_to_training_mode(self.pipe, None, "dit", layers, work.rank, task=task)
        self._begin_step = begin_step

    def forward(self, _data: Any, inputs: Any) -> Any:
        self._begin_step()
        inputs = self.transfer_data_to_device(inputs, self.pipe.device, self.pipe.torch_dtype)
        for unit in self.pipe.units:
            inputs = self.pipe.unit_runner(unit, self.pipe, *inputs)
        shared, positive, _negative = inputs
        return FlowMatchSFTLoss(self.pipe, **shared, **positive)


class FusedAdamW(torch.optim.AdamW):
    """AdamW in one kernel; DiffSynth-Studio takes optimizers by their names."""

    def __init__(self, parameters: Any, **settings: Any) -> None:
        super().__init__(parameters, **settings, fused=True)


class DiffSynthStudio:
    """Its ``launch_training_task`` with its model, data set, loss and log, on cached inputs (``sft:train``).

    Batches of one: that is what its loader and its model take.

    Args:
        fused: whether AdamW is, through its option for other optimizers.
    """

    def __init__(self, work: Work, *, fused: bool) -> None:
        pipe = QwenImagePipeline(device="cpu", torch_dtype=torch.float32)
        pipe.dit = MiniDiT()
        pipe.dit.load_state_dict(load_file(work.base / "transformer" / "diffusion_pytorch_model.safetensors"))
        self._work, self._turns, self._fused = work, _Turns(), fused
        self._module = TrainingModule(pipe, work, self._turns.wait)
        self._pipe, self.model = pipe, pipe.dit

    def steps(self) -> Generator[None, None, None]:
        with tempfile.TemporaryDirectory() as folder:
            for place, batch in enumerate(self._work.batches):
                torch.save(self._inputs(batch), Path(folder) / f"{place}.pth")
            yield from self._turns.steps_of(partial(self._train, folder))

    def _train(self, folder: str) -> None:
        launch_training_task(
            Accelerator(gradient_accumulation_steps=1, mixed_precision="no"),
            UnifiedDataset(base_path=folder),
            self._module,
            ModelLogger(folder),
            learning_rate=LEARNING_RATE,
            weight_decay=WEIGHT_DECAY,
            num_workers=0,
            save_steps=_NEVER,
            num_epochs=_NEVER,
            customized_optimizer=f"{__name__}.{FusedAdamW.__name__}" if self._fused else None,
        )

    def _inputs(self, batch: MicroBatch) -> tuple[dict[str, Any], ...]:
        """What its first stage caches of a sample: of both prompts, of the wanted one, of the other one."""
        embeds, _mask = padded(batch)
        latents = batch.latents[:, :, 0]
        shared = {
            "input_latents": latents,
            "height": 8 * latents.shape[-2],
            "width": 8 * latents.shape[-1],
            "cfg_scale": 1,
            "rand_device": "cpu",
            "use_gradient_checkpointing": self._work.checkpointing,
            "use_gradient_checkpointing_offload": self._work.offload,
            "edit_image_auto_resize": True,
            "zero_cond_t": False,
        }
        mask = torch.ones(embeds.shape[:2], dtype=torch.long)
        return shared, {"prompt_emb": embeds, "prompt_emb_mask": mask}, {}

    def loss(self, batch: MicroBatch, sigma: Tensor) -> Tensor:
        shared, positive, _negative = self._inputs(batch)
        # It draws noise and level by itself, and weighs the loss by the level.
        given = {"timesteps": 1000 * sigma, "sigmas": sigma, "linear_timesteps_weights": torch.ones(1)}
        with ExitStack() as scope:
            scope.enter_context(patch.object(torch, "randn_like", lambda _latents: batch.noise[:, :, 0]))
            for name, value in given.items():
                scope.enter_context(patch.object(self._pipe.scheduler, name, value))
            loss: Tensor = FlowMatchSFTLoss(self._pipe, **shared, **positive)
        return loss.squeeze()


class _Turns:
    """Takes the steps of a loop that nobody can leave: it runs on a thread, which waits before each step."""

    def __init__(self) -> None:
        self._begin, self._ended = threading.Semaphore(0), threading.Semaphore(0)
        self._error: BaseException | None = None
        self._is_over = False

    def wait(self) -> None:
        """Wait for the next turn; the loop calls it where a step begins."""
        self._ended.release()
        self._begin.acquire()
        if self._is_over:
            sys.exit()

    def steps_of(self, loop: Callable[[], None]) -> Generator[None, None, None]:
        """Each ``next`` takes a step of ``loop``; the first one also what comes before it."""
        thread = threading.Thread(target=self._run, args=(loop,), daemon=True)
        thread.start()
        self._ended.acquire()
        try:
            while self._error is None:
                self._begin.release()
                self._ended.acquire()
                if self._error is None:
                    yield
            raise self._error
        finally:
            self._is_over = True
            self._begin.release()
            thread.join()

    def _run(self, loop: Callable[[], None]) -> None:
        try:
            loop()
        except BaseException as error:
            self._error = error
            self._ended.release()
            if not self._is_over:
                raise
