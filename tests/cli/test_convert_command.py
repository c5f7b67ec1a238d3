"""``diffsynth-lite convert``: files of other trainers there and back, and what it says of them."""

import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from diffsynth_lite.cli.main import main

METADATA = {"ss_output_name": "mine", "modelspec.title": "Mine", "sshs_legacy_hash": "0"}


def written(file: Path, dtype: torch.dtype, **layers: int) -> Path:
    """A LoRA of rank 4 and alpha 2 in kohya's form, on layers with 6 inputs and so many outputs."""
    tensors = {}
    for seed, (layer, outputs) in enumerate(layers.items()):
        generator = torch.Generator().manual_seed(seed)
        tensors[f"{layer}.lora_down.weight"] = torch.randn(4, 6, generator=generator).to(dtype)
        tensors[f"{layer}.lora_up.weight"] = torch.randn(outputs, 4, generator=generator).to(dtype)
        tensors[f"{layer}.alpha"] = torch.tensor(2.0)
    save_file(tensors, file, metadata=METADATA)
    return file


def metadata(file: Path) -> dict[str, str]:
    with safe_open(file, "pt") as opened:
        return dict(opened.metadata())


@pytest.fixture
def flux_file(tmp_path: Path) -> Path:
    """Of a double-stream block and of a single-stream block."""
    return written(
        tmp_path / "flux.safetensors",
        torch.bfloat16,
        lora_unet_double_blocks_0_img_attn_qkv=18,
        lora_unet_single_blocks_0_linear1=42,
    )


@pytest.mark.parametrize("to", ["diffusers", "comfyui"])
def test_there_and_back_is_the_file_again(
    flux_file: Path, capsys: pytest.CaptureFixture[str], to: str
) -> None:
    there, back = flux_file.with_name("there.safetensors"), flux_file.with_name("back.safetensors")
    assert main(["convert", str(flux_file), str(there), "--to", to]) == 0
    assert capsys.readouterr().out.splitlines() == [
        f"{flux_file}: chroma or flux or flux_fill or flux_kontext, 2 layers such as "
        "lora_unet_double_blocks_0_img_attn_qkv; rank 4, alpha 2, bfloat16",
        f"{there}: 7 layers such as transformer.single_transformer_blocks.0.attn.to_k; rank 4, alpha 4 "
        "(the file has none: that is the rank), bfloat16",
        "All layers are in it, and their updates are the same.",
    ]
    assert metadata(there)["modelspec.title"] == "Mine"
    assert "sshs_legacy_hash" not in metadata(there)
    assert main(["convert", str(there), str(back), "--to", "kohya"]) == 0
    before, after = load_file(flux_file), load_file(back)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_a_file_of_all_blocks_of_hunyuan_video_is_not_of_flux(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cases = (
        ("hunyuan_video or hunyuan_video_i2v", 20, 40),
        ("flux or flux_fill or flux_kontext", 19, 38),
    )
    for name, double, single in cases:
        layers = {f"lora_unet_double_blocks_{place}_img_mod_lin": 36 for place in range(double)}
        layers |= {f"lora_unet_single_blocks_{place}_modulation_lin": 18 for place in range(single)}
        file = written(tmp_path / f"{double}.safetensors", torch.bfloat16, **layers)
        out = tmp_path / "out" / file.name
        assert main(["convert", str(file), str(out), "--to", "comfyui"]) == 0
        assert capsys.readouterr().out.startswith(f"{file}: {name}, {len(layers)} layers")


@pytest.mark.parametrize(
    ("layer", "family", "warns"),
    [
        ("transformer.layers.0.attention.to_q", "z_image", True),
        ("transformer.transformer_blocks.0.img_mlp.gate_layer", "qwen_image_21", True),
        ("transformer.transformer_blocks.0.img_mlp.net.2", "qwen_image", False),
    ],
)
def test_where_comfyui_takes_part_of_kohyas_names_that_is_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], layer: str, family: str, warns: bool
) -> None:
    file = written(tmp_path / "in.safetensors", torch.bfloat16, **{layer: 6})
    for to in ("kohya", "comfyui"):
        out = tmp_path / f"{to}.safetensors"
        assert main(["convert", str(file), str(out), "--to", to, "--family", family]) == 0
        printed = capsys.readouterr().out
        assert ("for ComfyUI use --to comfyui" in printed) == (warns and to == "kohya")


