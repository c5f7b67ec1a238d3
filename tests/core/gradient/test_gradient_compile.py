"""Blocks that are compiled one by one are checkpointed and offloaded, and otherwise left alone."""

from collections.abc import Iterator

import pytest
import torch
from gradient_models import Case, qwen_image_with_lora, training_step
from torch._dynamo.utils import counters

from diffsynth_lite.core.gradient import (
    BlockPolicy,
    BlockStrategy,
    GradientEngine,
    block_runner,
    gradient_engine,
    intercept_blocks,
)

# torch's compiler itself looks at what torch warns of.
pytestmark = pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"
)


@pytest.fixture
def compiled_case() -> Iterator[Case]:
    torch._dynamo.reset()
    case = qwen_image_with_lora()
    case.model.compile_repeated_blocks(backend="aot_eager", fullgraph=True)
    yield case
    torch._dynamo.reset()


def test_compiled_blocks_compute_the_same_and_their_attention_is_not_saved(compiled_case: Case) -> None:
    reference = training_step(compiled_case)
    compiled = counters["stats"]["unique_graphs"]
    engine = GradientEngine(policy=BlockPolicy(selected=BlockStrategy(offload=True, save_attention="keep")))
    with gradient_engine(engine):
        run = block_runner(3, True, True, unused_matmuls=["img_mlp.net.2"])
        assert training_step(compiled_case, intercept_blocks(compiled_case.model, run)) == reference
    assert counters["stats"]["unique_graphs"] == compiled > 0
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
