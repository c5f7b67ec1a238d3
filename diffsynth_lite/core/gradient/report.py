"""This file says what the gradient switches did, and raises when a switch that was on did nothing."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from diffsynth_lite.core.gradient.parking import LeaveReason


class IneffectiveSwitchError(ValueError):
    """A gradient switch was on and had no effect; the message names the switch and the likely cause."""


@dataclass(frozen=True, kw_only=True)
class LeftTensors:
    """Tensors that stayed on the device for one reason."""

    num_tensors: int = 0
    num_bytes: int = 0
    largest_bytes: int = 0


@dataclass(frozen=True, kw_only=True)
class GradientReport:
    """What happened in the block calls of an engine since ``start_report``.

    All numbers count events: a tensor that every block receives is counted once for each block call.
    """

    blocks_run: int = 0
    """Calls of ``gradient_checkpoint_forward``, whatever its switches."""
    blocks_checkpointed: int = 0
    """Those whose activations were dropped after the forward pass."""
    blocks_recomputed: int = 0
    """Second runs of a block during a backward pass."""
    tensors_parked: int = 0
    """Block inputs copied to host memory."""
    bytes_parked: int = 0
    """Bytes of these copies."""
    left: Mapping[LeaveReason, LeftTensors] = field(default_factory=dict)
    """Block inputs that the offload left on the device, by reason."""

    def lines(self) -> list[str]:
        """The report for people, in a few lines."""
        lines = [
            f"blocks: {self.blocks_run} run, {self.blocks_checkpointed} checkpointed, "
            f"{self.blocks_recomputed} recomputed"
        ]
        if self.tensors_parked:
            lines.append(f"parked in host memory: {self.tensors_parked} tensors, {_size(self.bytes_parked)}")
        if self.left:
            lines.append(f"left on the device: {self._left_in_words()}")
        return lines

    def require_effect(
        self,
        *,
        use_gradient_checkpointing: bool,
        use_gradient_checkpointing_offload: bool,
        expected_blocks: int,
    ) -> None:
        """Check that every switch that was on did what it promises.

        Args:
            use_gradient_checkpointing: the switch, as it was set.
            use_gradient_checkpointing_offload: the switch, as it was set; it implies the other.
            expected_blocks: block calls that should have been checkpointed since ``start_report``: the
                blocks of the model times the forward passes.

        Raises:
            IneffectiveSwitchError: a switch that was on had no effect, or not on all blocks.
        """
        switches = []
        if use_gradient_checkpointing:
            switches.append("use_gradient_checkpointing")
        if use_gradient_checkpointing_offload:
            switches.append("use_gradient_checkpointing_offload")
        if not switches:
            return
        if problem := self._checkpointing_problem(expected_blocks):
            raise IneffectiveSwitchError(f"{' and '.join(switches)}: on, but {problem}")
        if use_gradient_checkpointing_offload and not self.tensors_parked:
            raise IneffectiveSwitchError(f"{switches[-1]}: on, but {self._parking_problem()}")

    def _checkpointing_problem(self, expected_blocks: int) -> str | None:
        if not self.blocks_run:
            return (
                "no block was seen: the model did not call its blocks through gradient_checkpoint_forward "
                "under this engine"
            )
        if self.blocks_run < expected_blocks:
            return (
                f"only {self.blocks_run} of {expected_blocks} block calls were seen: the other blocks did "
                "not go through gradient_checkpoint_forward"
            )
        if self.blocks_checkpointed < expected_blocks:
            return (
                f"{self.blocks_checkpointed} of {expected_blocks} block calls were checkpointed: the others "
                "ran under torch.no_grad or were called with the switch off"
            )
        if not self.blocks_recomputed:
            return (
                f"none of the {self.blocks_checkpointed} checkpointed blocks was recomputed: no gradient "
                "reached them (nothing in them or before them trains, the loss does not depend on them, or "
                "there was no backward pass)"
            )
        return None

    def _parking_problem(self) -> str:
        if not self.left:
            return "nothing was parked: the blocks have no tensor among their inputs"
        if self.left.keys() == {LeaveReason.BELOW_MIN_BYTES}:
            small = self.left[LeaveReason.BELOW_MIN_BYTES]
            return (
                f"nothing was parked: all {small.num_tensors} tensors are below min_bytes (largest was "
                f"{small.largest_bytes} bytes); set min_bytes lower or the switch off"
            )
        return f"nothing was parked: everything was left on the device: {self._left_in_words()}"

    def _left_in_words(self) -> str:
        return ", ".join(
            f"{left.num_tensors} tensors, {_size(left.num_bytes)} ({reason})"
            for reason, left in self.left.items()
        )


def _size(num_bytes: int) -> str:
    """``num_bytes`` with a binary unit, such as ``1.5 GiB``."""
    for power, unit in ((3, "GiB"), (2, "MiB"), (1, "KiB")):
        if num_bytes >= 1024**power:
            return f"{num_bytes / 1024**power:.1f} {unit}"
    return f"{num_bytes} bytes"
