"""Folders with a modular index: components in other repositories, what is read of them, and what never is."""

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from family_sample import CPU
from hub_server import REPOSITORY, Hub, serving
from huggingface_hub import constants
from safetensors.torch import save_file

from diffsynth_lite.config import load_config
from diffsynth_lite.doctor.model import model_table
from diffsynth_lite.errors import UserError
from diffsynth_lite.media import Prompt
from diffsynth_lite.pipelines import PipelineFolder, require_family, resolve_folder
from diffsynth_lite.pipelines.base.folder import ComponentFile
from diffsynth_lite.pipelines.base.folder.index import read_entries
from diffsynth_lite.pipelines.base.model_settings import ModelSettings
from diffsynth_lite.pipelines.flux import Flux, tiny

ENCODER = "others/encoders"
"""A repository next to that of the pipeline."""
VAE = "others/vae"
COMPONENTS = ("transformer", "text_encoder", "text_encoder_2", "vae")
WEIGHTS = {"text_encoder": "model.safetensors", "vae": "diffusion_pytorch_model.safetensors"}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny pipeline with an index of the ordinary kind."""
    folder = tmp_path_factory.mktemp("saved")
    tiny().save_pretrained(folder)
    return folder


def modular(index: dict[str, Any], **places: dict[str, Any]) -> dict[str, Any]:
    """A modular index of the same components.

    Args:
        places: what it has otherwise of a component.
    """
    found = {}
    for name, value in index.items():
        if not isinstance(value, list):
            found[name] = value
        elif value[1] is not None:
            place = {"pretrained_model_name_or_path": REPOSITORY, "subfolder": name, "type_hint": value}
            found[name] = [*value, {**place, "variant": None, "revision": None, **places.get(name, {})}]
    return found


@pytest.fixture
def local(saved: Path, tmp_path: Path) -> Path:
    """A copy of the pipeline, without an index."""
    folder = Path(shutil.copytree(saved, tmp_path / "local"))
    (folder / "model_index.json").unlink()
    return folder


@pytest.fixture
def write(saved: Path, local: Path) -> Callable[..., PipelineFolder]:
    """Writes a modular index into the copy and opens it."""

    def written(variant: str | None = None, **places: Any) -> PipelineFolder:
        index = modular(json.loads((saved / "model_index.json").read_text()), **places)
        (local / "modular_model_index.json").write_text(json.dumps(index))
        return resolve_folder(str(local), variant=variant)

    return written


def moved(local: Path, component: str, files: dict[str, bytes], subfolder: str) -> dict[str, bytes]:
    """A component's files as those of a repository, taken out of a folder."""
    for path in (local / component).iterdir():
        files["/".join(filter(None, (subfolder, path.name)))] = path.read_bytes()
    shutil.rmtree(local / component)
    return files


@pytest.fixture
def hub(local: Path, write: Callable[..., PipelineFolder], tmp_path: Path) -> Iterator[Hub]:
    """The pipeline in three repositories: its own, one of text encoders and one that is an autoencoder."""
    encoders = moved(local, "text_encoder", {"text_encoder_9/model.safetensors": b"not named"}, "deep/clip")
    vae = moved(local, "vae", {"README.md": b"# VAE", "other/config.json": b"{}"}, "")
    places = {
        "text_encoder": {"pretrained_model_name_or_path": ENCODER, "subfolder": "deep/clip"},
        "vae": {"pretrained_model_name_or_path": None, "repo": VAE, "subfolder": ""},
    }
    write(**places)
    files = {str(path.relative_to(local)): path.read_bytes() for path in local.rglob("*") if path.is_file()}
    hub = Hub(files)
    hub.others = {ENCODER: Hub(encoders), VAE: Hub(vae)}
    with serving(hub, tmp_path / "cache"):
        yield hub


