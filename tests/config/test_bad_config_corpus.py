"""Whatever a config holds, or a command says, a mistake ends with exit code 2 and a line that names it."""

import sys
from pathlib import Path

import pytest

from diffsynth_lite.cli.train import main

# Nothing of it is a setting with a value of its type. What each message says is in the other tables.
OVERRIDES = [
    *(".steps=5", "train..steps=5", "stray", "train.steps =5", " train.steps=5", "TRAIN.STEPS=5"),
    *("++train.steps=5", "\ud800=5", "train.steps=5=6", "train.steps=\u0663", "train.steps=5\n"),
    *("train.steps=5 ", "train.steps=\ud800", "train.seed=1.0", "train.learning_rate=1,5"),
    *("train.learning_rate=1e", "train.learning_rate=\U0001d7cf", "train.ema_decay=1", "lora.alpha=nan"),
    *("lora.dropout=-0.1", "lora.target_modules=[", "lora.target_modules={a: b}"),
    *("lora.target_modules=[a: b]", "lora.target_modules=[!!python/name:os.system ]"),
    *("lora.target_modules=[&a x, *a]", "data.sources=[a]", "data.sources={path: a}"),
    *("data.resolutions=[0]", "data.resolutions=[1.5]", "data.sizes=[64]", "data.sizes=[99999x64]"),
    *("data.sizes=[[64, 64]]", "data.frame_counts=[0]", "data.fps=0", "data.width=1e400"),
    *("data.num_workers=-1", "model.path=", "output.dir=a\0b", "resume.allow=data"),
    *("resume.allow=[lora.rank]", "model.path=${data.path", "model.path=${oc.create:[1]}"),
    *("model.path=${now:}", "model.path=${lora}", "data.cache_dir=runs/one/", "data.cache_dir=images"),
    *("output.dir=~nosuchuser/run", "data.tag_shuffles=1000000000", "data.crops_per_item=1000000000"),
    *("data.repeats=1000000000", "logging.trackers=[mlflow]", "validation.seed=9223372036854775808"),
]

SEE = "; see diffsynth-lite train --help"
# Flags, and the errors about them.
FLAGS: list[tuple[tuple[str, ...], str]] = [
    (("--resum", "auto"), "unrecognized arguments: --resum; did you mean --resume?"),
    (
        ("--use_gradient",),
        "unrecognized arguments: --use_gradient; did you mean --use_gradient_checkpointing?",
    ),
    (
        ("--use_gradient_checkpointing", "--no-use_gradient_checkpointing"),
        "argument --no-use_gradient_checkpointing: not allowed with argument --use_gradient_checkpointing",
    ),
    (
        ("--lr=1e-4", "--num_epochs=3", "--network_dim=8", "--what", "--train.steps=9", "--seed"),
        "unrecognized arguments: --lr=1e-4 --num_epochs=3 --network_dim=8 --what --train.steps=9 --seed; "
        "settings are written without dashes: train.learning_rate=1e-4 lora.rank=8 train.steps=9 "
        "train.seed=...; --num_epochs is train.steps here: passes over the data x items / "
        "train.global_batch_size",
    ),
]

