"""A family's model on another device than the encoded batch; torch's meta device stands in for a GPU."""

import torch
from family_sample import Sample, engine_with

from diffsynth_lite.core.gradient import gradient_engine

META = torch.device("meta")


def test_all_that_a_batch_holds_goes_to_the_device_of_the_model(sample: Sample) -> None:
    transformer = sample.family.empty_transformer().requires_grad_(True)
    # torch refuses to compute with tensors of two devices, and to read a number back from this one.
    sigma = torch.empty(len(sample.latents), device=META)
    with gradient_engine(engine_with((True, False))):
        predicted = sample.family.predict(transformer, sample.latents.to(META), sigma, sample.conditioning)
    assert predicted.device == META
    assert predicted.shape == sample.latents.shape
    predicted.square().mean().backward()
