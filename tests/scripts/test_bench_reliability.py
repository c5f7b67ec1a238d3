"""The benchmark of what reliability costs measures the trainer as it is."""

from pathlib import Path
from typing import Any

import pytest
import reliability
import torch
from meters import mebibytes
from PIL import Image


def rows(printed: str) -> dict[str, list[str]]:
    """Cells of a table by the first one of their row."""
    lines = [line for line in printed.splitlines() if line.startswith("| ")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return {first: others for first, *others in cells}


def test_a_save_is_told_by_what_is_done(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    reliability.main(["save", "--rank", "1", "--saves", "1", "--folder", str(tmp_path)])
    printed = capsys.readouterr().out
    seconds = [float(cell.removesuffix(" s")) for cell in rows(printed)["1"]]
    *parts, whole, _read = seconds
    assert sum(parts) == pytest.approx(whole, abs=0.05)
    tensors = reliability.lora_tensors(1)
    num_bytes = sum(tensor.nbytes for named in tensors.values() for tensor in named.values())
    assert f"LoRA of rank 1: {mebibytes(num_bytes)} MiB with its moments" in printed


def test_the_loop_without_has_no_draws_no_check_and_no_exchange_and_both_train(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("a", "b"):
        Image.new("RGB", (64, 64), "red").save(tmp_path / f"{name}.png")
        (tmp_path / f"{name}.txt").write_text("a red picture")
    drawn, randn = [], torch.randn

    def noted(*shape: Any, **given: Any) -> torch.Tensor:
        if given:  # the optimizer is tried on numbers of a generator
            return randn(*shape, **given)
        drawn.append(shape)
        return torch.zeros(*shape)

    monkeypatch.setattr(torch, "randn", noted)
    settings = ["train.global_batch_size=2", "train.micro_batch_size=2", "lora.rank=1"]
    reliability.main(["step", "--steps", "1", f"data.path={tmp_path}", *settings])
    table = rows(capsys.readouterr().out)
    assert table["without"][1] == "1.0000"
    assert {"with all", "with all, again", "draws, alone", "exchange, alone"} <= table.keys()
    assert drawn  # the stand-in of the loop without drew its noise once
