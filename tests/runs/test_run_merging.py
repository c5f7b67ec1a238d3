"""LoRAs that are merged, made smaller, or written into the base model: compared with what diffusers makes of
them."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import QwenImagePipeline
from safetensors.torch import load_file, save_file

from diffsynth_lite.cli.main import main
from diffsynth_lite.run_folder.loras import metadata_of
from diffsynth_lite.training.export import merged_base

FAMILY = ("--family", "qwen_image")
SIZE = {"width": 32, "height": 32, "num_inference_steps": 2, "output_type": "latent"}


def written(
    model: Path,
    file: Path,
    rank: int,
    kinds: tuple[str, ...],
    *,
    dtype: torch.dtype,
    alpha: float,
    words: str,
) -> Path:
    """A LoRA with an alpha of its own, on some kinds of layers."""
    tensors, generator = {}, torch.Generator().manual_seed(rank)
    for name, weight in load_file(model / "transformer" / "diffusion_pytorch_model.safetensors").items():
        layer = name.removesuffix(".weight")
        if layer != name and layer.endswith(kinds):
            down = torch.randn(rank, weight.shape[1], generator=generator)
            up = torch.randn(len(weight), rank, generator=generator) / 8
            tensors[f"diffusion_model.{layer}.lora_down.weight"] = down.to(dtype)
            tensors[f"diffusion_model.{layer}.lora_up.weight"] = up.to(dtype)
            tensors[f"diffusion_model.{layer}.alpha"] = torch.tensor(alpha)
    both = {"diffsynth_lite.family": "qwen_image", "diffsynth_lite.contract": "c"}
    save_file(tensors, file, {"modelspec.trigger_phrase": words, "modelspec.title": file.stem} | both)
    return file


@pytest.fixture(scope="module")
def first(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("loras") / "first.safetensors"
    kinds = ("to_q", "to_k")
    return written(tiny_model, file, 2, kinds, dtype=torch.float32, alpha=1.0, words="sks dog")


@pytest.fixture(scope="module")
def second(tiny_model: Path, first: Path) -> Path:
    file, kinds = first.with_name("second.safetensors"), ("to_q", "to_v")
    return written(tiny_model, file, 3, kinds, dtype=torch.bfloat16, alpha=4.0, words="red, sks dog")


@pytest.fixture
def config(tiny_model: Path, tmp_path: Path) -> Path:
    file = tmp_path / "base.yaml"
    file.write_text(
        f"model: {{family: qwen_image, path: {tiny_model}, quantize: int8}}\n"
        f"data: {{path: none}}\noutput: {{dir: {tmp_path}/none}}\n"
    )
    return file


def written_wrong(tensors: dict[str, torch.Tensor], file: Path, metadata: dict[str, str]) -> None:
    last = list(tensors)[-1]
    save_file(tensors | {last: tensors[last] + 1}, file, metadata)


def not_written(_tensors: object, file: Path, metadata: dict[str, str]) -> None:
    raise OSError(28, "No space left on device", str(file))


def generated(pipeline: Any) -> torch.Tensor:
    latents: torch.Tensor = pipeline("a red star", generator=torch.Generator().manual_seed(0), **SIZE).images
    return latents


@pytest.mark.filterwarnings("ignore:Already found a `peft_config`:UserWarning")
def test_a_merged_file_and_a_merged_base_do_what_diffusers_does_with_both_adapters(
    tiny_model: Path, first: Path, second: Path, config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, base = config.with_name("sum.safetensors"), config.with_name("base")
    weighted = (f"{first}:0.8", f"{second}:-0.5")
    assert main(["convert", *weighted, "--merge", str(out), *FAMILY]) == 0
    assert main(["convert", *weighted, "--into-base", str(base), "--config", str(config)]) == 0
    pipeline = QwenImagePipeline.from_pretrained(tiny_model, dtype=torch.float32)
    plain = generated(pipeline)
    alone = config.with_name("alone.safetensors")
    for file in (first, second):
        # diffusers reads no tensors of alpha for this family.
        assert main(["convert", str(file), str(alone), "--dtype", "float32", "--replace", *FAMILY]) == 0
        pipeline.load_lora_weights(alone, adapter_name=file.stem)
    pipeline.set_adapters([first.stem, second.stem], [0.8, -0.5])
    both = generated(pipeline)
    pipeline.unload_lora_weights()
    pipeline.load_lora_weights(out)
    # The same sums, of float32 in another order: they differ by less than a thousandth of what LoRAs change.
    change = (both - plain).abs().max()
    torch.testing.assert_close(generated(pipeline), both, rtol=0, atol=float(change) / 1000)
    pipeline.unload_lora_weights()
    found = type(pipeline.transformer).from_pretrained(base / "transformer", dtype=torch.float32)
    before = {name: weight.clone() for name, weight in pipeline.transformer.state_dict().items()}
    after = found.state_dict()
    pipeline.load_lora_weights(out)
    pipeline.fuse_lora()
    pipeline.unload_lora_weights()
    # Each number is rounded once, to 8 bits; what was added up in another order may round the other way.
    for name, fused in pipeline.transformer.state_dict().items():
        torch.testing.assert_close(after[name], fused, rtol=2**-8, atol=1e-6)
    changed = {name for name in before if not torch.equal(before[name].bfloat16(), after[name].bfloat16())}
    assert len(changed) == 6
    printed = capsys.readouterr().out
    assert f"{first} x 0.8: qwen_image, 4 layers" in printed
    assert "rank 2 and 5 and 3" in printed
    assert f"{base}: 6 layers changed, written as bfloat16 and read back." in printed


def test_a_sum_states_what_it_is_made_of_and_what_all_its_files_state(
    first: Path, second: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "sum.safetensors"
    asked = ["convert", str(first), f"{second}:2", "--merge", str(out), "--rank", "3", "--json"]
    assert main([*asked, "--dtype", "bfloat16"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert [source["weight"] for source in facts["sources"]] == [1.0, 2.0]
    assert set(facts["ranks"].values()) == {2, 3}
    assert 0 < facts["lost"] < max(facts["lost_by_layer"].values()) < 1
    assert list(facts["lost_by_layer"].values())[2:] == [0.0] * 4
    stated = metadata_of(out)
    assert json.loads(stated["diffsynth_lite.merged_from"]) == [
        {"lora": "first", "weight": 1.0},
        {"lora": "second", "weight": 2.0},
    ]
    assert stated["modelspec.title"] == "first x 1 + second x 2"
    assert stated["modelspec.description"] == "Merged from first x 1 + second x 2. Reduced to rank 3."
    assert stated["modelspec.trigger_phrase"] == "sks dog, red"
    assert stated["diffsynth_lite.family"] == "qwen_image"
    assert "diffsynth_lite.contract" not in stated


def test_a_full_disk_is_found_before_anything_is_written_and_a_failing_one_leaves_nothing(
    first: Path, config: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    asked = ["convert", str(first), "--into-base", str(config.parent / "out"), "--config", str(config)]
    with monkeypatch.context() as patch:
        patch.setattr(merged_base, "free_disk_bytes", lambda _folder: 1024)
        assert main(asked) == 2
    assert "1.0 KiB are free there" in caplog.messages[-1]
    for save, code in ((written_wrong, 3), (not_written, 2)):
        monkeypatch.setattr(merged_base, "save_file", save)
        assert main(asked) == code
    assert [path.name for path in config.parent.iterdir()] == [config.name]


REFUSED = {
    "{one}": "takes IN and OUT, not 1 names; --merge OUT makes one of several",
    "{one} {one} {root}/out.safetensors": "takes IN and OUT, not 3 names",
    "{one}@0.8 --merge {root}/out.safetensors": "as an @ names a step: {one}:0.8",
    "{one}:0.8 {root}/out.safetensors": "a weight has an effect only with --merge or --into-base",
    "{one}:0 --merge {root}/out.safetensors": "with the weight 0 it has no effect",
    "{one} {dora} --merge {root}/out.safetensors": "dora.safetensors: is a DoRA, whose update depends",
    "{dora} {root}/out.safetensors --rank 1": "is a DoRA, whose update depends on the base",
    "{one} {other} --merge {root}/out.safetensors": "to_k has different sizes in these LoRAs",
    "{one} {root}/out.safetensors --config {yaml}": "has an effect only with --into-base",
    "{one} --into-base {root}/out --config {yaml} --rank 3 --to kohya": "--rank, --to has no effect",
    "{one} --into-base {root} --config {yaml}": "is there already; name a new folder",
    "{one} --into-base {root}/out": "--config: is missing, and no run names the base model",
    "{one} {dora} --into-base {root}/out --config {yaml}": "can be merged only by itself",
    "{other} --into-base {root}/out --config {yaml}": "the LoRA does not fit the model",
}


@pytest.mark.parametrize(("arguments", "message"), REFUSED.items())
def test_what_cannot_be_merged_is_one_line(
    first: Path, config: Path, caplog: pytest.LogCaptureFixture, arguments: str, message: str
) -> None:
    tensors = load_file(first)
    layer = min(tensors).removesuffix(".alpha")
    norms = torch.ones(len(tensors[f"{layer}.lora_up.weight"]))
    dora = {name: tensor for name, tensor in tensors.items() if name.startswith(layer)}
    root = config.parent
    save_file(dora | {f"{layer}.lora_magnitude_vector": norms}, root / "dora.safetensors")
    narrow = {name: tensor[:, :6].clone() if "down" in name else tensor for name, tensor in tensors.items()}
    save_file(narrow, root / "other.safetensors")
    names = {"one": first, "dora": root / "dora.safetensors", "other": root / "other.safetensors"}
    words = arguments.format(root=root, yaml=config, **names)
    assert main(["convert", *words.split()]) == 2
    (error,) = (record.getMessage() for record in caplog.records if record.levelname == "ERROR")
    assert message.format(one=first) in error
    assert not (root / "out").exists()
    assert not (root / "out.safetensors").exists()
