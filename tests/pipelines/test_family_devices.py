"""A family's model on another device than the encoded batch; torch's meta device stands in for a GPU."""

from typing import Any

import pytest
import torch
from family_sample import Sample, engine_with
from torch.utils._pytree import tree_leaves

from diffsynth_lite.core.gradient import blocks_of, gradient_engine
from diffsynth_lite.core.planning import backward_in_scope
from diffsynth_lite.core.planning.kernels import ON_ALL_DEVICES, FusedKernels

META = torch.device("meta")


def test_all_that_a_batch_holds_goes_to_the_device_of_the_model(sample: Sample) -> None:
    transformer = sample.family.empty_transformer().requires_grad_(False)
    for block in blocks_of(transformer, sample.family.block_lists):
        block.requires_grad_(True)
    given: list[Any] = []
    transformer.register_forward_pre_hook(
        lambda _module, args, kwargs: given.extend(tree_leaves((args, kwargs))), with_kwargs=True
    )
    try:
        with FusedKernels(ON_ALL_DEVICES):  # in which plans are made
            predicted = predict_on_meta(sample, transformer)
            backward_in_scope(predicted.square().mean())
    except NotImplementedError as error:
        if not given or "Cannot copy out of meta tensor" not in str(error):
            raise
        assert {value.device for value in given if isinstance(value, torch.Tensor)} == {META}
        pytest.skip("the model itself reads a number back, as Lumina 2 reads how long prompts are")
    assert predicted.device == META
    assert predicted.shape == sample.latents.shape


def predict_on_meta(sample: Sample, transformer: torch.nn.Module) -> torch.Tensor:
    """Torch refuses to compute with tensors of two devices, and to read a number back from this one."""
    sigma = torch.empty(len(sample.latents), device=META)
    with gradient_engine(engine_with((True, False))):
        return sample.family.predict(transformer, sample.latents.to(META), sigma, sample.conditioning)
