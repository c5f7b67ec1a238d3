"""This file reports what the memory switches did, and raises when a switch that was on did nothing.

It imports no torch: a page of a run is made of these reports, and needs nothing else of the core.
"""

import threading
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from enum import StrEnum

from diffsynth_lite.core.units import format_bytes


class IneffectiveSwitchError(ValueError):
    """A gradient switch was on and had no effect; the message names the switch and the likely cause."""


class NotOffloadedReason(StrEnum):
    """Why a tensor is not offloaded."""

    BELOW_MIN_BYTES = "below min_bytes"
    PARAMETER = "parameter"
    SUBCLASS = "tensor subclass"
    LAYOUT = "sparse, quantized or conjugated"
    EXPANDED = "expanded view"
    IN_BACKWARD = "inside of a backward pass"
    HOST_FULL = "host memory full"
    REFUSED = "host memory refused by the system"


@dataclass(frozen=True, kw_only=True)
class NotOffloadedTensors:
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
    tensors_offloaded: int = 0
    """Tensors copied to host memory."""
    bytes_offloaded: int = 0
    """Bytes of these copies."""
    tensors_shared: int = 0
    """Tensors that stayed on the device because several block calls receive them."""
    bytes_shared: int = 0
    """Their bytes, counted for each block call."""
    late_prefetches: int = 0
    """Tensors that were fetched only when backward asked for them, so that it had to wait."""
    largest_block_bytes: int = 0
    """Most bytes that one block call offloaded, or would have with more host memory."""
    host_bytes: int = 0
    """Size of the host memory pool."""
    host_bytes_cap: int = 0
    """Size that it may have; 0 before it is used, and where it is unlimited."""
    device_bytes_after_forward: int = 0
    """Memory of a CUDA device that tensors occupied when the last backward pass came to a block; else 0."""
    device_bytes_peak: int = 0
    """Most memory that they occupied since the program or torch's own count began; 0 without CUDA."""
    attention_saved: int = 0
    """Calls of attention whose outputs were saved, so that the recompute does not run them."""
    attention_not_saved: int = 0
    """Calls under a policy that saves attention which run again: without a fused kernel, or with dropout."""
    attention_bytes_kept: int = 0
    """Bytes of these outputs that stayed on the device."""
    attention_bytes_offloaded: int = 0
    """Bytes of these outputs that were copied to host memory; ``bytes_offloaded`` has them too."""
    dead_ops_skipped: int = 0
    """Matrix products that recomputes left out, because no gradient needs their results."""
    not_offloaded: Mapping[NotOffloadedReason, NotOffloadedTensors] = field(default_factory=dict)
    """Tensors that could not be offloaded and stayed on the device, by reason."""

    def metrics(self) -> dict[str, float]:
        """Every number by its name; those of ``not_offloaded`` by reason, ``tensors_not_offloaded_...``."""
        numbers = {
            entry.name: getattr(self, entry.name) for entry in fields(self) if entry.name != "not_offloaded"
        }
        for reason in NotOffloadedReason:
            name, these = reason.name.lower(), self.not_offloaded.get(reason, NotOffloadedTensors())
            numbers[f"tensors_not_offloaded_{name}"] = these.num_tensors
            numbers[f"bytes_not_offloaded_{name}"] = these.num_bytes
        return numbers

    def lines(self) -> list[str]:
        """The report for people: a table of a few lines."""
        blocks = f"{self.blocks_run} run, {self.blocks_checkpointed} checkpointed"
        rows = [("blocks", f"{blocks}, {self.blocks_recomputed} recomputed")]
        if self.tensors_offloaded:
            late = f", {self.late_prefetches} fetched late" if self.late_prefetches else ""
            rows.append(
                ("offloaded", f"{self.tensors_offloaded} tensors, {format_bytes(self.bytes_offloaded)}{late}")
            )
        if self.tensors_shared:
            rows.append(("shared", f"{self.tensors_shared} tensors, {format_bytes(self.bytes_shared)}"))
        rows += [("not offloaded", _in_words(reason, these)) for reason, these in self.not_offloaded.items()]
        if self.attention_saved or self.attention_not_saved:
            rows.append(("attention", self._attention_in_words()))
        if self.dead_ops_skipped:
            rows.append(("not recomputed", f"{self.dead_ops_skipped} matrix products"))
        if self.host_bytes:
            cap = f" of {format_bytes(self.host_bytes_cap)}" if self.host_bytes_cap else ""
            rows.append(("host memory", f"{format_bytes(self.host_bytes)}{cap}"))
        if self.device_bytes_peak:
            after_forward = f"{format_bytes(self.device_bytes_after_forward)} after forward"
            rows.append(("device memory", f"{after_forward}, {format_bytes(self.device_bytes_peak)} peak"))
        return [f"{name:<15} {value}" for name, value in rows]

    def require_effect(
        self,
        *,
        use_gradient_checkpointing: bool,
        use_gradient_checkpointing_offload: bool,
        expected_blocks: int,
        expected_checkpointed: int | None = None,
        save_attention: bool = False,
    ) -> None:
        """Check that every flag that was on had its effect.

        Args:
            expected_blocks: block calls that there should have been since ``start_report``: the blocks of the
                model times the forward passes.
            expected_checkpointed: those of them that the policy checkpoints; None is all.

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
        if expected_checkpointed is None:
            expected_checkpointed = expected_blocks
        if problem := self._checkpointing_problem(expected_blocks, expected_checkpointed):
            raise IneffectiveSwitchError(f"{' and '.join(switches)}: on, but {problem}")
        if use_gradient_checkpointing_offload and (problem := self._offload_problem()):
            raise IneffectiveSwitchError(f"{switches[-1]}: on, but {problem}")
        if save_attention and (problem := self._attention_problem()):
            raise IneffectiveSwitchError(f"save_attention: on, but {problem}")

    def _checkpointing_problem(self, expected_blocks: int, expected_checkpointed: int) -> str | None:
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
        if self.blocks_checkpointed < expected_checkpointed:
            return (
                f"{self.blocks_checkpointed} of {expected_checkpointed} block calls were checkpointed: the "
                "others ran under torch.no_grad or were called with the switch off"
            )
        if self.blocks_checkpointed > expected_checkpointed and self.blocks_run == expected_blocks:
            return (
                f"{self.blocks_checkpointed} block calls were checkpointed where the policy selects "
                f"{expected_checkpointed}: the model runs its blocks neither by checkpoint_blocks nor by "
                "block_runner"
            )
        if not self.blocks_recomputed:
            return (
                f"none of the {self.blocks_checkpointed} checkpointed blocks was recomputed: no gradient "
                "reached them (nothing in them or before them trains, the loss does not depend on them, or "
                "there was no backward pass)"
            )
        return None

    def _offload_problem(self) -> str | None:
        # Attention outputs are offloaded without this switch too.
        if self.bytes_offloaded > self.attention_bytes_offloaded:
            return None
        if self.tensors_shared:
            return "nothing was offloaded: the blocks share all tensors among their inputs"
        if not self.not_offloaded:
            return "nothing was offloaded: the blocks have no tensor among their inputs"
        if self.not_offloaded.keys() == {NotOffloadedReason.BELOW_MIN_BYTES}:
            small = self.not_offloaded[NotOffloadedReason.BELOW_MIN_BYTES]
            return (
                f"nothing was offloaded: all {small.num_tensors} tensors are below min_bytes (largest was "
                f"{small.largest_bytes} bytes); set min_bytes lower or the switch off"
            )
        reasons = ", ".join(_in_words(reason, these) for reason, these in self.not_offloaded.items())
        return f"nothing was offloaded: {reasons}"

    def _attention_problem(self) -> str | None:
        if self.attention_saved:
            return None
        if not self.attention_not_saved:
            return (
                "no attention was seen: the checkpointed blocks are compiled, or call another function than "
                "torch's scaled_dot_product_attention"
            )
        return (
            f"none of {self.attention_not_saved} attention outputs was saved: no fused kernel served these "
            "calls, or they have dropout"
        )

    def _attention_in_words(self) -> str:
        kept, offloaded = (
            format_bytes(self.attention_bytes_kept),
            format_bytes(self.attention_bytes_offloaded),
        )
        not_saved = f", {self.attention_not_saved} not saved" if self.attention_not_saved else ""
        return f"{self.attention_saved} outputs saved, {kept} on device, {offloaded} offloaded{not_saved}"


def _in_words(reason: NotOffloadedReason, tensors: NotOffloadedTensors) -> str:
    return f"{tensors.num_tensors} tensors, {format_bytes(tensors.num_bytes)} ({reason})"


@dataclass(frozen=True, kw_only=True)
class StreamReport:
    """What a weight stream holds, and did since ``start_report``."""

    blocks_streamed: int = 0
    """Blocks whose weights live in host memory."""
    weight_bytes_on_host: int = 0
    """Bytes of them, of all processes of this machine together."""
    weight_copies_on_host: int = 1
    """How often they are there: once, or once for each process."""
    processes_on_host: int = 1
    """Processes of this machine that stream them."""
    weight_bytes_in_slots: int = 0
    """Bytes of the device's slots, in place of these."""
    streamed_blocks_run: int = 0
    """Runs of these blocks: forward, and second ones in backward."""
    weight_copies: int = 0
    """Copies of a block's weights to the device."""
    weight_bytes_copied: int = 0
    """Bytes of these copies."""
    late_weight_copies: int = 0
    """Those that began only when their block was to run, so that it had to wait."""

    def metrics(self) -> dict[str, float]:
        """Every number by its name; none where nothing is streamed."""
        return asdict(self) if self.blocks_streamed else {}

    def lines(self) -> list[str]:
        """The report for people, in the form of the gradient engine's: at most one line."""
        if not self.blocks_streamed:
            return []
        shared = ""
        if self.processes_on_host > 1:
            how = "shared by" if self.weight_copies_on_host == 1 else "a copy in each of"
            shared = f" ({how} {self.processes_on_host} processes)"
        held = (
            f"{self.blocks_streamed} blocks, {format_bytes(self.weight_bytes_on_host)} on host{shared}, "
            f"{format_bytes(self.weight_bytes_in_slots)} on device"
        )
        moved = f"{self.weight_copies} copies, {format_bytes(self.weight_bytes_copied)}"
        late = f", {self.late_weight_copies} late" if self.late_weight_copies else ""
        return [f"{'streamed':<15} {held}; {moved}{late}"]

    def require_effect(self, switch: str = "stream_blocks") -> None:
        """Check that weights moved, where some are streamed."""
        if not self.blocks_streamed or self.weight_copies:
            return
        if not self.streamed_blocks_run:
            problem = "none of these blocks ran: the model does not call them, or not by their forward"
        else:
            problem = "only blocks ran that fit into the slots together"
        raise IneffectiveSwitchError(f"{switch}: on, but no weights were moved: {problem}")


