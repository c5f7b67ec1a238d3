"""Attention of each family is computed by the kernel that is chosen, or its family offers none."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from diffusers.models.attention_dispatch import AttentionBackendName, _AttentionBackendRegistry
from family_sample import ELSEWHERE, SIGMA, Sample

from diffsynth_lite.core.attention import has_backends, use_backend
from diffsynth_lite.training.checks import has_masks

WITHOUT_BACKENDS = (
    *("anima", "aura_flow", "cogvideox", "hidream", "lumina2", "qwen_image_21", "sana", "sd3", "sdxl"),
    *ELSEWHERE,
)
"""As docs/compile.md has them, with the one that is only for tests."""


def _noting(
    calls: list[tuple[str, bool]], name: str, kernel: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    calls.append((name, kwargs.get("attn_mask") is not None))
    return kernel(*args, **kwargs)


@pytest.mark.of_the_model
def test_attention_is_by_the_kernel_that_is_chosen_in_families_that_offer_it(
    sample: Sample, monkeypatch: pytest.MonkeyPatch
) -> None:
    family, model = sample.family, sample.model
    if not (family.dispatches_attention and has_backends(model)):
        assert sample.name in WITHOUT_BACKENDS
        return
    assert sample.name not in WITHOUT_BACKENDS
    calls, backends = list[tuple[str, bool]](), _AttentionBackendRegistry._backends
    for name in (AttentionBackendName.NATIVE, AttentionBackendName._NATIVE_MATH):
        counted = partial(_noting, calls, name, backends[name])
        monkeypatch.setitem(backends, name, counted)
    for module in model.modules():
        if hasattr(getattr(module, "processor", None), "_attention_backend"):
            monkeypatch.setattr(module.processor, "_attention_backend", None)  # restored afterwards

    def velocity(num_samples: int = 1) -> torch.Tensor:
        calls.clear()
        first = slice(num_samples)
        with torch.no_grad():
            return family.predict(
                model, sample.latents[first].float(), SIGMA[first], sample.conditioning[first]
            )

    velocity(len(sample.conditioning))
    assert has_masks(family, in_batches=True) == any(is_masked for _, is_masked in calls)
    plain = velocity()
    assert has_masks(family, in_batches=False) == any(is_masked for _, is_masked in calls)
    assert {name for name, _ in calls} == {"native"}
    use_backend(model, "native")
    assert torch.equal(velocity(), plain)
    use_backend(model, "_native_math")
    assert torch.allclose(velocity(), plain, rtol=1e-3, atol=1e-4)  # it sums in another order
    assert {name for name, _ in calls} == {"_native_math"}