# Texts, where "..." stands for the smallest config that loads, and the place that the first line names.
TEXTS: list[tuple[str | bytes, str]] = [
    ('"\n', ":2:"),
    ("%YAML 2.0\n---\n...", ":1:"),
    ("<!DOCTYPE html><html>404</html>", ":1:"),
    ("[model]\nfamily = 'x'\n", ":2:"),
    ('...logging:\n  project: "\\q"\n', ":9:"),
    ('...logging:\n  project: "\\xz"\n', ":9:"),
    ('...logging:\n  project: "\\U00110000"\n', ":9:"),
    ('...logging:\n  project: "\\UFFFFFFFF"\n', ":9:"),
    ('...logging:\n  project: "a\\0b"\n', ":9 logging.project:"),
    (b"...# \xe9", ":8:"),
    (b"\x7fELF\0\0", ":1:"),
    (b"\x89PNG\r\n\x1a\n", ":1:"),
    ("...train:\x0b\n", ":8:"),
    ("\ufeff\ufeff...", ":1 "),
    ("model:\n\u00a0family: x\n", ":2 "),
    ("...train:\n  steps:\u00a05\n", ":8 train:"),
    ("...train:\n  steps: 2020-01-01\n", ":9 train.steps:"),
    ("...train:\n  - steps: 5\n", ":8 train:"),
    ("...\U0001f642: 5\n", ":8 \U0001f642:"),
    ("...~: x\n", ":8 ~:"),
    ("..." + "a" * 1025 + ": x\n", ":8:"),
    ("a: " + "{a: " * 5000 + "}" * 5000, ":1:"),
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

# Whole texts, the place that the message names, and words of it.
WRONG_FILES = [
    ("", ":1:", "is empty"),
    ("# only a comment\n", ":1:", "is empty"),
    ("- model\n", ":1:", "must be sections"),
    ("just words\n", ":1:", "must be sections"),
    ("train:\n\tsteps: 3\n", ":2:", "a tab is used to indent"),
    ("train:\n  steps:\t3\n", ":2:", "a tab is between words"),
    ("train:\n  steps: 3\n  steps: 4\n", ":3 train.steps:", "is there already, on line 2"),
    ("train:\n  steps: 3\ntrain:\n  seed: 4\n", ":3 train:", "is there already, on line 1"),
    ("trian:\n  steps: 3\n", ":1 trian:", "did you mean 'train'?"),
    ("trains.steps: 3\n", ":1 trains.steps:", "'steps' belongs under train, as train.steps"),
    ("learning_rate: 3\n", ":1 learning_rate:", "belongs under train"),
    ("learning_rte: 3\n", ":1 learning_rte:", "did you mean 'train.learning_rate'?"),
    ("zzz: 3\n", ":1 zzz:", "there are model, lora"),
    ("config:\nnetwork:\n  linear: 16\n", ":2 network:", "is the section lora here"),
    ("name: x\nprocess: 3\n", ":2 process:", "is of another trainer's config; `diffsynth-lite init --from"),
    ("lr: 1\nvalidation: no\nrank: 4\nnetwork_dim: 4\nbatch_size: 1\n", ":1 lr:", "init --from"),
    ("train:\n  seed: 1\n  batch_size: 4\n", ":3 train.batch_size:", "is train.micro_batch_size here"),
    ("1: 3\n", ":1 1:", "unknown section"),
    ("train: 3\n", ":1 train:", "key: value"),
    ("train: [steps]\n", ":1 train:", "key: value"),
    ("train:\n  steps:10\n", ":1 train:", "a space after each colon"),
    ("{a: b}: c\n", ":1:", "a key must be plain text"),
    ("train: &anchor\n  steps: 3\n", ":1:", "anchor"),
    ("train: *anchor\n", ":1:", "alias"),
    ("train:\n  steps: !!python/object/apply:os.system [ls]\n", ":2:", "tag"),
    ("train:\n  steps: !!int 3\n", ":2:", "tag"),
    ("a: &a [x]\nb: &b [*a, *a]\nc: &c [*b, *b]\n", ":1:", "anchor"),
    ("a: " + "[" * 100_000, ":1:", "nested too deeply"),
    ("".join(f"{' ' * level}a:\n" for level in range(500)), ":9:", "nested too deeply"),
    ("train:\n  steps: [3\n", ":3:", "not valid yaml"),
    ("train:\n  steps: 'three\n", ":3:", "not valid yaml"),
    ("train:\n  steps: 3: 4\n", ":2:", "not valid yaml"),
    ("train:\n  steps: 3\n---\ntrain:\n", ":3:", "second yaml document"),
    ("train:\n  steps: \x07\n", ":2:", "0x7 is not allowed"),
    (b"train:\n  steps: \xff\n", ":2:", "UTF-8"),
    ("train:\n  steps: 3\n".encode("utf-16"), ":1:", "UTF-8"),
    ("train:\n".encode("utf-16-le"), ":1:", "0x0 is not allowed"),
    (b"# " + b"x" * (1 << 20), ":1:", "too large"),
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


@pytest.mark.parametrize("override", OVERRIDES)
def test_a_wrong_override_is_refused(refused, good: Path, override: str) -> None:
    shown = override if override.isprintable() else repr(override)[1:-1]
    assert refused("--config", str(good), override).startswith(f"{shown} (command line)")


@pytest.mark.parametrize(("flags", "message"), FLAGS)
def test_a_wrong_flag_is_refused(good: Path, flags: tuple[str, ...], message: str, capsys) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--config", str(good), *flags])
    assert caught.value.code == 2
    assert capsys.readouterr().err.splitlines()[-1] == f"diffsynth-lite train: error: {message}{SEE}"


@pytest.mark.parametrize(("text", "place"), TEXTS, ids=range(len(TEXTS)))
def test_a_wrong_text_is_refused(refused, write, minimal, text: str | bytes, place: str) -> None:
    encoded = text if isinstance(text, bytes) else text.encode()
    path = write(encoded.replace(b"...", minimal.encode()))
    assert refused("--config", str(path)).startswith(f"{path}{place}")


@pytest.mark.parametrize(("text", "place", "reason"), WRONG_FILES, ids=range(len(WRONG_FILES)))
def test_a_wrong_file_is_reported_at_its_line(refusal, write, text, place, reason):
    path = write(text)
    line = next(line for line in refusal(path) if reason in line)
    assert line.startswith(f"{path}{place}")


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
    message = f"the following arguments are required: --config{hint}"
    assert capsys.readouterr().err.splitlines()[-1] == f"diffsynth-lite train: error: {message}{SEE}"