@dataclass(frozen=True, kw_only=True)
class CompileReport:
    """What a ``BlockCompiler`` compiled, and ran."""

    blocks_compiled: int = 0
    """Blocks of which a compiled graph ran."""
    graphs_compiled: int = 0
    """Graphs; blocks that are alike share them."""
    graph_breaks: int = 0
    """Places at which a block was cut in several graphs, with Python between them."""
    block_runs_not_compiled: int = 0
    """Runs of a block, with gradients, that found no graph and got none."""
    compile_seconds: float = 0.0
    """What compiling took, the first run of each graph included."""

    def metrics(self) -> dict[str, float]:
        """Every number by its name; none where nothing is compiled."""
        return asdict(self) if self.graphs_compiled else {}

    def lines(self) -> list[str]:
        """The report for people, in the form of the gradient engine's: at most one line."""
        if not self.graphs_compiled:
            return []
        graphs = f"{self.graphs_compiled} graphs, {self.graph_breaks} graph breaks"
        left = f", {self.block_runs_not_compiled} runs not compiled" if self.block_runs_not_compiled else ""
        return [
            f"{'compiled':<15} {self.blocks_compiled} blocks, {graphs}, {self.compile_seconds:.0f} s{left}"
        ]


def quantization_lines(*, num_layers: int, num_bytes: int, plain_bytes: int) -> list[str]:
    """What quantised layers take, for people: at most one line, none without such layers."""
    sizes = f"{format_bytes(num_bytes)} in place of {format_bytes(plain_bytes)}"
    return [f"{'quantised':<15} {num_layers} layers, {sizes}"] if num_layers else []


