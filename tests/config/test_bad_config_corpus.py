"""Whatever a config holds, or a command says, a mistake ends with exit code 2 and a line that names it."""

import sys
from pathlib import Path

import pytest
from test_config_bad_files import WRONG_FILES, WRONG_REFERENCES, WRONG_VALUES

from diffsynth_lite.cli.train import main

OVERRIDES = [
    *("=5", "train=5", "train.=5", ".steps=5", "train..steps=5", "train.steps", "stray", "train.steps =5"),
    *(" train.steps=5", "TRAIN.STEPS=5", "+train.steps=5", "++train.steps=5", "~train.steps", "\ud800=5"),
    *("train.steps=", "train.steps=5=6", "train.steps=0x10", "train.steps=1e3", "train.steps=\u0663"),
    *("train.steps=5\n", "train.steps=5 ", "train.steps=\ud800", "train.steps=-1", "train.steps=1_000"),
    *("train.seed=18446744073709551616", "train.seed=1.0", "train.micro_batch_size=0", "train.cpu_threads=0"),
    *(
        "train.learning_rate=nan",
        "train.learning_rate=inf",
        "train.learning_rate=-1",
        "train.learning_rate=1,5",
    ),
    *(
        "train.learning_rate=1e",
        "train.learning_rate=\U0001d7cf",
        "train.adam_epsilon=0",
        "train.weight_decay=-1",
    ),
    *("train.ema_decay=1", "train.ema_decay=nan", "train.mixed_precision=fp8", "train.warmup_steps=-1"),
    *("train.use_gradient_checkpointing=maybe", "lora.rank=4.0", "lora.rank=1000000000000000000000"),
    *("lora.alpha=nan", "lora.dropout=-0.1", "lora.target_modules=to_q", "lora.target_modules=["),
    *("lora.target_modules=[to_q", "lora.target_modules=[[a]]", "lora.target_modules={a: b}"),
    *("lora.target_modules=[a: b]", "lora.target_modules=[!!python/name:os.system ]"),
    *(
        "lora.target_modules=[&a x, *a]",
        "validation.prompts[0]=x",
        f"validation.seed={2**63}",
        "data.sources=[a]",
        "data.sources={path: a}",
    ),
    *("data.sources=[{pth: a}]", "data.sources=[{path: a, repeats: -1}]", "data.sources[0].path=x"),
    *(
        "data.resolutions=[0]",
        "data.resolutions=[1.5]",
        "data.sizes=[64]",
        "data.sizes=[99999x64]",
        "data.sizes=[[64, 64]]",
    ),
    *("data.frame_counts=[0]", "data.fps=0", "data.max_bad_ratio=2", "data.caption_dropout=1.5"),
    *("data.num_workers=-1", "data.cache=perhaps", "data.width=1e400", "objective.sigma_min=2"),
    *("objective.shift_value=0", "memory.host_gib=0", "model.dtype=float8", "model.path=", "model.family="),
    *("output.dir=", "output.dir=a\0b", "logging.run_name=\0", "logging.trackers=wandb"),
    *("logging.trackers=[mlflow]", "resume.source=", "resume.allow=data", "resume.allow=[lora.rank]"),
    *("model.path=${oc.env:NO_SUCH_VARIABLE}", "model.path=${model.path}", "model.path=${data.path"),
    *("model.path=${oc.create:[1]}", "model.path=${oc.decode:1}", "model.path=${now:}", "model.path=${lora}"),
    "model.path=${oc.env:PATH,${oc.env:HOME}}",
    *("data.cache_dir=runs/one/", "data.cache_dir=pictures", "output.dir=~nosuchuser/run"),
    *("data.tag_shuffles=1000000000", "data.crops_per_item=1000000000", "data.repeats=1000000000"),
]

# Flags, and the line that follows the usage; the usage itself names every flag there is.
FLAGS: list[tuple[tuple[str, ...], str]] = [
    (("--resume",), "argument --resume: expected one argument"),
    (("--resum", "auto"), "unrecognized arguments: --resum"),
    (("--use_gradient",), "unrecognized arguments: --use_gradient"),
    (
        ("--use_gradient_checkpointing=1",),
        "argument --use_gradient_checkpointing: ignored explicit argument '1'",
    ),
    (
        ("--use_gradient_checkpointing", "--no-use_gradient_checkpointing"),
        "argument --no-use_gradient_checkpointing: not allowed with argument --use_gradient_checkpointing",
    ),
    (("--unknown",), "unrecognized arguments: --unknown"),
    (("-x",), "unrecognized arguments: -x"),
    (
        ("--lr=1e-4", "--num_epochs=3", "--network_dim=8", "--what", "--train.steps=9", "--seed"),
        "unrecognized arguments: --lr=1e-4 --num_epochs=3 --network_dim=8 --what --train.steps=9 --seed; "
        "settings are written without dashes: train.learning_rate=1e-4 lora.rank=8 train.steps=9 "
        "train.seed=...; --num_epochs is train.steps here: passes over the data x items / "
        "train.global_batch_size",
    ),
    (("--help=1",), "argument -h/--help: ignored explicit argument '1'"),
    (("--config",), "argument --config: expected one argument"),
]

