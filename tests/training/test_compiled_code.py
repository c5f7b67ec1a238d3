"""Compiled code is kept for later runs: in the user's own folder, and nowhere that others can write."""

import inspect
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._inductor.exc import InductorError
from torch.compiler._cache import CacheArtifactManager, CacheInfo

from diffsynth_lite.config import load_config
from diffsynth_lite.core.gradient import BlockCompiler, require_compiler
from diffsynth_lite.errors import RunInterrupted, UserError
from diffsynth_lite.training.stages import compiled_code_kept, stopped_compiler_explained

ON = ("train.compile=blocks", "train.compile_cache=true")


def run(*overrides: str, is_main: bool = True) -> Any:
    """As much of a run as it takes."""
    config = load_config("qwen_lora.yaml", ["data.path=x", *overrides]).config
    accelerator = SimpleNamespace(device=torch.device("cpu"))
    return SimpleNamespace(config=config, accelerator=accelerator, is_main=is_main)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    return tmp_path / ".cache" / "diffsynth_lite" / "compiled"


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """What torch was given to load; what it has to save is one part more each time."""
    given: list[bytes] = []

    def artifacts(number: int) -> CacheInfo:
        return CacheInfo(artifacts=defaultdict(list, {"inductor": [str(place) for place in range(number)]}))

    def load(content: bytes) -> CacheInfo:
        given.append(content)
        return artifacts(int(content))

    def save() -> tuple[bytes, CacheInfo]:
        number = 1 + len(given)
        return str(number).encode(), artifacts(number)

    monkeypatch.setattr(torch.compiler, "load_cache_artifacts", load)
    monkeypatch.setattr(torch.compiler, "save_cache_artifacts", save)
    return given


def test_what_a_run_compiled_is_there_in_the_next_one_and_nobody_else_may_have_written_it(
    folder: Path, loaded: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    with compiled_code_kept(run("train.compile=blocks")):
        pass
    assert not folder.exists()
    with pytest.raises(ZeroDivisionError), compiled_code_kept(run(*ON)):
        raise ZeroDivisionError
    [file] = folder.iterdir()
    assert (file.read_bytes(), file.stat().st_mode & 0o777, loaded) == (b"1", 0o600, [])
    for place in (file, folder):
        mode = place.stat().st_mode
        place.chmod(0o770)
        with pytest.raises(UserError, match="others may write to"), compiled_code_kept(run(*ON)):
            pass
        place.chmod(mode)
    assert loaded == []
    with compiled_code_kept(run(*ON, "train.learning_rate=1e-5")):
        assert loaded == [b"1"]
    assert file.read_bytes() == b"2"
    with compiled_code_kept(run(*ON, is_main=False)):
        assert loaded == [b"1", b"2"]
    assert file.read_bytes() == b"2"
    others = ("lora.rank=7", "data.resolutions=[512]", "train.micro_batch_size=4", "train.mixed_precision=no")
    for other in others:
        with compiled_code_kept(run(*ON, other)):
            assert loaded == [b"1", b"2"]
    assert len(list(folder.iterdir())) == 1 + len(others)
    monkeypatch.setattr("diffsynth_lite.training.stages.replacing", None)  # nothing new, nothing written
    monkeypatch.setattr(torch.compiler, "save_cache_artifacts", lambda: (b"1", CacheInfo()))
    with compiled_code_kept(run(*ON)):
        assert loaded == [b"1", b"2", b"2"]


@pytest.mark.parametrize("asked", [False, True])
def test_a_compiler_that_ctrl_c_ended_is_an_error_only_where_nobody_asked_to_stop(asked: bool) -> None:
    signals = SimpleNamespace(asked=asked, command=": again")
    kind, message = (RunInterrupted, r"continues: again$") if asked else (InductorError, "was killed")
    with (
        pytest.raises(kind, match=message),
        stopped_compiler_explained(SimpleNamespace(requests=SimpleNamespace(signals=signals))),
    ):
        raise InductorError(RuntimeError("g++ was killed"), inspect.currentframe())


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of what torch's compiler imports
def test_a_second_process_finds_its_graphs(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    try:
        require_compiler(torch.device("cpu"))
    except ValueError as error:
        pytest.skip(str(error))
    monkeypatch.setattr(torch._inductor.config.cpp, "vec_isa_ok", True)
    monkeypatch.setattr(torch._inductor.config, "cpp_cache_precompile_headers", False)
    found = []
    for process in range(2):  # each as a new one: torch knows nothing, and its own folder is empty
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        CacheArtifactManager.clear()
        monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / str(process)))
        block = torch.nn.Linear(4, 4)
        BlockCompiler([block])
        with compiled_code_kept(run(*ON)):
            block(torch.ones(2, 4)).sum().backward()
        counts = torch._dynamo.utils.counters
        found.append((counts["inductor"]["fxgraph_cache_hit"], counts["inductor"]["fxgraph_cache_miss"]))
        found[-1] = (*found[-1], counts["aot_autograd"]["autograd_cache_hit"])
    assert found == [(0, 2, 0), (2, 0, 1)]
