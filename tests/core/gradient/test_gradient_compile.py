"""Compiled blocks: what they compute, which graphs they take, and their report."""

from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch
from gradient_models import Step, qwen_image
from lazy_backend import LazyBackend
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from diffsynth_lite.core.gradient import (
    BlockCompiler,
    BlockPolicy,
    BlockStrategy,
    GradientEngine,
    IneffectiveSwitchError,
    block_runner,
    blocks_of,
    gradient_engine,
    intercept_blocks,
    require_compiler,
)
from diffsynth_lite.core.gradient.blocks import is_compiled
from diffsynth_lite.core.weights.formats import Int8
from diffsynth_lite.core.weights.frozen_linear import FrozenLinear
from diffsynth_lite.core.weights.stream import WeightStream

# torch's compiler itself does what torch warns of.
pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
]

WIDTH = 16


@pytest.fixture(autouse=True)
def _nothing_compiled() -> Iterator[None]:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield
    torch._dynamo.reset()


class Block(nn.Module):
    """A quantised layer and a trained one with dropout; ``cut`` breaks its graph."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = FrozenLinear(nn.Linear(WIDTH, WIDTH), Int8(), torch.device("cpu"))
        self.frozen.write(torch.randn(WIDTH, WIDTH), 0)
        self.trained = nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), nn.Dropout(0.3))

    def forward(self, hidden: Tensor, both: tuple[Tensor, Tensor], cut: bool = False) -> Tensor:
        if cut:
            torch._dynamo.graph_break()
        update = nn.functional.silu(self.frozen(hidden) * both[0])
        return hidden + self.trained(update + both[1])


class Attending(nn.Module):
    """Attention, and a last product whose result no gradient needs."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: Tensor, both: tuple[Tensor, Tensor]) -> Tensor:
        heads = self.first(hidden)[:, None]
        attended = nn.functional.scaled_dot_product_attention(heads, heads, heads)[:, 0]
        return hidden + both[0] * self.last(attended)


class Model(nn.Module):
    """Blocks that receive views, at offsets in their memory, of tensors of another size."""

    gradient_checkpointing = False

    def __init__(self, num_blocks: int = 4, block: type[nn.Module] = Block) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.gradient_checkpointing = False
        self.blocks = nn.ModuleList(block() for _ in range(num_blocks))

    def forward(self, tokens: Tensor, **kwargs: bool) -> Tensor:
        tables = torch.linspace(-1, 1, 4 * tokens.shape[1] * WIDTH).view(4, tokens.shape[1], WIDTH)
        hidden = torch.cat([tokens, tokens], dim=1)[:, tokens.shape[1] :]
        for block in self.blocks:
            run = self._gradient_checkpointing_func if self.gradient_checkpointing else type(block).__call__
            hidden = run(block, hidden, (tables[1], tables[2]), **kwargs)
        return hidden


@dataclass
class Subject:
    """A model whose blocks are compiled."""

    model: Model
    compiler: BlockCompiler

    @classmethod
    def make(cls, backend: str = "eager", *, num_blocks: int = 4, **settings: int) -> "Subject":
        model = Model(num_blocks)
        return cls(model, BlockCompiler([*model.blocks], backend=backend, **settings))

    def step(self, tokens: Tensor, engine: GradientEngine | None = None, **kwargs: bool) -> Step:
        """A forward and backward pass; with an engine its blocks are recomputed and offloaded."""
        self.model.zero_grad()
        torch.manual_seed(7)
        if engine is None:
            output = self.model(tokens, **kwargs)
        else:
            with gradient_engine(engine):
                run = block_runner(len(self.model.blocks), True, True, unused_matmuls=["last"])
                with intercept_blocks(self.model, run):
                    output = self.model(tokens, **kwargs)
        output.square().mean().backward()
        gradients = {name: p.grad.clone() for name, p in self.model.named_parameters() if p.grad is not None}
        return Step(output.detach(), gradients)


def tokens(batch_size: int, length: int) -> Tensor:
    return torch.linspace(-2, 2, batch_size * length * WIDTH).view(batch_size, length, WIDTH)


def test_a_recompute_runs_the_graph_of_its_forward_whatever_the_sizes() -> None:
    plain, subject = Subject(Model(), BlockCompiler([])), Subject.make()
    for place, shape in enumerate([(2, 6), (3, 6), (2, WIDTH), (2, 9)]):
        given = tokens(*shape)
        expected = subject.step(given)
        # The first block gets what needs no gradient, the others what does.
        assert subject.compiler.new_graphs() == (0 if place else 2)
        # Inputs come back from the host in memory of their own. The backend runs operators as they are.
        assert subject.step(given, GradientEngine()) == expected == plain.step(given)
        assert subject.compiler.new_graphs() == 0
    report = subject.compiler.report()
    assert (report.blocks_compiled, report.graphs_compiled, report.graph_breaks) == (4, 2, 0)
    assert report.block_runs_not_compiled == 0
    assert report.compile_seconds > 0
    assert report.lines() == [
        f"compiled        4 blocks, 2 graphs, 0 graph breaks, {report.compile_seconds:.0f} s"
    ]


def test_streamed_blocks_of_which_some_keep_their_activations_compute_the_same() -> None:
    plain, streamed, backend = Subject(Model(), BlockCompiler([])), Subject.make("aot_eager"), LazyBackend()
    blocks = [*streamed.model.blocks]
    stream = WeightStream([blocks], torch.device("cpu"), num_slots=1, backend=backend)
    policy = BlockPolicy(select="every_n", n=2)
    given = tokens(2, 6)
    assert streamed.step(given, GradientEngine(policy=policy, backend=backend)) == plain.step(given)
    assert streamed.compiler.report().graphs_compiled == 2
    assert stream.report().weight_copies > len(blocks)