# Texts, where "..." stands for the smallest config that loads, and the place that the first line names.
TEXTS: list[tuple[str | bytes, str]] = [
    ("   \n\n", ":1:"),
    ("---\n", ":1:"),
    ("...---\n...", ":8:"),
    ("5", ":1:"),
    ("null", ":1:"),
    ("true", ":1:"),
    ("'a'", ":1:"),
    ("[1, 2]", ":1:"),
    ("|\n  text\n", ":1:"),
    ("-\n", ":1:"),
    (":\n", ":1:"),
    (",\n", ":1:"),
    ("}\n", ":1:"),
    ('"\n', ":2:"),
    ("%\n", ":1:"),
    ("*\n", ":1:"),
    ("@model: x\n", ":1:"),
    ("`a`: b\n", ":1:"),
    ("!: a\n", ":1:"),
    ("%YAML 2.0\n---\n...", ":1:"),
    ("%TAG ! tag:x,2000:\n---\n...train: !x {}\n", ":10:"),
    ("<!DOCTYPE html><html>404</html>", ":1:"),
    ("-----BEGIN KEY-----\nabc\n", ":1:"),
    ("[model]\nfamily = 'x'\n", ":2:"),
    ('...logging:\n  project: "\\q"\n', ":9:"),
    ('...logging:\n  project: "\\xz"\n', ":9:"),
    ('...logging:\n  project: "\\U00110000"\n', ":9:"),
    ('...logging:\n  project: "\\UFFFFFFFF"\n', ":9:"),
    ('...logging:\n  project: "a\\0b"\n', ":9 logging.project:"),
    ("model: {}\n".encode("utf-16"), ":1:"),
    ("model: {}\n".encode("utf-16-be"), ":1:"),
    ("model: {}\n".encode("utf-32"), ":1:"),
    (b"...# \xe9", ":8:"),
    (b"\x7fELF\0\0", ":1:"),
    (b"\x1f\x8b\x08\0", ":1:"),
    (b"\x89PNG\r\n\x1a\n", ":1:"),
    ("...\0", ":8:"),
    ("...# \x07", ":8:"),
    ("...# \x7f", ":8:"),
    ("...train:\x0b\n", ":8:"),
    ("\ufeff\ufeff...", ":1 "),
    ("model:\n\tfamily: x\n", ":2:"),
    ("model:\n\u00a0family: x\n", ":2 "),
    ("...train:\n  steps:\u00a05\n", ":8 train:"),
    ("...model:\n  family: x\n", ":8 model:"),
    ("...train:\n  seed: 1\n  seed: 1\n", ":10 train.seed:"),
    ("...train: &a\n  steps: 1\n", ":8:"),
    ("...train: *a\n", ":8:"),
    ("...train:\n  <<: {steps: 5}\n", ":9 train.<<:"),
    ("...train: !x\n  steps: 5\n", ":8:"),
    ("...train:\n  steps: !!binary aGk=\n", ":9:"),
    ("...train:\n  steps: !!python/object/apply:os.system ['true']\n", ":9:"),
    ("...train:\n  steps: !!python/object/new:os.system ['true']\n", ":9:"),
    ("...train:\n  steps: 2020-01-01\n", ":9 train.steps:"),
    ("...train:\n  steps: " + "9" * 400, ":9 train.steps:"),
    ("...train:\n  steps:\n    a: 5\n", ":9 train.steps:"),
    ("...train:\n  - steps: 5\n", ":8 train:"),
    ("...train: 5\n", ":8 train:"),
    ("...train.steps: 5\n", ":8 train.steps:"),
    ("...\U0001f642: 5\n", ":8 \U0001f642:"),
    ("...~: x\n", ":8 ~:"),
    ("...'': x\n", ":8 :"),
    ("...? [a, b]\n: c\n", ":8:"),
    ("..." + "a" * 1025 + ": x\n", ":8:"),
    ("a: " + "{a: " * 5000 + "}" * 5000, ":1:"),
    ("a: &a [x, x]\n" + "".join(f"a{n}: &b{n} [*a, *a]\n" for n in range(30)), ":1:"),
    ("model: {family: x", ":1:"),
    ('{"model": {"family": "x", "path": "y"}, "nope": 1}', ":1 nope:"),
    ("model: {family: x, path: ${data.path}}\ndata: {path: b}\noutput: {dir: c}\n", ":1:"),
    (
        "model: {family: x, path: '${data.path}'}\ndata: {path: '${model.path}'}\noutput: {dir: c}",
        ":1 model.path:",
    ),
    (
        "model: {family: '${output.dir}', path: p}\ndata: {path: '${model.family}'}\n"
        "output: {dir: '${data.path}'}\n",
        ":1 model.family:",
    ),
    ("model: {family: x, path: y}\noutput: {dir: z}\n", ":1 data.path:"),
    ("model: {family: x, path: y}\ndata: {path: z}\noutput: {dir: z}\n", ":3 output.dir:"),
]

