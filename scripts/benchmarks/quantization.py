"""What quantising changes: a LoRA's gradients, what prompts are encoded to, sizes, and a LoRA that is merged.

Each family's tiny model gets a LoRA on its default target modules. Its gradients are compared with those on
the same weights in float32: by the cosine between all of them, and by the norm of their difference as a part
of theirs. All computes in float32, so that what differs is the weights. bf16 is weights rounded to bfloat16,
for comparison. The models are random and a few channels wide.

    python scripts/benchmarks/quantization.py [--family NAME ...] [--formats int8 nf4]
    python scripts/benchmarks/quantization.py --text-encoders [--family NAME ...] [--formats int8 nf4]
    python scripts/benchmarks/quantization.py --releases [--text-encoders] [--formats int8 nf4]

The second form compares in the same way what each family's tiny text encoders make of a few prompts. The
third counts the bytes of what is trained of each released model, one expert of two, on torch's meta device;
or of its text encoders, also as they are streamed, with two slots. Needs what the tests need, whose samples
it uses.
"""

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from meters import print_table
from torch import Tensor, nn

TESTS = Path(__file__).parents[2] / "tests"
# Samples of all families, and the family that is kept elsewhere.
sys.path += [str(TESTS / name) for name in ("pipelines", "elsewhere")]

from family_sample import (  # noqa: E402
    CPU,
    ELSEWHERE,
    Sample,
    adapted_transformer,
    build_prompts,
    build_sample,
    small_edit_inputs,
    velocity_and_gradients,
)

from diffsynth_lite.core.weights import (  # noqa: E402
    HostBlocks,
    Quantization,
    QuantizationReport,
    counted_format,
    weight_format,
)
from diffsynth_lite.pipelines import ModelFamily, family_names, load_family  # noqa: E402
from diffsynth_lite.pipelines.base.quantized import quantizable_layers  # noqa: E402
from diffsynth_lite.pipelines.base.release_folder import write_release  # noqa: E402
from diffsynth_lite.pipelines.base.text_encoders import (  # noqa: E402
    TextEncoderMemory,
    encoder_quantizations,
)

FORMATS = ("int8", "nf4")
META = torch.device("meta")
NUM_SLOTS = 2
SMALLEST_STREAMED = 64 * 1024
"""Bytes; that of accelerators."""


def gradients_on(sample: Sample, name: str) -> tuple[Tensor, QuantizationReport]:
    """All gradients of a LoRA in one vector, on weights in a format, in ``bf16`` or in ``fp32``."""
    family = sample.family
    if name in FORMATS:
        model = family.parts_of(family.empty_transformer())[family.trained[0]]
        layers = tuple(quantizable_layers(model, family.block_lists))
        family.quantization = Quantization(format=weight_format(name), layers=layers, device=CPU)
    transformer = adapted_transformer(sample)
    family.quantization = None
    if name == "bf16":
        for parameter in transformer.parameters():
            if not parameter.requires_grad:
                parameter.data = parameter.bfloat16().float()
    _, gradients = velocity_and_gradients(sample, transformer)
    vector = torch.cat([gradient.flatten() for gradient in gradients.values() if gradient is not None])
    return vector, QuantizationReport.of(transformer)


def family_row(name: str, formats: Sequence[str]) -> dict[str, str]:
    """The row of a family: layers quantised, and what becomes of its gradients."""
    with TemporaryDirectory() as folder, small_edit_inputs():
        sample = build_sample(name, Path(folder))
        expected, _ = gradients_on(sample, "fp32")
        row = {"family": name.rpartition(".")[2], "layers": ""}
        for one in ("bf16", *formats):
            found, report = gradients_on(sample, one)
            row["layers"] = str(report.num_layers)
            row |= compared(one, found, expected)
    return row


class Rounded(TextEncoderMemory):
    """Rounds the weights of text encoders to bfloat16, and leaves them in their dtype."""

    def place(
        self, encoders: Sequence[nn.Module], device: torch.device, loaded: HostBlocks | None = None
    ) -> None:
        for parameter in nn.ModuleList(encoders).parameters():
            parameter.data = parameter.bfloat16().float()
        super().place(encoders, device, loaded)


def quantizations_of(family: ModelFamily, name: str, device: torch.device) -> dict[str, Quantization]:
    """Of all that can be quantised in the family's text encoders, in a format; nothing for ``bfloat16``."""
    if name not in FORMATS:
        return {}
    encoders = {component: family.empty_component(component) for component in family.text_encoders}
    weights = counted_format(name) if device == META else weight_format(name)
    return encoder_quantizations(encoders, weights, device)


def encodings_with(sample: Sample, name: str) -> Tensor:
    """What the sample's prompts are encoded to, in one vector, with weights in a format or as they are."""
    family = sample.family
    given = quantizations_of(family, name, CPU)
    family.text_encoder_memory = Rounded() if name == "bf16" else TextEncoderMemory(quantizations=given)
    encode = family.load_prompt_encoder(torch.float32, CPU)
    encoded = [encode([prompt])[0] for prompt in build_prompts(family, sample.media)]
    values = [tensor for row in encoded for tensor in row.values() if tensor.is_floating_point()]
    return torch.cat([tensor.flatten() for tensor in values])


