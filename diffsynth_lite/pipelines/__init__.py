"""One file a model family: each file here that is not a package is a family, found by its name."""

from diffsynth_lite.pipelines.contract.discovery import family_names, load_family, require_family
from diffsynth_lite.pipelines.contract.family import ModelFamily
from diffsynth_lite.pipelines.contract.folder import PipelineFolder, resolve_folder
from diffsynth_lite.pipelines.contract.samples import Conditioning, EncodedMedia, PreviewRequest

__all__ = [
    "Conditioning",
    "EncodedMedia",
    "ModelFamily",
    "PipelineFolder",
    "PreviewRequest",
    "family_names",
    "load_family",
    "require_family",
    "resolve_folder",
]