class Counters:
    """The numbers of a ``GradientReport`` while they grow, by the names of its fields."""

    def __init__(self) -> None:
        # Recomputes are counted on autograd's worker threads.
        self._lock = threading.Lock()
        self.reset()

    def reset(self) -> None:
        """Set everything to zero."""
        with self._lock:
            self._numbers: Counter[str] = Counter()
            self._not_offloaded: dict[NotOffloadedReason, NotOffloadedTensors] = {}

    def add(self, **increments: int) -> None:
        """Add to numbers."""
        with self._lock:
            for name, value in increments.items():
                self._numbers[name] += value

    def put(self, **values: int) -> None:
        """Replace numbers."""
        with self._lock:
            for name, value in values.items():
                self._numbers[name] = value

    def raise_to(self, **values: int) -> None:
        """Replace the numbers that are smaller."""
        with self._lock:
            for name, value in values.items():
                self._numbers[name] = max(self._numbers[name], value)

    def add_not_offloaded(self, reason: NotOffloadedReason, num_bytes: int) -> None:
        """Count a tensor that stays on the device."""
        with self._lock:
            these = self._not_offloaded.get(reason, NotOffloadedTensors())
            self._not_offloaded[reason] = NotOffloadedTensors(
                num_tensors=these.num_tensors + 1,
                num_bytes=these.num_bytes + num_bytes,
                largest_bytes=max(these.largest_bytes, num_bytes),
            )

    def report(self, **others: int) -> GradientReport:
        """The numbers as they are, with ``others`` that are not counted."""
        with self._lock:
            return GradientReport(**self._numbers, **others, not_offloaded=dict(self._not_offloaded))