def encoding_row(name: str, formats: Sequence[str]) -> dict[str, str]:
    """The row of a family: its text encoders, and what becomes of what they encode."""
    with TemporaryDirectory() as folder, small_edit_inputs():
        sample = build_sample(name, Path(folder))
        family, expected = sample.family, encodings_with(sample, "fp32")
        row = {"family": name.rpartition(".")[2], "text encoders": encoder_names(family)}
        for one in ("bf16", *formats):
            row |= compared(one, encodings_with(sample, one), expected)
    return row


def encoder_names(family: ModelFamily) -> str:
    """Classes of the text encoders, as they are told from others."""
    names = [type(family.empty_component(name)).__name__ for name in family.text_encoders]
    return ", ".join(name.removesuffix("ForConditionalGeneration") for name in names)


def compared(name: str, found: Tensor, expected: Tensor) -> dict[str, str]:
    """The columns of a format: how far one vector is from another."""
    return {
        f"{name}: cosine": f"{torch.cosine_similarity(found, expected, dim=0):.5f}",
        f"{name}: difference": f"{(found - expected).norm() / expected.norm():.4f}",
    }


def release_rows(
    formats: Sequence[str], columns: Callable[[ModelFamily, Sequence[str]], dict[str, str]]
) -> Iterator[dict[str, str]]:
    """The rows of all released models: their name, and what ``columns`` makes of the family of each."""
    for family_class in map(load_family, family_names()):
        for release in family_class.releases:
            with TemporaryDirectory() as folder:
                family = family_class(write_release(release, Path(folder)))
                yield {"model": release.name} | columns(family, formats)


def trained_columns(family: ModelFamily, formats: Sequence[str]) -> dict[str, str]:
    """GiB of weights of what a family trains, plain and in each format."""
    return {name: gibibytes(release_bytes(family, name)) for name in ("bfloat16", *formats)}


def encoder_columns(family: ModelFamily, formats: Sequence[str]) -> dict[str, str]:
    """The text encoders, and GiB of their weights: plain, in each format, and streamed."""
    sizes = {name: gibibytes(encoder_bytes(family, name)) for name in ("bfloat16", *formats)}
    streamed = gibibytes(encoder_bytes(family, "bfloat16", num_slots=NUM_SLOTS))
    return {"text encoders": encoder_names(family), **sizes, "bfloat16, streamed": streamed}


def gibibytes(num_bytes: int) -> str:
    """A number of bytes as the tables give it."""
    return f"{num_bytes / 2**30:.1f}"


def release_bytes(family: ModelFamily, name: str) -> int:
    """Bytes of the first model that a family trains, in bfloat16 but for blocks in a format."""
    model = family.parts_of(family.empty_transformer())[family.trained[0]].to(torch.bfloat16)
    if name in FORMATS:
        layers = tuple(quantizable_layers(model, family.block_lists))
        Quantization(format=counted_format(name), layers=layers, device=META).apply_to(model)
    return sum(parameter.nbytes for parameter in model.parameters())


def encoder_bytes(family: ModelFamily, name: str, *, num_slots: int = 0) -> int:
    """Bytes of a family's text encoders on the device, in bfloat16 but for layers in a format.

    Args:
        num_slots: of streamed layers; 0 streams none.
    """
    encoders = {key: family.empty_component(key).to(torch.bfloat16) for key in family.text_encoders}
    for key, quantization in quantizations_of(family, name, META).items():
        quantization.apply_to(encoders[key])
    nn.ModuleList(encoders.values()).requires_grad_(False)
    memory = TextEncoderMemory(num_slots=num_slots, min_bytes=SMALLEST_STREAMED)
    on_device, _ = memory.num_bytes(list(encoders.values()), META)
    return on_device


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--family", action="append", help="default: all (repeatable)")
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=("int8",), help="to compare")
    parser.add_argument("--releases", action="store_true", help="count the bytes of released models")
    parser.add_argument("--text-encoders", action="store_true", help="in place of what is trained")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table that the command line asks for."""
    options = parse_arguments(arguments)
    torch.set_num_threads(1)
    if options.releases:
        of, columns = "what is trained", trained_columns
        if options.text_encoders:
            of, columns = "text encoders", encoder_columns
        print_table(f"GiB of weights of {of}.", list(release_rows(options.formats, columns)))
        return
    names = options.family or [*family_names(), *ELSEWHERE]
    of, make_row = "Gradients of a LoRA", family_row
    if options.text_encoders:
        of, make_row = "Encodings of prompts", encoding_row
    print_table(
        f"{of}, against those on float32 weights.", [make_row(name, options.formats) for name in names]
    )


if __name__ == "__main__":
    main()