PATHS = [
    *(
        "missing.yaml",
        "no/such/folder/x.yaml",
        "a-folder",
        "/",
        ".",
        "",
        "x\0y.yaml",
        "a" * 300,
        "\ud800.yaml",
    ),
    *("link-to-itself.yaml", "link-to-nothing.yaml", "a-file.yaml/x.yaml", "~/x.yaml", "qwen_lor.yaml"),
    *("https://example.org/x.yaml", "/dev/null", "/dev/zero"),
]


@pytest.fixture
def refused(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, capsys):
    """Gives a command to train.py, which must refuse it before the libraries are imported; the first line."""
    monkeypatch.setitem(sys.modules, "diffusers.utils", None)  # to import it is a bug, and exits with 1
    monkeypatch.setitem(sys.modules, "transformers.utils", None)

    def refuse(*arguments: str) -> str:
        assert main(arguments) == 2
        lines = [record.getMessage() for record in caplog.records]
        assert lines
        assert all(record.levelname == "ERROR" for record in caplog.records)
        assert "Traceback" not in caplog.text + capsys.readouterr().err
        return lines[0]

    return refuse


@pytest.fixture
def good(write, minimal) -> Path:
    return write(minimal)


def test_there_are_at_least_120_of_them() -> None:
    here = len(OVERRIDES) + len(FLAGS) + len(TEXTS) + len(PATHS)
    assert here >= 120
    assert here + len(WRONG_VALUES) + len(WRONG_REFERENCES) + len(WRONG_FILES) >= 280


@pytest.mark.parametrize("override", OVERRIDES)
def test_a_wrong_override_is_refused(refused, good: Path, override: str) -> None:
    shown = override if override.isprintable() else repr(override)[1:-1]
    assert refused("--config", str(good), override).startswith(f"{shown} (command line)")


@pytest.mark.parametrize(("flags", "told"), FLAGS)
def test_a_wrong_flag_is_refused(good: Path, flags: tuple[str, ...], told: str, capsys) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--config", str(good), *flags])
    assert caught.value.code == 2
    assert capsys.readouterr().err.splitlines()[-1] == f"train.py: error: {told}"


@pytest.mark.parametrize(("text", "place"), TEXTS, ids=range(len(TEXTS)))
def test_a_wrong_text_is_refused(refused, write, minimal, text: str | bytes, place: str) -> None:
    encoded = text if isinstance(text, bytes) else text.encode()
    path = write(encoded.replace(b"...", minimal.encode()))
    assert refused("--config", str(path)).startswith(f"{path}{place}")


@pytest.mark.parametrize("name", PATHS)
def test_a_wrong_path_is_refused(refused, tmp_path: Path, monkeypatch, name: str) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a-folder").mkdir()
    Path("a-file.yaml").touch()
    Path("link-to-itself.yaml").symlink_to("link-to-itself.yaml")
    Path("link-to-nothing.yaml").symlink_to("nothing")
    assert refused("--config", name).startswith((f"--config {name}: ", f"{name}:1: "))


@pytest.mark.parametrize(("words", "hint"), [([], ""), (["my.yaml"], "; write --config my.yaml")])
def test_a_config_is_needed(capsys, monkeypatch, words: list[str], hint: str) -> None:
    monkeypatch.setattr(sys, "argv", ["train.py", *words])
    with pytest.raises(SystemExit) as caught:
        main()
    assert caught.value.code == 2
    told = f"the following arguments are required: --config{hint}"
    assert capsys.readouterr().err.splitlines()[-1] == f"train.py: error: {told}"


@pytest.mark.parametrize("line_break", ["\r\n", "\r", "\x85"])
def test_line_breaks_of_other_systems_and_a_byte_order_mark_are_fine(
    write, minimal, monkeypatch, line_break: str
) -> None:
    path = write("\ufeff" + minimal.replace("\n", line_break))
    monkeypatch.setitem(sys.modules, "diffusers.utils", None)
    with pytest.raises(SystemExit, match="1"):  # it got as far as the libraries
        main(["--config", str(path)])
