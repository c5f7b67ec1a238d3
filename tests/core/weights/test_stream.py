"""Streamed weights change no bit, whenever the copies run: theirs and those of inputs that are offloaded."""

import gc
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import pytest
import torch
from gradient_models import (
    Case,
    Step,
    by_turns,
    chroma,
    flux,
    forward,
    qwen_image,
    qwen_image_with_lora,
    sdxl_unet,
    training_step,
    wan,
    with_flags,
)
from lazy_backend import LazyBackend
from torch import Tensor, nn

from diffsynth_lite.core.gradient import (
    BlockPolicy,
    BlockStrategy,
    GradientEngine,
    IneffectiveSwitchError,
    block_runner,
    gradient_engine,
    intercept_blocks,
)
from diffsynth_lite.core.reports import StreamReport
from diffsynth_lite.core.transfer.backends import PlainBackend
from diffsynth_lite.core.weights.formats import Int8
from diffsynth_lite.core.weights.frozen_linear import FrozenLinear
from diffsynth_lite.core.weights.packing import PackedBlock, frozen_weights, packed_bytes
from diffsynth_lite.core.weights.stream import WeightStream, require_saving, spread_evenly

CPU = torch.device("cpu")
KEEP, RECOMPUTE, OFFLOAD = (False, False), (True, False), (False, True)
BACKENDS = [PlainBackend, LazyBackend]


def qwen_image_of_six() -> Case:
    return qwen_image(num_layers=6)


MODELS = [qwen_image_of_six, flux, wan, sdxl_unet, chroma]


def made(make_case: Callable[[], Case]) -> Case:
    """A case with the weights that it has each time."""
    torch.manual_seed(0)
    return make_case()


def biases_train(make_case: Callable[[], Case]) -> Case:
    """A case in which the biases learn and all else is frozen: backward needs the weights of each block."""
    case = made(make_case)
    for name, parameter in case.model.named_parameters():
        parameter.requires_grad_(name.endswith("bias"))
    return case


def blocks_of_case(case: Case) -> list[nn.Module]:
    return [case.model.get_submodule(name) for name in case.block_names]


def streamed(case: Case, backend: Any, *, every: int = 1, **settings: Any) -> WeightStream:
    return WeightStream([blocks_of_case(case)[::every]], CPU, backend=backend, **settings)


def settings_that_save(make_case: Callable[[], Case]) -> list[tuple[int, int]]:
    """Every how many blocks are streamed, through how many slots: two ways that save memory, or one."""
    blocks, found = blocks_of_case(biases_train(make_case)), []
    for every, num_slots in ((2, 2), (1, 2), (1, 1)):
        with suppress(ValueError):
            require_saving([blocks[::every]], CPU, num_slots=num_slots)
            found.append((every, num_slots))
    assert found
    return found[:2]


def step_under(case: Case, engine: GradientEngine, flags: tuple[bool, bool]) -> Step:
    """A training step with each block called with the two switches, those of Chroma by their forward."""
    wrapped = blocks_of_case(case) if "Chroma" in type(case.model).__name__ else None
    with gradient_engine(engine):
        run = block_runner(len(case.block_names), *flags)
        return training_step(case, intercept_blocks(case.model, run, blocks=wrapped))


@pytest.mark.filterwarnings("ignore:`FluxPosEmbed` is deprecated:FutureWarning")
@pytest.mark.parametrize(
    ("make_case", "flags", "make_backend"), by_turns(BACKENDS, MODELS, [KEEP, RECOMPUTE, OFFLOAD])
)
def test_a_step_does_not_depend_on_where_the_weights_are_nor_on_when_copies_run(
    make_case: Callable[[], Case], flags: tuple[bool, bool], make_backend: Callable[[], Any]
) -> None:
    reference = training_step(biases_train(make_case))
    for every, num_slots in settings_that_save(make_case):
        case, backend = biases_train(make_case), make_backend()
        stream = streamed(case, backend, every=every, num_slots=num_slots)
        engine = GradientEngine(backend=backend)
        for _ in range(2):
            assert step_under(case, engine, flags) == reference, (every, num_slots)
        assert stream.report().weight_copies > 0
        assert (engine.report().bytes_offloaded > 0) == (flags == OFFLOAD)


