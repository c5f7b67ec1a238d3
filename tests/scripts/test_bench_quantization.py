"""The benchmark of quantised bases compares what it says."""

from pathlib import Path

import pytest
from family_sample import Sample, adapted_transformer, build_sample
from quantization import (
    FORMATS,
    encoder_bytes,
    encoding_row,
    family_row,
    merge_rows,
    parse_arguments,
    release_bytes,
)

from diffsynth_lite.lora import adapter_settings, adapter_tensors


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


def test_merging_loses_more_the_fewer_the_bits(sample: Sample, tmp_path: Path) -> None:
    transformer = adapted_transformer(sample)
    sample.family.save_lora(tmp_path, adapter_tensors(transformer), adapter_settings(transformer))
    rows = merge_rows(sample.family.folder.path, tmp_path, ["int8"])
    lost = [float(row["lost of the LoRA"].rstrip("%")) for row in rows]
    assert [row["weights in"] for row in rows] == ["bf16", "int8"]
    assert 0 < lost[0] < lost[1] < 100


def test_a_lora_needs_its_model() -> None:
    assert parse_arguments(["--formats", *FORMATS]).formats == list(FORMATS)
    with pytest.raises(SystemExit):
        parse_arguments(["--lora", "lora"])
