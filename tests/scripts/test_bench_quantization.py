"""The benchmark of quantised bases compares what it says."""

import pytest
from family_sample import Sample, build_sample
from quantization import (
    encoder_bytes,
    encoding_row,
    family_row,
    release_bytes,
)


@pytest.fixture(scope="module")
def sample(tmp_path_factory: pytest.TempPathFactory) -> Sample:
    return build_sample("qwen_image", tmp_path_factory.mktemp("sample"))


def test_gradients_are_compared_with_those_on_float32_weights() -> None:
    row = family_row("qwen_image", ["int8"])
    assert row["layers"] == "28"
    for name in ("bf16", "int8"):
        assert 0.999 < float(row[f"{name}: cosine"]) <= 1
        assert 0 < float(row[f"{name}: difference"]) < 0.05


def test_bytes_are_those_of_the_format(sample: Sample) -> None:
    plain, quantised = (release_bytes(sample.family, name) for name in ("bfloat16", "int8"))
    model = sample.family.empty_transformer()
    assert plain == 2 * sum(parameter.numel() for parameter in model.parameters())
    assert plain / 2 < quantised < plain
    plain, quantised = (encoder_bytes(sample.family, name) for name in ("bfloat16", "int8"))
    encoder = sample.family.empty_component("text_encoder")
    assert plain == 2 * sum(parameter.numel() for parameter in encoder.parameters())
    assert plain / 2 < quantised < plain
    # All of its layers are smaller than what accelerators stream.
    assert encoder_bytes(sample.family, "bfloat16", num_slots=1) == plain


def test_encodings_are_compared_with_those_on_float32_weights() -> None:
    row = encoding_row("qwen_image", ["int8"])
    assert row["text encoders"] == "Qwen2_5_VL"
    for name in ("bf16", "int8"):
        assert 0.999 < float(row[f"{name}: cosine"]) <= 1
        assert 0 < float(row[f"{name}: difference"]) < 0.05