def test_a_modular_folder_with_all_components_is_what_the_ordinary_one_is(
    saved: Path, write: Callable[..., PipelineFolder]
) -> None:
    folder, ordinary = write(), PipelineFolder(path=saved)
    require_family(Flux, folder)
    Flux(folder).check_folder()
    assert folder.parts() == ordinary.parts()
    assert Flux(folder).fingerprint() == Flux(ordinary).fingerprint()
    folder.download_weights(COMPONENTS)  # none, and nobody is asked


def test_a_folder_with_both_indexes_goes_by_the_ordinary_one(
    local: Path, saved: Path, write: Callable[..., PipelineFolder]
) -> None:
    folder = write(vae={"pretrained_model_name_or_path": None, "subfolder": "elsewhere"})
    assert folder.place("vae").subfolder == "elsewhere"
    shutil.copyfile(saved / "model_index.json", local / "model_index.json")
    assert folder.place("vae").subfolder == "vae"


def test_of_several_repositories_what_is_needed_is_fetched_and_loaded(
    hub: Hub, saved: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = resolve_folder(REPOSITORY)
    # Not asked for before a component of theirs is.
    assert [other.requests for other in hub.others.values()] == [[], []]
    family, whole = Flux(folder), Flux(PipelineFolder(path=saved))
    family.check_folder()
    with caplog.at_level("INFO"):
        folder.download_weights(COMPONENTS)
    lines = [line for line in caplog.messages if "to download" in line]
    assert [line.split(":")[0] for line in lines] == [REPOSITORY, ENCODER, VAE]
    assert sorted(hub.others[ENCODER].fetched) == ["deep/clip/config.json", "deep/clip/model.safetensors"]
    assert sorted(hub.others[VAE].fetched) == ["config.json", WEIGHTS["vae"]]
    assert not [name for name in hub.fetched if name.startswith(("vae/", "text_encoder/"))]
    assert family.fingerprint() == whole.fingerprint()
    prompt = [Prompt(text="a circle")]
    encoded, expected = (one.load_prompt_encoder(torch.float32, CPU)(prompt)[0] for one in (family, whole))
    assert all(torch.equal(encoded[name], expected[name]) for name in expected)
    loaded, expected_vae = (one.load_component("vae", torch.float32) for one in (family, whole))
    assert all(
        torch.equal(tensor, expected_vae.state_dict()[name]) for name, tensor in loaded.state_dict().items()
    )


def test_what_was_fetched_is_enough_without_the_hub(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    online = resolve_folder(REPOSITORY)
    online.download_weights(COMPONENTS)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    offline = resolve_folder(REPOSITORY)
    Flux(offline).check_folder()
    offline.download_weights(COMPONENTS)
    assert Flux(offline).fingerprint() == Flux(online).fingerprint()


def test_another_component_in_another_repository_is_another_model_and_another_key_of_the_cache(
    hub: Hub,
) -> None:
    def identities() -> tuple[str, str, str]:
        folder = resolve_folder(REPOSITORY)
        folder.download_weights(COMPONENTS)
        family = Flux(folder)
        dtype = torch.float32
        return family.fingerprint(), family.prompt_encoder_id(dtype), family.media_encoder_id(dtype)

    before = identities()
    weights = bytearray(hub.others[VAE].files[WEIGHTS["vae"]])
    weights[-1] ^= 1
    hub.others[VAE].files |= {WEIGHTS["vae"]: bytes(weights)}
    fingerprint, prompts, media = identities()
    assert (fingerprint != before[0], prompts == before[1], media != before[2]) == (True, True, True)


def test_a_pinned_revision_stays_that_and_all_of_a_branch_is_of_one_commit(
    hub: Hub, saved: Path, write: Callable[..., PipelineFolder]
) -> None:
    pinned = hub.others[VAE].commit
    hub.others[VAE].files = {name: content + b" " for name, content in hub.others[VAE].files.items()}
    folder = write(
        vae={"pretrained_model_name_or_path": VAE, "subfolder": "", "revision": pinned},
        text_encoder={"pretrained_model_name_or_path": ENCODER, "subfolder": "deep/clip"},
    )
    assert folder.place("vae").path.name == pinned
    assert (folder.place("vae").path / "config.json").read_bytes() == (
        saved / "vae" / "config.json"
    ).read_bytes()
    first = folder.place("text_encoder")
    hub.others[ENCODER].files = {"deep/clip/config.json": b"{}"}
    assert folder.place("text_encoder") == first


def test_a_local_folder_takes_from_the_hub_what_it_lacks_and_nothing_that_it_has(
    hub: Hub, local: Path, write: Callable[..., PipelineFolder]
) -> None:
    folder = write(vae={"pretrained_model_name_or_path": VAE, "subfolder": ""}, text_encoder={})
    shutil.copytree(local / "text_encoder_2", local / "text_encoder")
    family = Flux(folder)
    family.folder.require_complete(COMPONENTS)  # what comes from the hub is not missed
    folder.download_weights(COMPONENTS)
    folder.require_weights(COMPONENTS)
    assert (hub.requests, hub.others[ENCODER].requests) == ([], [])
    assert sorted(hub.others[VAE].fetched) == ["config.json", WEIGHTS["vae"]]
    assert folder.place("text_encoder").path == local / "text_encoder"


def test_settings_without_weights_are_a_component_where_its_weights_are_in_a_file_of_the_users(
    local: Path, write: Callable[..., PipelineFolder]
) -> None:
    for path in (local / "transformer").glob("*.safetensors"):
        path.unlink()
    folder = write()
    with pytest.raises(
        UserError,
        match="transformer is read from owner/name on the hub: the hub cannot be reached",
    ):
        folder.place("transformer")
    file = ComponentFile(path=local / "a.safetensors", key="model.transformer_file")
    given = PipelineFolder(path=local, files={"transformer": file})
    assert given.place("transformer").path == local / "transformer"


@pytest.mark.parametrize(
    "location", ["/models/anima", "anima", "./a/b", "../up/model", "C:\\models", "~/model"]
)
def test_a_folder_of_another_machine_is_not_read_and_the_error_names_where_the_component_should_be(
    local: Path, write: Callable[..., PipelineFolder], location: str
) -> None:
    folder = write(vae={"pretrained_model_name_or_path": location})
    Flux(folder).check_folder()  # it is in this folder
    shutil.rmtree(local / "vae")
    with pytest.raises(UserError, match="vae holds no safetensors weights") as caught:
        Flux(folder).check_folder()
    assert f"has vae in {location}, and outside of the folder nothing is read" in str(caught.value)
    assert str(caught.value).endswith(f"copy or link it to {local / 'vae'}")


def test_nothing_outside_is_read_though_it_is_there(
    local: Path, tmp_path: Path, write: Callable[..., PipelineFolder]
) -> None:
    outside = Path(shutil.move(local / "vae", tmp_path / "outside" / "vae"))
    folder = write(vae={"pretrained_model_name_or_path": str(outside.parent)})
    assert folder.place("vae").path == local / "vae"
    for name in ("../outside/vae", str(outside), "vae/../../outside/vae", "~/vae", "C:\\vae", "a\0b"):
        with pytest.raises(UserError, match=r"the subfolder of vae is .* which leads out of its folder"):
            write(vae={"subfolder": name})._entries()
    for key, text in (("revision", "../../x"), ("variant", "../fp16"), ("variant", "a/b")):
        with pytest.raises(UserError, match=f"the {key} of vae is .* which leads out"):
            write(vae={key: text})._entries()


@pytest.mark.parametrize("key", ["pretrained_model_name_or_path", "repo", "subfolder", "variant", "revision"])
@pytest.mark.parametrize("value", [7, ["a", "b"], {"a": "b"}, True])
def test_a_place_that_is_no_text_is_refused(key: str, value: Any, tmp_path: Path) -> None:
    settings = {"vae": ["diffusers", "AutoencoderKL", {key: value}]}
    with pytest.raises(UserError, match=f"the {key} of vae is .*, which is not text"):
        read_entries(ModelSettings(settings, tmp_path / "modular_model_index.json"))


def test_entries_without_a_class_or_a_place_are_read_and_what_is_none_is_left_out(tmp_path: Path) -> None:
    settings = {
        "_class_name": "AnimaModularPipeline",
        "sigmas": [1.0, 0.5, 0.25],
        "absent": [None, None],
        "image_encoder": [None, None, {}],
        "vae": [None, None, {"repo": "owner/vae"}],
        "transformer": ["diffusers", "CosmosTransformer3DModel", {"subfolder": "dit"}],
    }
    entries = read_entries(ModelSettings(settings, tmp_path / "modular_model_index.json"))
    assert entries.keys() == {"vae", "transformer"}
    assert (entries["vae"].subfolder, entries["transformer"].subfolder) == ("", "dit")
    assert (entries["vae"].repository, entries["transformer"].repository) == ("owner/vae", None)


def test_a_repository_that_is_not_there_names_the_component_and_what_would_do(
    hub: Hub, local: Path, write: Callable[..., PipelineFolder]
) -> None:
    folder = write(vae={"pretrained_model_name_or_path": "others/gone"})
    with pytest.raises(
        UserError, match="vae is read from others/gone on the hub: the hub has no repository"
    ) as caught:
        Flux(folder).check_folder()
    assert str(caught.value).endswith(f"login`); or put its files into {local / 'vae'}")
    # Of what no component of the family is, nobody hears.
    write()
    index = json.loads((local / "modular_model_index.json").read_text())
    index["safety_checker"] = ["diffusers", "Any", {"pretrained_model_name_or_path": "others/gone"}]
    (local / "modular_model_index.json").write_text(json.dumps(index))
    assert "safety_checker" in resolve_folder(str(local)).parts()


def test_the_variant_of_the_index_is_loaded_unless_the_user_names_one(
    local: Path, write: Callable[..., PipelineFolder]
) -> None:
    save_file({"weight": torch.zeros(2)}, local / "vae" / "diffusion_pytorch_model.fp16.safetensors")

    def weights(folder: PipelineFolder) -> list[str]:
        return [path.name for path in folder.files_to_load("vae")]

    assert weights(write()) == ["diffusion_pytorch_model.safetensors"]
    assert weights(write(vae={"variant": "fp16"})) == ["diffusion_pytorch_model.fp16.safetensors"]
    assert write(vae={"variant": "fp16"}).fingerprint("vae") != write().fingerprint("vae")
    named = write(variant="fp16", vae={"variant": "bf16"})
    assert weights(named) == ["diffusion_pytorch_model.fp16.safetensors"]
    with pytest.raises(UserError, match=r"'bf16' .*modular_model_index\.json names that variant: model\.var"):
        write(vae={"variant": "bf16"}).require_weights(["vae"])


def test_a_disk_without_room_for_all_repositories_is_reported_before_a_weight_is_fetched(
    hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = resolve_folder(REPOSITORY)
    sizes = [
        sum(len(content) for name, content in one.files.items() if name.endswith(".safetensors"))
        for one in (hub, hub.others[VAE])
    ]
    usage = shutil.disk_usage(".")._replace(free=sum(sizes))  # not for the third
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    with pytest.raises(UserError, match=f"of {REPOSITORY} and {ENCODER} and {VAE} are to be downloaded, but"):
        folder.download_weights(COMPONENTS)
    fetched = [*hub.fetched, *hub.others[ENCODER].fetched, *hub.others[VAE].fetched]
    assert not [name for name in fetched if name.endswith(".safetensors")]


def test_the_doctor_lists_which_components_are_of_other_repositories(hub: Hub, tmp_path: Path) -> None:
    path, commit = tmp_path / "config.yaml", hub.others[VAE].commit
    sections = {"model": {"family": "flux", "path": REPOSITORY}, "data": {"path": "x"}}
    path.write_text(json.dumps(sections | {"output": {"dir": str(tmp_path / "run")}}))
    table = model_table(load_config(path, []).config, Flux(resolve_folder(REPOSITORY)))
    assert table["vae"].endswith(f", from {VAE} at {commit[:12]}")
    assert {name for name in COMPONENTS if ", from " in table[name]} == {"vae", "text_encoder"}
