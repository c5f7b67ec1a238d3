"""This file has processes run a model together: they fail together, and split its sequences.

Context parallelism is diffusers': each process of a group computes a part of the tokens of the same samples;
attention sees all of them. diffusers splits and gathers as the ``_cp_plan`` of the model's class declares.
What comes out is whole in every process, and so is the loss; the gradient of a weight is the sum over all
processes of the group.
"""

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from diffsynth_lite.core.attention import keep_dtype
from diffsynth_lite.core.gradient import IneffectiveSwitchError


class PeerFailedError(RuntimeError):
    """Another process failed, between two forward passes that all of them run together."""


class FailedWithinPassError(RuntimeError):
    """This process failed within a forward pass, in which the others wait for it and cannot be informed."""


class JointPasses:
    """Forward passes that the processes of a group run together."""

    def __init__(self, group: torch.distributed.ProcessGroup, device: torch.device) -> None:
        self.device = device
        self._group = group
        self._asks_before_forward = self._is_in_forward = False

    def watch(self, model: nn.Module) -> None:
        """Know of the forward passes of a model."""
        # Before hooks of others, which wait for the other processes.
        model.register_forward_pre_hook(lambda *_: self._begin_forward(), prepend=True)
        model.register_forward_hook(lambda *_: self._end_forward())

    @contextmanager
    def failing_together(self) -> Iterator[None]:
        """Scope in which a process that fails between two forward passes makes the others fail at their next
        one, where they would wait for it; all of them enter it, and run as many passes.

        Raises:
            PeerFailedError: another process failed.
            FailedWithinPassError: this one did, within a pass.
        """
        self._asks_before_forward, self._is_in_forward = True, False
        try:
            yield
            self._require_all(succeeded=True)
        except PeerFailedError:
            raise
        except Exception as error:
            if self._is_in_forward:
                raise FailedWithinPassError(str(error)) from error
            self._require_all(succeeded=False)
            raise
        finally:
            self._asks_before_forward = False

    def _begin_forward(self) -> None:
        if self._asks_before_forward:
            self._require_all(succeeded=True)
        self._is_in_forward = True

    def _end_forward(self) -> None:
        self._is_in_forward = False

    def _require_all(self, *, succeeded: bool) -> None:
        answers = torch.tensor(int(succeeded), device=self.device)
        torch.distributed.all_reduce(answers, torch.distributed.ReduceOp.MIN, group=self._group)
        if succeeded and not answers:
            raise PeerFailedError("another process failed, and its error has the reason")


ContextKind = Literal["ulysses", "ring"]
"""``ulysses``: for attention, processes exchange tokens for heads. ``ring``: each attends to the keys and
values of one process after the other, and adds up."""

MESH_DIMENSIONS = ("data", "ring", "ulysses")
"""Of the mesh of all processes: the last two are those that share samples, and one of them is 1."""
_RING_BACKEND = "_native_flash"
"""diffusers' name of torch's flash attention; a ring needs a kernel that returns its log-sum-exp."""


@dataclass(frozen=True, kw_only=True)
class SequenceSplit:
    """How the sequences of a model family are split, in addition to the ``_cp_plan`` of its class.

    Attributes:
        prompts: whether they are ``whole`` in each process; ``split``, all of one length that has to divide;
            or ``padded`` until they can be split, and masked.
        whole_inputs: names of inputs that stay whole although the plan splits them.
        whole_attention: names of attention modules that read what is whole, and so compute by themselves.
        token_inputs: names of inputs that are split although the plan leaves them whole, where they have one
            number for each token: (B, tokens).
    """

    prompts: Literal["whole", "split", "padded"] = "whole"
    whole_inputs: tuple[str, ...] = ()
    whole_attention: tuple[str, ...] = ()
    token_inputs: tuple[str, ...] = ()

    @property
    def kinds(self) -> tuple[ContextKind, ...]:
        """Under which the numbers are those of the whole model: a ring has its own mask for all keys."""
        return ("ulysses",) if self.prompts == "padded" else ("ulysses", "ring")