POLICIES = [
    BlockPolicy(select="first_k", n=1),
    BlockPolicy(select="every_n", n=2),
    BlockPolicy(selected=BlockStrategy(offload=True, save_attention="keep")),
    BlockPolicy(selected=BlockStrategy(offload=True, save_attention="park")),
    BlockPolicy(select="last_k", n=2, selected=BlockStrategy(save_attention="park")),
]


@pytest.mark.parametrize("make_backend", BACKENDS)
@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: f"{policy.select} {policy.selected}")
def test_no_policy_changes_a_bit(policy: BlockPolicy, make_backend: Callable[[], Any]) -> None:
    reference = training_step(made(qwen_image_with_lora))
    case, backend = made(qwen_image_with_lora), make_backend()
    streamed(case, backend)
    engine = GradientEngine(backend=backend, policy=policy)
    for _ in range(2):
        assert step_under(case, engine, (True, True)) == reference


class WatchedInt8(Int8):
    """Remembers which memory weights were made from."""

    def __init__(self) -> None:
        self.read_at: set[int] = set()

    def dense(self, values: Tensor, *args: Any) -> Tensor:
        # On the CPU the values in host memory would do as well; on a GPU they would not.
        self.read_at.add(values.untyped_storage().data_ptr())
        return super().dense(values, *args)


