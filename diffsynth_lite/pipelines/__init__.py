"""Each file here, and each folder but ``base``, is a model family, found by its name."""

from diffsynth_lite.pipelines.base.discovery import families_of, load_family, releases_of, require_family
from diffsynth_lite.pipelines.base.family import Conditioning, EncodedMedia, ModelFamily, PreviewRequest
from diffsynth_lite.pipelines.base.folder import PipelineFolder, resolve_folder
from diffsynth_lite.pipelines.base.mixins import EditInputs, WithAudio
from diffsynth_lite.releases.families import family_names

__all__ = [
    "Conditioning",
    "EditInputs",
    "EncodedMedia",
    "ModelFamily",
    "PipelineFolder",
    "PreviewRequest",
    "WithAudio",
    "families_of",
    "family_names",
    "load_family",
    "releases_of",
    "require_family",
    "resolve_folder",
]