def test_a_file_in_the_names_of_comfyuis_cogvideox_is_known_and_gets_those_of_diffusers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    layers = {"diffusion_model.blocks.1.attn_out": 6, "diffusion_model.blocks.0.ff_proj": 24}
    file = written(tmp_path / "in.safetensors", torch.bfloat16, **layers)
    there, back = tmp_path / "there.safetensors", tmp_path / "back.safetensors"
    assert main(["convert", str(file), str(there), "--to", "diffusers"]) == 0
    assert capsys.readouterr().out.startswith(f"{file}: cogvideox, 2 layers")
    assert {name.partition(".lora_")[0] for name in load_file(there)} == {
        "transformer.transformer_blocks.1.attn1.to_out.0",
        "transformer.transformer_blocks.0.ff.net.0.proj",
    }
    assert main(["convert", str(there), str(back), "--to", "comfyui", "--family", "cogvideox"]) == 0
    assert {name.partition(".lora_")[0] for name in load_file(back)} == layers.keys()


def test_alpha_and_dtype_of_a_runs_lora_are_those_asked_for(
    flux_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = flux_file.with_name("new") / "other.safetensors"
    asked = ["--alpha", "3", "--dtype", "float16"]
    run = flux_file.parent
    (run / "status.json").write_text('{"found_at": ""}')
    (run / "lora").mkdir()
    flux_file.rename(run / "lora" / flux_file.name)
    shutil.copytree(run / "lora", run / "checkpoints" / "lora-00000200")
    assert main(["convert", f"{run}@200", str(run / "at_200.safetensors"), "--to", "kohya", *asked]) == 0
    capsys.readouterr()
    assert main(["convert", str(run), str(out), "--to", "kohya", *asked]) == 0
    assert out.read_bytes() == (run / "at_200.safetensors").read_bytes()
    printed = capsys.readouterr().out.splitlines()
    assert printed[1].endswith("rank 4, alpha 3, float16")
    assert "their updates differ by" in printed[2]
    tensors = load_file(out)
    assert {float(tensor) for tensor in tensors.values() if not tensor.ndim} == {3.0}
    assert {tensor.dtype for tensor in tensors.values() if tensor.ndim} == {torch.float16}
    assert metadata(out)["ss_network_alpha"] == "3"


@pytest.mark.parametrize(
    ("layer", "arguments", "message"),
    [
        (
            "lora_unet_single_blocks_0_modulation_lin",
            ("--to", "comfyui", "--alpha", "3"),
            "--alpha: a file for comfyui",
        ),
        (
            "lora_unet_foo",
            ("--to", "diffusers"),
            "of no family that is known; of .*1 of 1 are not: lora_unet_foo .6 to 6",
        ),
        ("lora_te3_x", ("--to", "diffusers"), "of no family that is known"),
        (
            "lora_te3_x",
            ("--to", "diffusers", "--without-text-encoders"),
            "holds no layers but of text encoders",
        ),
        ("transformer.transformer_blocks.0.attn.to_q", ("--to", "kohya"), "name its family with --family"),
        ("lora_unet_blocks_0_ffn_0", ("--to", "kohya", "--family", "flux"), "1 of 1 layers are not known"),
        (
            "lora_unet_blocks_0_ffn_0",
            ("--to", "kohya", "--family", "flax"),
            "--family: .* did you mean 'flux'",
        ),
        (
            "lora_unet_blocks_0_ffn_0",
            ("--to", "kohya", "--family", "my_families.stable_diffusion"),
            "lora_layers",
        ),
    ],
)
def test_what_cannot_be_converted_is_one_line(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    layer: str,
    arguments: tuple[str, ...],
    message: str,
) -> None:
    out = tmp_path / "out.safetensors"
    source = written(tmp_path / "in.safetensors", torch.float32, **{layer: 6})
    assert main(["convert", str(source), str(out), *arguments]) == 2
    assert [record.levelname for record in caplog.records].count("ERROR") == 1
    assert re.search(message, caplog.text)
    assert not out.exists()


def test_a_file_that_is_there_is_not_replaced(flux_file: Path, caplog: pytest.LogCaptureFixture) -> None:
    before = flux_file.read_bytes()
    assert main(["convert", str(flux_file), str(flux_file), "--to", "diffusers"]) == 2
    assert "is there already" in caplog.text
    assert main(["convert", str(flux_file), str(flux_file.with_name("x.pt")), "--to", "diffusers"]) == 2
    assert "name one that ends in .safetensors" in caplog.text
    assert flux_file.read_bytes() == before
    shutil.copy(flux_file, out := flux_file.with_name("out.safetensors"))
    assert main(["convert", str(flux_file), str(out), "--to", "diffusers", "--replace"]) == 0
    assert out.read_bytes() != before


def test_a_folder_of_comfyui_gets_each_file_by_the_name_of_the_run_and_keeps_those_of_others(
    flux_file: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run, theirs = tmp_path / "mine", tmp_path / "loras"
    for folder in (run / "lora", theirs):
        folder.mkdir(parents=True)
    (run / "status.json").write_text('{"found_at": ""}')
    for expert in ("high_noise", "low_noise"):
        file = run / "lora" / f"pytorch_lora_weights_{expert}.safetensors"
        save_file(load_file(flux_file), file, METADATA | {"diffsynth_lite.contract": "a"})
    asked = ["convert", str(run), str(theirs), "--to", "comfyui"]
    assert main([*asked, "--dtype", "float16"]) == 2
    assert "is a folder, which takes the LoRA with its alpha, rank, dtype and layers" in caplog.messages[-1]
    assert main(asked) == 0
    copies = theirs / "mine-high_noise.safetensors", theirs / "mine-low_noise.safetensors"
    assert sorted(theirs.iterdir()) == list(copies)
    out = tmp_path / "out.safetensors"
    assert main(["convert", str(file), str(out), "--to", "comfyui"]) == 0
    assert [copy.read_bytes() for copy in copies] == [out.read_bytes()] * 2
    copies[0].write_bytes(b"torn")
    save_file(load_file(out), copies[1], {"diffsynth_lite.contract": "b"})
    for foreign in copies:
        before = copies[1].read_bytes()
        assert main(asked) == 2
        assert f"{foreign}: is there already, and not of this run" in caplog.messages[-1]
        assert copies[1].read_bytes() == before
        shutil.copy(out, foreign)
    copies[0].write_bytes(b"torn")
    assert main([*asked, "--replace"]) == 0
    assert [copy.read_bytes() for copy in copies] == [out.read_bytes()] * 2


def test_a_dora_is_copied_for_comfyui_as_it_is_where_comfyui_reads_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    theirs, dora = tmp_path / "loras", tmp_path / "dora.safetensors"
    theirs.mkdir()
    layer = "transformer.transformer_blocks.0.attn.to_q"
    save_file(
        {
            f"{layer}.lora_A.weight": torch.ones(2, 6),
            f"{layer}.lora_B.weight": torch.ones(6, 2),
            f"{layer}.lora_magnitude_vector": torch.ones(6),
        },
        dora,
    )
    asked = ["convert", str(dora), str(theirs), "--to", "comfyui", "--family"]
    assert main([*asked, "hunyuan_video"]) == 2
    assert "dora.safetensors: is a DoRA" in caplog.messages[-1]
    assert list(theirs.iterdir()) == []
    assert main([*asked, "qwen_image"]) == 0
    assert (theirs / "dora.safetensors").read_bytes() == dora.read_bytes()