@dataclass(frozen=True, kw_only=True)
class SplitReport:
    """What a process computes of the sequences of a model."""

    kind: ContextKind
    num_processes: int
    tokens: int
    whole_tokens: int

    def require_effect(self) -> None:
        """Check that something was split."""
        if self.tokens * self.num_processes != self.whole_tokens or not self.tokens:
            raise IneffectiveSwitchError(
                f"context_parallel: {self.num_processes} had no effect: of {self.whole_tokens} tokens this "
                f"process computed {self.tokens}; set it to 1"
            )

    def lines(self) -> list[str]:
        """The report for people, in the form of the gradient engine's."""
        shared = f"{self.tokens} tokens here of {self.whole_tokens}, over {self.num_processes} processes"
        return [f"{'split':<15} {shared} ({self.kind})"]

    def metrics(self) -> dict[str, float]:
        """Each number by its name."""
        return {
            "context_parallel": self.num_processes,
            "tokens_of_process": self.tokens,
            "tokens_of_sequence": self.whole_tokens,
        }


class ContextParallel(JointPasses):
    """Splits models over the processes of a group, which all of them do alike.

    Args:
        mesh: of all processes, with ``MESH_DIMENSIONS``.
        split: what is true of the models.
    """

    def __init__(self, mesh: Any, device: torch.device, *, kind: ContextKind, split: SequenceSplit) -> None:
        super().__init__(mesh[kind].get_group(), device)
        self.num_processes: int = mesh[kind].size()
        self.kind = kind
        self._mesh, self._split = mesh, split
        self._tokens = self._whole_tokens = 0

    def apply_to(self, model: nn.Module) -> None:
        """Have a model of diffusers compute a part of each sequence, once its adapter is on it."""
        from diffusers import ContextParallelConfig

        # An adapter that came later would be around layers whose results are gathered, and not see that.
        plan = self._plan_of(model)
        processors = dict(_processors(model))
        if self.kind == "ring":
            for processor in processors.values():
                processor._attention_backend = _RING_BACKEND
        config = ContextParallelConfig(**{f"{self.kind}_degree": self.num_processes}, mesh=self._mesh)
        enable: Any = model.enable_parallelism
        with _one_device_at_least(), _silent("diffusers.models.modeling_utils"):
            enable(config=config, cp_plan=plan)
        for name, processor in processors.items():
            if name.endswith(self._split.whole_attention):
                processor._parallel_config = processor._attention_backend = None
            else:
                keep_dtype(model.get_submodule(name))
        for name in (name for name, part in plan.items() if not isinstance(part, dict)):
            model.get_submodule(name).register_forward_hook(self._note_tokens)
        self.watch(model)

    def _plan_of(self, model: Any) -> dict[str, Any]:
        """That of the class, as the family corrects it."""
        from diffusers.models._modeling_parallel import ContextParallelInput

        plan = dict(model._cp_plan)
        inputs = {key: one for key, one in plan.get("", {}).items() if key not in self._split.whole_inputs}
        of_tokens = ContextParallelInput(split_dim=1, expected_dims=2)
        inputs |= dict.fromkeys(self._split.token_inputs, of_tokens)
        return plan | {"": inputs} if inputs else plan

    def _note_tokens(self, _module: nn.Module, inputs: Sequence[torch.Tensor], output: torch.Tensor) -> None:
        """Of a module whose result is gathered; previews are not reported."""
        if torch.is_grad_enabled() and output.shape[1] > self._whole_tokens:
            self._tokens, self._whole_tokens = inputs[0].shape[1], output.shape[1]

    def report(self) -> SplitReport:
        """What of the longest sequence with gradients was computed here."""
        return SplitReport(
            kind=self.kind,
            num_processes=self.num_processes,
            tokens=self._tokens,
            whole_tokens=self._whole_tokens,
        )


def _processors(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """What computes the attention of a model, by the names of its modules."""
    for name, module in model.named_modules():
        processor: Any = getattr(module, "processor", None)
        if hasattr(processor, "_parallel_config"):
            yield name, processor


@contextmanager
def _one_device_at_least() -> Iterator[None]:
    """Scope in which torch counts a device where it has none: diffusers 0.42 divides by their number.

    What it computes so, the name of a device, it does not use.
    """
    accelerator: Any = torch.accelerator
    count = accelerator.device_count
    accelerator.device_count = lambda: max(1, count())
    try:
        yield
    finally:
        accelerator.device_count = count


@contextmanager
def _silent(name: str) -> Iterator[None]:
    """Scope in which a logger does not warn, here that the call is experimental."""
    logger = logging.getLogger(name)
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
