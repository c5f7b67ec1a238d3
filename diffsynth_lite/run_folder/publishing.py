"""This file publishes a run's LoRA on the hub of Hugging Face, with its card and the card's images only.

All of it goes in one commit, so that the repository has all of the files or is as it was before.
"""

import logging
import re
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import yaml
from huggingface_hub import CardData, CommitOperationAdd, HfApi, ModelCard, get_token, hf_hub_download
from huggingface_hub.errors import HFValidationError, RemoteEntryNotFoundError
from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]  # not listed there

from diffsynth_lite.errors import UserError
from diffsynth_lite.run_folder.folder import RunFolder
from diffsynth_lite.run_folder.model_card import CARD, IMAGES, LORA_FOLDER, is_as_written, marked
from diffsynth_lite.run_folder.reading import read_run_file

logger = logging.getLogger(__name__)

_NAMED_IMAGE = re.compile(rf"(?<![\w/-])(?:\./)?({IMAGES}/[\w-]+\.\w+)")
"""Path of an image next to the card; the same path inside a URL is not one."""
_LICENCE = re.compile("[a-z0-9][a-z0-9.+-]*")
_HEADER = re.compile(r"\A\s*---\r?\n(.*?)^---", re.DOTALL | re.MULTILINE)
_LICENCE_KEYS = re.compile(r"^license(?:_name|_link)?:.*\n(?:[ \t].*\n)*", re.MULTILINE)
_NO_RIGHTS = "log in with `hf auth login` and a token that may write there, or publish to a name of your own"
_REMEDIES = {401: _NO_RIGHTS, 403: _NO_RIGHTS, 404: _NO_RIGHTS}


@dataclass(frozen=True, kw_only=True)
class Publication:
    """The content of a repository.

    Attributes:
        repository: such as ``ann/my-lora``.
        files: the LoRA and the images that the card names, by their path there.
        licence: that the header of the card names; empty for none.
    """

    repository: str
    card: str
    files: Mapping[str, Path]
    licence: str

    @property
    def sizes(self) -> dict[str, int]:
        """Bytes of all files, by their path in the repository."""
        return {CARD: len(self.card.encode())} | {
            name: path.stat().st_size for name, path in self.files.items()
        }

    @classmethod
    def of_run(
        cls, run: RunFolder, lora_folder: Path, repository: str, licence: str | None = None
    ) -> "Publication":
        """A LoRA of a run with its card, whose code then loads the LoRA from the repository.

        Args:
            licence: in place of the one in the card's header; None leaves it.
        """
        _require_repository_name(repository, "--to")
        if not run.holds_run():
            raise UserError(f"{run.path}: holds no run; give the output.dir of one")
        files = {path.name: path for path in sorted(lora_folder.glob("*.safetensors")) if path.is_file()}
        if not files:
            raise UserError(
                f"{lora_folder}: holds no LoRA; a run writes it with its first checkpoint "
                "(lora_ema with train.ema_decay, lora_best with held-out items)"
            )
        card = _read_card(lora_folder / CARD)
        header = _header_of(card, lora_folder / CARD)
        is_ours = is_as_written(card)
        if licence is not None:
            card = _with_licence(card, licence)
        for name in sorted(set(_NAMED_IMAGE.findall(card))):
            files[name] = lora_folder / name
            if not files[name].is_file():
                raise UserError(f"{lora_folder / CARD}: names {name}, which is not there")
        if is_ours:
            card = marked(card.replace(LORA_FOLDER, repository))
        own = header.get("license_name") if header.get("license") == "other" else header.get("license")
        return cls(repository=repository, card=card, files=files, licence=str(licence or own or ""))

    def send(self, *, private: bool) -> str:
        """Make the repository, unless it is there, and commit the files that differ from those in it.

        A card that somebody edited there stays, unless this one was edited, too.

        Args:
            private: a new repository is visible only to the owner; an existing public one is refused.

        Returns:
            Address of the commit.
        """
        if get_token() is None:
            raise UserError("no token for the hub: log in with `hf auth login`, or set HF_TOKEN")
        hub = HfApi()
        with _explained(self.repository):
            hub.create_repo(self.repository, private=private or None, exist_ok=True)
            if private and not hub.repo_info(self.repository).private:
                raise UserError(
                    f"--private: {self.repository} is there already, and all can see it; make it private on "
                    "its page, or choose another name"
                )
            files: dict[str, Path | bytes] = dict(self.files)
            if self._may_replace_card():
                files[CARD] = self.card.encode()
            commit = hub.create_commit(
                self.repository,
                [CommitOperationAdd(name, source) for name, source in sorted(files.items())],
                commit_message="LoRA trained with diffsynth_lite",
            )
        return commit.commit_url

    def _may_replace_card(self) -> bool:
        if not is_as_written(self.card):
            return True
        with tempfile.TemporaryDirectory() as folder:
            try:
                there = Path(hf_hub_download(self.repository, CARD, local_dir=folder))
            except RemoteEntryNotFoundError:
                return True
            if is_as_written(there.read_text(encoding="utf-8", errors="replace")):
                return True
        logger.warning("The card of %s was edited there, and stays as it is.", self.repository)
        return False


def _read_card(path: Path) -> str:
    try:
        return read_run_file(path).decode()
    except FileNotFoundError:
        raise UserError(f"{path}: is not there; a run writes it with each checkpoint, or write one") from None
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: cannot be read as UTF-8 ({error})") from error


def _require_repository_name(name: str, key: str) -> None:
    try:
        validate_repo_id(name)
        is_valid = name.count("/") == 1
    except HFValidationError:
        is_valid = False
    if not is_valid:
        raise UserError(
            f"{key}: {name!r} is not the name of a repository on the hub; give one such as user/name"
        )


def _header_of(card: str, path: Path) -> CardData:
    """The header of a card; the hub refuses one whose base model is a path, and a path is private."""
    try:
        header: CardData = ModelCard(card, ignore_metadata_errors=True).data
    except (ValueError, yaml.YAMLError) as error:
        raise UserError(f"{path}: its header cannot be read ({' '.join(str(error).split())})") from error
    found = header.get("base_model")
    named = found if isinstance(found, list) else [] if found is None else [found]
    for base in named:
        _require_repository_name(str(base), f"{path}, base_model")
    return header


def _with_licence(card: str, licence: str) -> str:
    if not _LICENCE.fullmatch(licence):
        raise UserError(f"--license: {licence!r} is not a licence of the hub; give one such as apache-2.0")
    found = _HEADER.match(card)
    kept = _LICENCE_KEYS.sub("", found[1]) if found else ""
    rest = card[found.end() :] if found else f"\n\n{card}"
    return f"---\n{kept}license: {licence}\n---{rest}"


@contextmanager
def _explained(repository: str) -> Iterator[None]:
    """Scope in which errors of the hub and of the connection to it become a UserError."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        status = getattr(getattr(error, "response", None), "status_code", 0)
        # The rest of an upload's error is a URL with which anybody could write for a while.
        message = getattr(error, "server_message", None) or str(error)
        remedy = _REMEDIES.get(status, "correct what it names, or check the connection (and HF_HUB_OFFLINE)")
        raise UserError(
            f"publish: {repository}: {type(error).__name__}: {' '.join(message.split())}; {remedy}. All "
            "files go in one commit, so that either all of them are there or none"
        ) from error