class QuantizedBlock(nn.Module):
    """A weight in whole numbers, something that trains, and a quantised layer, which backward meets first."""

    def __init__(self, weights: Int8) -> None:
        super().__init__()
        values = torch.randint(-5, 5, (8, 8), dtype=torch.int8)
        self.whole = nn.Parameter(values, requires_grad=False)
        self.scale = nn.Parameter(torch.rand(8))
        self.last = FrozenLinear(nn.Linear(8, 8, bias=False), weights, CPU)
        self.last.write(torch.randn(8, 8), 0)

    def forward(self, x: Tensor, *, extra: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        hidden = (x * self.scale + extra["temb"]) @ self.whole.float()
        extra = {"temb": extra["temb"] * self.scale}
        return x + self.last(hidden.sin()), extra


def quantized_blocks(weights: Int8) -> list[QuantizedBlock]:
    torch.manual_seed(0)
    return [QuantizedBlock(weights) for _ in range(4)]


def gradients_of(
    blocks: Sequence[QuantizedBlock], flags: tuple[bool, bool], engine: GradientEngine
) -> list[Tensor]:
    x, extra = torch.linspace(-1, 1, 16).reshape(2, 8), {"temb": torch.linspace(0, 1, 8)}
    with gradient_engine(engine):
        run = block_runner(len(blocks), *flags)
        for place, block in enumerate(blocks):
            x, extra = run(place, block, x, extra=extra)
    loss = x.square().sum() + extra["temb"].sum()
    return list(torch.autograd.grad(loss, [block.scale for block in blocks]))


@pytest.mark.parametrize(
    ("flags", "num_slots", "make_backend"), by_turns(BACKENDS, [KEEP, RECOMPUTE, OFFLOAD], [1, 2, 3])
)
def test_a_quantised_layer_makes_its_weight_from_what_is_on_the_device(
    num_slots: int, flags: tuple[bool, bool], make_backend: Callable[[], Any]
) -> None:
    reference = gradients_of(quantized_blocks(Int8()), KEEP, GradientEngine())
    weights, backend = WatchedInt8(), make_backend()
    blocks = quantized_blocks(weights)
    stream = WeightStream([blocks], CPU, num_slots=num_slots, backend=backend)
    for _ in range(2):
        gradients = gradients_of(blocks, flags, GradientEngine(backend=backend))
        assert all(torch.equal(one, other) for one, other in zip(gradients, reference, strict=True))
    assert weights.read_at == {slot.flat.data_ptr() for slot in stream._slots}


@pytest.mark.parametrize("make_backend", BACKENDS)
def test_two_graphs_a_retained_one_and_an_abandoned_one_do_not_mix(make_backend: Callable[[], Any]) -> None:
    def losses(case: Case) -> list[Tensor]:
        inputs = [case.inputs, qwen_image(batch_size=1).inputs]
        return [forward(case.model, one).square().mean() for one in inputs]

    def gradients(case: Case, flags: tuple[bool, bool], order: Sequence[int]) -> list[Tensor]:
        biases = [parameter for parameter in case.model.parameters() if parameter.requires_grad]
        with intercept_blocks(case.model, with_flags(flags)):
            forward(case.model, case.inputs)
            found = losses(case)
        return [
            gradient
            for place in order
            for gradient in torch.autograd.grad(
                found[place], biases, retain_graph=True, materialize_grads=True
            )
        ]

    order = (0, 1, 1, 0)
    reference = gradients(biases_train(qwen_image), KEEP, order)
    case, backend = biases_train(qwen_image), make_backend()
    streamed(case, backend)
    for flags in (KEEP, OFFLOAD):
        with gradient_engine(GradientEngine(backend=backend)):
            found = gradients(case, flags, order)
        assert all(torch.equal(one, other) for one, other in zip(found, reference, strict=True))


@pytest.mark.parametrize("num_slots", [1, 2])
def test_passes_without_gradients_run_one_after_the_other_and_no_copy_is_late(num_slots: int) -> None:
    case, found_at = biases_train(qwen_image_of_six), set()

    def note_where_weights_are(block: nn.Module, *_: Any) -> None:
        found_at.add(block.attn.to_q.weight.untyped_storage().data_ptr())

    for block in blocks_of_case(case):
        block.register_forward_hook(note_where_weights_are)
    with torch.no_grad():
        expected = forward(case.model, case.inputs)
        stream = streamed(case, LazyBackend(), num_slots=num_slots)
        found_at.clear()
        for _ in range(3):
            assert torch.equal(forward(case.model, case.inputs), expected)
    # To the end of a block's run: what comes next has another slot.
    assert found_at == {slot.flat.data_ptr() for slot in stream._slots}
    report = stream.report()
    assert report.streamed_blocks_run == 3 * 6
    # And afterwards those in host memory again.
    weights = [block.attn.to_q.weight for block in blocks_of_case(biases_train(qwen_image_of_six))]
    shown = [block.attn.to_q.weight for block in blocks_of_case(case)]
    assert all(torch.equal(one, other) for one, other in zip(shown, weights, strict=True))
    # Each block comes once a pass; with two slots the first of the next pass are on their way by then.
    assert report.weight_copies == (3 * 6 if num_slots == 1 else 3 * 6 + 2 - 1)
    assert report.late_weight_copies == (3 * 6 - 1 if num_slots == 1 else 0)


def test_a_training_step_copies_each_block_once_in_each_direction_but_those_where_it_turns() -> None:
    case = biases_train(qwen_image_of_six)
    stream = streamed(case, LazyBackend())
    engine = GradientEngine()
    for _ in range(2):
        stream.start_report()
        step_under(case, engine, RECOMPUTE)
    report = stream.report()
    assert (report.weight_copies, report.late_weight_copies) == (2 * (6 - 2), 0)
    assert report.weight_bytes_copied == report.weight_bytes_on_host * report.weight_copies // 6


def test_models_that_share_the_slots_take_turns() -> None:
    references = [training_step(biases_train(make)) for make in (qwen_image, wan)]
    cases, backend = [biases_train(make) for make in (qwen_image, wan)], LazyBackend()
    stream = WeightStream([blocks_of_case(case) for case in cases], CPU, num_slots=1, backend=backend)
    engine = GradientEngine(backend=backend)
    for place in (0, 1, 1, 0):
        assert step_under(cases[place], engine, OFFLOAD) == references[place]
    assert stream.report().blocks_streamed == 5


def test_a_model_fetches_no_block_of_another() -> None:
    models = [quantized_blocks(Int8()) for _ in range(2)]
    stream = WeightStream(models, CPU, backend=LazyBackend())
    stream.start_report()
    for _ in range(2):
        gradients_of(models[0], RECOMPUTE, GradientEngine())
    report = stream.report()
    assert (report.weight_copies, report.late_weight_copies) == (2 * 2 * (4 - 2), 0)


def test_what_trains_and_what_is_small_stays_and_the_rest_is_no_parameter_any_more() -> None:
    case = qwen_image_with_lora()
    before = dict(case.model.named_parameters())
    min_bytes = 4096
    stream = streamed(case, None, min_bytes=min_bytes)
    after = dict(case.model.named_parameters())
    gone = {name: value for name, value in before.items() if name not in after}
    in_blocks = {name: value for name, value in before.items() if name.startswith("transformer_blocks.")}
    assert gone.keys() == {
        name for name, value in in_blocks.items() if not value.requires_grad and value.nbytes >= min_bytes
    }
    for name, value in gone.items():
        module, _, attribute = name.rpartition(".")
        assert torch.equal(getattr(case.model.get_submodule(module), attribute), value)
    assert stream.report().weight_bytes_on_host >= sum(value.nbytes for value in gone.values())
    assert case.model.state_dict().keys() >= {name for name, value in before.items() if value.requires_grad}


def test_the_layout_of_a_weight_and_its_place_in_a_cache_line_stay() -> None:
    block = nn.Module()
    memory = torch.arange(100.0)
    block.shifted = nn.Parameter(memory[3:27].view(4, 6), requires_grad=False)
    block.turned = nn.Parameter(memory[32:56].view(4, 6).t(), requires_grad=False)
    block.gaps = nn.Parameter(memory[:64].view(8, 8)[:, :4], requires_grad=False)
    block.also_shifted = block.shifted
    block.forward = lambda: [block.shifted, block.turned, block.also_shifted]
    others = [nn.Linear(4, 4).requires_grad_(False) for _ in range(2)]
    expected, row = [tensor.clone() for tensor in block.forward()], torch.rand(1, 6)
    product = nn.functional.linear(row, block.shifted)
    WeightStream([[block, *others]], CPU, num_slots=1)
    for shown in (block.forward(), [block.shifted, block.turned, block.also_shifted]):
        assert all(torch.equal(one, other) for one, other in zip(shown, expected, strict=True))
    assert torch.equal(nn.functional.linear(row, block.forward()[0]), product)
    assert block.turned.stride() == (1, 6)
    assert block.shifted.data_ptr() % 64 == 12 + memory.data_ptr() % 64
    assert [name for name, _ in block.named_parameters()] == ["gaps"]


def test_for_a_gpu_weights_are_packed_where_its_allocator_would_put_them() -> None:
    block = nn.Sequential(nn.Linear(5, 7), nn.Linear(3, 3)).requires_grad_(False)
    weights = frozen_weights(block, 0)
    packed = PackedBlock(weights, torch.empty(packed_bytes(weights), dtype=torch.uint8), lambda _weight: 0)
    packed.take_out()
    shown = [tensor for layer in block for tensor in (layer.weight, layer.bias)]
    assert [tensor.storage_offset() * tensor.itemsize for tensor in shown] == [0, 512, 1024, 1536]


def test_use_before_the_wait_is_caught() -> None:
    case = biases_train(qwen_image_of_six)
    streamed(case, LazyBackend(forgets="in"))
    assert forward(case.model, case.inputs).isnan().any()


def test_copies_under_way_are_waited_for_when_a_model_is_dropped() -> None:
    backend = LazyBackend()
    case = biases_train(qwen_image_of_six)
    streamed(case, backend)
    with torch.no_grad():
        forward(case.model, case.inputs)
    assert backend.num_pending == 1
    del case
    gc.collect()
    assert backend.num_pending == 0


def test_an_in_place_change_of_what_a_kept_block_saved_raises() -> None:
    def block_of(weight: Tensor) -> nn.Module:
        block = nn.Module()
        block.weight, block.scale = nn.Parameter(weight, requires_grad=False), nn.Parameter(torch.ones(3))
        block.forward = lambda x: (x * block.scale) * block.weight
        return block

    blocks = [block_of(torch.rand(3)) for _ in range(2)]
    WeightStream([blocks], CPU, num_slots=1)
    x = torch.rand(3)
    output = blocks[1].forward(blocks[0].forward(x))
    x.zero_()
    with pytest.raises(RuntimeError, match=r"shape \(3,\) that a block saved was changed in place"):
        output.sum().backward()


def test_what_saves_nothing_is_refused_with_the_reason() -> None:
    blocks = [nn.Linear(8, 8, device="meta").requires_grad_(False) for _ in range(4)]
    require_saving([blocks], CPU)
    with pytest.raises(ValueError, match="no frozen weight of them has min_bytes, 65536, or more"):
        require_saving([blocks], torch.device("cuda"))
    with pytest.raises(ValueError, match="4 blocks would all stay in 4 slots"):
        require_saving([blocks], CPU, num_slots=4)
    large = nn.Linear(100, 100, device="meta").requires_grad_(False)
    with pytest.raises(ValueError, match=r"of 5 blocks take .* 2 slots for the largest .* nothing is saved"):
        require_saving([[*blocks, large]], CPU)
    with pytest.raises(ValueError, match=r"the system refused .* of host memory"):
        WeightStream([blocks_of_case(biases_train(qwen_image))], CPU, backend=LazyBackend(host_bytes=100))


def test_a_stream_that_moved_nothing_says_why() -> None:
    stream = streamed(biases_train(qwen_image), None)
    stream.start_report()
    with pytest.raises(IneffectiveSwitchError, match=r"stream_blocks: on, .* none of these blocks ran"):
        stream.report().require_effect()
    with pytest.raises(IneffectiveSwitchError, match="only blocks ran that fit into the slots"):
        StreamReport(blocks_streamed=3, streamed_blocks_run=2).require_effect()


def test_nothing_is_streamed_where_no_model_is_given() -> None:
    stream = WeightStream([], CPU)
    assert (stream.backend, stream.slot_bytes) == (None, 0)
    assert (stream.report().lines(), stream.report().metrics()) == ([], {})
    stream.report().require_effect()


@pytest.mark.parametrize(
    ("num_blocks", "num_streamed", "places"),
    [(60, 60, list(range(60))), (6, 3, [1, 3, 5]), (8, 2, [2, 6]), (57, 3, [9, 28, 47]), (5, 1, [2])],
)
def test_streamed_blocks_are_spread(num_blocks: int, num_streamed: int, places: list[int]) -> None:
    assert spread_evenly(num_blocks, num_streamed) == places


@pytest.mark.parametrize("newest_first", [False, True])
def test_a_block_that_fails_leaves_the_stream_as_it_was(newest_first: bool) -> None:
    # In the next step the first block gets the slot of the third one, whose copy nobody has waited for.
    case, backend = biases_train(qwen_image), LazyBackend(newest_first=newest_first)
    reference = training_step(biases_train(qwen_image))
    streamed(case, backend)
    handle = blocks_of_case(case)[1].attn.register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        forward(case.model, case.inputs)
    handle.remove()
    assert step_under(case, GradientEngine(backend=backend), OFFLOAD) == reference