def test_no_graph_keeps_the_dense_weight_of_a_quantised_layer() -> None:
    kept: list[torch.Size] = []

    def pack(tensor: Tensor) -> Tensor:
        kept.append(tensor.shape if tensor.is_floating_point() else torch.Size())
        return tensor

    subject = Subject.make("aot_eager")
    weights = {parameter.data_ptr() for parameter in subject.model.parameters()}
    with saved_tensors_hooks(lambda t: t if t.data_ptr() in weights else pack(t), lambda t: t):
        subject.model(tokens(2, 6))
    assert kept
    assert (WIDTH, WIDTH) not in kept


def test_a_run_without_gradients_compiles_nothing() -> None:
    subject, plain = Subject.make(), Model()
    with torch.no_grad():
        torch.manual_seed(7)
        output = subject.model(tokens(2, 6))
        torch.manual_seed(7)
        assert torch.equal(output, plain(tokens(2, 6)))
    assert subject.compiler.report().lines() == []
    with pytest.raises(IneffectiveSwitchError, match="compile: on, but none of 4 blocks ran compiled"):
        subject.compiler.require_effect()
    BlockCompiler([]).require_effect()


def test_with_as_many_graphs_as_there_may_be_blocks_run_as_they_are() -> None:
    subject = Subject.make(max_graphs=1)
    assert subject.step(tokens(2, 6)) == Subject(Model(), BlockCompiler([])).step(tokens(2, 6))
    report = subject.compiler.report()
    assert subject.compiler.is_full
    assert (report.blocks_compiled, report.graphs_compiled, report.block_runs_not_compiled) == (1, 1, 3)
    assert report.lines()[0].endswith(", 3 runs not compiled")
    subject.compiler.require_effect()


def test_graph_breaks_are_counted() -> None:
    subject = Subject.make()
    given = tokens(2, 6)
    assert subject.step(given, cut=True) == Subject(Model(), BlockCompiler([])).step(given)
    assert subject.compiler.report().graph_breaks > 0


def test_without_a_compiler_the_error_names_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    require_compiler(torch.device("cpu"))
    no_compiler = torch._inductor.config.patch({"cpp.cxx": ("no-such-compiler",)})
    with no_compiler, pytest.raises(ValueError, match=r"needs a C\+\+ compiler, .* apt install g\+\+"):
        require_compiler(torch.device("cpu"))
    with pytest.raises(ValueError, match="is for the CPU and CUDA devices, not for mps"):
        require_compiler(torch.device("mps"))
    monkeypatch.setattr("diffsynth_lite.core.gradient.compiled.has_triton", lambda: False)
    with pytest.raises(ValueError, match=r"needs triton, .* pip install triton"):
        require_compiler(torch.device("cuda"))


def test_blocks_that_somebody_else_compiled_are_known_as_such() -> None:
    case = qwen_image()
    blocks = blocks_of(case.model, ["transformer_blocks"])
    assert not any(map(is_compiled, blocks))
    case.model.compile_repeated_blocks(backend="eager")
    assert all(map(is_compiled, blocks))


def test_in_compiled_blocks_neither_is_attention_saved_nor_are_products_left_out() -> None:
    policy = BlockPolicy(selected=BlockStrategy(offload=True, save_attention="keep"))
    subject, given = Subject(Model(3, Attending), BlockCompiler([])), tokens(2, 6)
    reference, engine = subject.step(given), GradientEngine(policy=policy)
    assert subject.step(given, engine) == reference
    assert engine.report().attention_saved == engine.report().dead_ops_skipped == 3
    BlockCompiler([*subject.model.blocks], backend="eager")
    engine = GradientEngine(policy=policy)
    assert subject.step(given, engine) == reference
    report = engine.report()
    assert report.blocks_recomputed == 3
    assert report.tensors_offloaded > 0
    assert report.dead_ops_skipped == 0
    with pytest.raises(ValueError, match=r"save_attention: on, but no attention was seen: .* are compiled"):
        report.require_effect(
            use_gradient_checkpointing=True,
            use_gradient_checkpointing_offload=True,
            expected_blocks=3,
            save_attention=True,
        )


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of what torch's compiler imports
def test_compiled_code_computes_nearly_the_same_and_its_recompute_exactly(
    tmp_path, monkeypatch: pytest.MonkeyPatch
) -> None:
    try:
        require_compiler(torch.device("cpu"))
    except ValueError as error:
        pytest.skip(str(error))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    # Else it compiles a program for each instruction set of this CPU, to see that the compiler knows it.
    monkeypatch.setattr(torch._inductor.config.cpp, "vec_isa_ok", True)
    monkeypatch.setattr(torch._inductor.config, "cpp_cache_precompile_headers", False)
    subject, given = Subject.make("inductor", num_blocks=1), tokens(2, 6)
    plain = Subject(Model(1), BlockCompiler([]))
    for model in (subject.model, plain.model):
        model.eval()  # dropout draws other masks
    compiled, expected = subject.step(given), plain.step(given)
    assert subject.step(given, GradientEngine()) == compiled
    assert compiled.gradients.keys() == expected.gradients.keys()
    # fp32 sums of few numbers in another order.
    torch.testing.assert_close(compiled.output, expected.output, rtol=1e-5, atol=1e-6)
    for name, gradient in expected.gradients.items():
        torch.testing.assert_close(compiled.gradients[name], gradient, rtol=1e-4, atol=1e-6)
