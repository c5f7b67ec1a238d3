"""Processes that were started for different runs all stop, and say what differs and where."""

import os
import socket
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import pytest
import torch
from accelerate import Accelerator
from processes import FORKED, LIMIT_S, free_port

from diffsynth_lite.config import Config, section_types
from diffsynth_lite.config.settings import FilePath
from diffsynth_lite.data import Bucket, ItemRow, ItemTable
from diffsynth_lite.errors import UserError
from diffsynth_lite.training.distributed import same_run
from diffsynth_lite.training.distributed.devices import describe_run
from diffsynth_lite.training.distributed.same_run import (
    require_same_items,
    require_same_model,
    require_same_settings,
)

HERE = socket.gethostname()
ROW = ItemRow(
    name="a.png",
    bucket=Bucket(width=64, height=32),
    source=0,
    media_key="ab" * 32,
    caption_keys=("cd" * 32,),
)


def config_of(**changes: dict[str, Any]) -> Config:
    """A config with some settings changed, by section."""
    sections: dict[str, dict[str, Any]] = {
        "model": {"family": "qwen_image", "path": "base"},
        "data": {"path": "pictures"},
        "train": {"global_batch_size": 4, "micro_batch_size": 2},
        "output": {"dir": "run"},
    }
    return Config.model_validate({name: values | changes.get(name, {}) for name, values in sections.items()})


def family_of(**fingerprints: str) -> Any:
    parts = {"transformer": "1", "vae": "2", "scheduler": "3"} | fingerprints
    return SimpleNamespace(
        components=("transformer", "vae"), folder=SimpleNamespace(fingerprint=parts.__getitem__)
    )


def refusal(check: Any, *arguments: Any) -> str:
    with pytest.raises(UserError) as refused:
        check(*arguments)
    return str(refused.value)


def compare(rank: int, port: int, log: Path) -> None:
    """What one of two processes says to differences between them, a line each."""
    torch.set_num_threads(1)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "ACCELERATE_USE_CPU": "true"}
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
    accelerator = Accelerator(cpu=True)
    own = f"node-{rank}"
    places = {"model": {"path": own}, "output": {"dir": f"runs/{own}"}, "data": {"num_workers": rank}}
    equal = config_of(**places)
    require_same_settings(accelerator, equal)
    require_same_model(accelerator, family_of())
    table, none = ItemTable.build([ROW, replace(ROW, name="b.png")]), ItemTable.build([])
    require_same_items(accelerator, table, none)
    renamed = ItemTable.build([replace(ROW, name=own), replace(ROW, name="b.png")])
    require_same_items(accelerator, renamed, none)

    sources = [{"path": own, "repeats": 1 + rank}]
    data = {"path": None, "sources": sources}
    other = config_of(**places | {"data": data, "train": {"seed": 7 * rank}})
    fewer = ItemTable.build([ROW, replace(ROW, media_key="ef" * 32)][: 1 + rank])
    lines = [
        describe_run(equal, accelerator),
        refusal(require_same_settings, accelerator, other),
        refusal(require_same_model, accelerator, family_of(vae=own)),
        refusal(require_same_items, accelerator, fewer, none),
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(same_run, "version", lambda name: f"{name} 1.{rank if name == 'peft' else 0}")
        lines.append(refusal(require_same_settings, accelerator, equal))
    log.write_text("\n".join(lines))
    torch.distributed.destroy_process_group()


def test_two_processes_say_what_differs_and_where_and_leave_paths_alone(tmp_path: Path) -> None:
    port = free_port()
    logs = [tmp_path / str(rank) for rank in range(2)]
    ranks = [FORKED.Process(target=compare, args=(rank, port, log)) for rank, log in enumerate(logs)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(LIMIT_S)
    assert [process.exitcode for process in ranks] == [0, 0]
    first, other = (log.read_text().splitlines() for log in logs)
    assert first == other
    runs_on, settings, model, items, versions = first
    assert runs_on == (
        "2 processes on the CPU; mixed precision bf16, base in bfloat16; "
        "global batch 4 = micro-batch 2 x accumulation 1 x 2 processes"
    )
    zero, one = f"on process 0 ({HERE})", f"on process 1 ({HERE})"
    assert settings.startswith(
        f"the processes of this run differ: data.sources.0.repeats is 1 {zero}, 2 {one}; "
        f"train.seed is 0 {zero}, 7 {one}; start all of them"
    )
    assert f'differ: vae of model.path is "node-0" {zero}, "node-1" {one}; have model.path' in model
    assert f"number of items of data is 1 {zero}, 2 {one}; pictures and clips of data is" in items
    assert "validation.data" not in items
    assert f'differ: peft is "peft 1.0" {zero}, "peft 1.1" {one}; start all of them' in versions


def test_one_process_says_what_it_runs_on() -> None:
    accelerator = SimpleNamespace(
        num_processes=1, process_index=0, device=torch.device("cpu"), is_local_main_process=True
    )
    train = {"global_batch_size": 6, "micro_batch_tokens": 4096, "mixed_precision": "no"}
    config = config_of(train=train, model={"quantize": "nf4"})
    line = describe_run(config, accelerator)  # type: ignore[arg-type]
    assert line == (
        "1 process on the CPU; mixed precision no, base in bfloat16 and nf4; global batch 6 = "
        "micro-batch 2 x accumulation 3 x 1 process (micro-batches of up to 4096 tokens)"
    )


def test_every_setting_that_is_a_path_may_differ() -> None:
    sections = section_types()
    (source,) = get_args(sections["data"].model_fields["sources"].annotation)
    rule = FilePath.__metadata__[-1].func.__name__
    paths = {
        f"{section}.{name}"
        for section, settings in {**sections, "data.sources": source}.items()
        for name, field in settings.model_fields.items()
        if rule in repr((field.annotation, field.metadata))
    }
    assert {"model.path", "data.cache_dir", "validation.inputs", "data.sources.mask_dir"} <= paths
    assert not list(same_run._settings(dict.fromkeys(paths)))
