"""The benchmark compares equal work: a compiler that changes nothing keeps what plain blocks keep."""

import pytest
import torch
from compiling import ROWS, main


# torch's compiler itself does what torch warns of.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_all_rows_are_measured_on_blocks_that_are_compiled(capsys: pytest.CaptureFixture[str]) -> None:
    torch._dynamo.reset()
    size = ("--heads", "1", "--height", "64", "--width", "64", "--frames", "1")
    run = ("--device", "cpu", "--train", "lora", "--backend", "eager", "--warmup", "0", "--rounds", "2")
    main(["--model", "wan", *run, *size])
    torch._dynamo.reset()
    printed = capsys.readouterr().out
    # The first block's input needs no gradient.
    assert "compiled        8 blocks, 2 graphs, 0 graph breaks" in printed
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in printed.splitlines() if "|" in line]
    kept = {row[0]: row[-2:] for row in rows[2:]}
    assert tuple(kept) == ROWS
    assert all(plain == compiled for plain, compiled in kept.values())
    assert float(kept["none"][0]) > float(kept["every block"][0]) > float(kept["offload every block"][0])
