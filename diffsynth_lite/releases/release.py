"""This file defines the record of a released model. Plain values: nothing of torch or diffusers."""

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field, fields, replace
from typing import Any, Literal

WeightDtype = Literal["float32", "float16", "bfloat16"]

Pixels = tuple[int, int, int]
"""Width, height and frames; of a model that splits images, the image and its layers."""


@dataclass(frozen=True)
class ReleaseComponent:
    """A component of a pipeline.

    Attributes:
        class_name: its class, of diffusers or transformers; after ``ltx2.`` or the like where diffusers has
            it in that folder of its pipelines only.
        config: settings that differ from the defaults of its class.
        dtype: of the released weights; None where that is not known, and of a scheduler.
        num_bytes: of the released weights, by the index of their files; None where no index is known.
        source: of the class, the settings and, where they are given, the dtype and the bytes.
    """

    class_name: str
    config: Mapping[str, Any] = field(default_factory=dict)
    _: KW_ONLY
    dtype: WeightDtype | None = None
    num_bytes: int | None = None
    source: str


@dataclass(frozen=True)
class ReleaseTokenizer:
    """A tokenizer, a processor of images, or a guider of a pipeline.

    Attributes:
        class_name: as ``model_index.json`` names it.
        files: that hold its vocabulary; empty where that is not known, and of all but tokenizers.
        images: its settings for images; empty leaves those of the class.
    """

    class_name: str
    files: tuple[str, ...] = ()
    images: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Release:
    """A released model: one folder in diffusers' layout, on the hub.

    Attributes:
        components: what has weights, by folder.
        optional_components: others that its index may name, and that are not used here.
        size: that it generates by default.
        parameters: of one model that is trained, as published: a number in its name is rounded; or None.
        variants: of the weight files, next to the plain ones.
        gated: whether its terms must be accepted before a download; None where that is not known.
        distilled: what it was distilled to, which training undoes; None of a model that was not.
        architecture: its id in the metadata of LoRA files, ``modelspec.architecture``, without "/lora"; None
            where no program is known to give it one.
        version: its name in ``ss_base_model_version`` there, too.
        sources: of these facts, by ``pipeline`` (class, settings, tokenizers, variants), ``size``,
            ``parameters``, ``licence`` and ``architecture`` (and version).
        unconfirmed: what no source was found for, or what sources differ in.
    """

    name: str
    hub_id: str
    pipeline_class: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    components: Mapping[str, ReleaseComponent]
    scheduler: ReleaseComponent
    tokenizers: Mapping[str, ReleaseTokenizer]
    optional_components: tuple[str, ...] = ()
    size: Pixels
    parameters: float | None
    variants: tuple[str, ...] = ()
    licence: str
    gated: bool | None
    distilled: str | None = None
    architecture: str | None = None
    version: str | None = None
    sources: Mapping[str, str]
    unconfirmed: tuple[str, ...] = ()

    def but(self, name: str, hub_id: str, **changes: Any) -> "Release":
        """Another release of the same model.

        Args:
            changes: of these fields, of which mappings are added to, and of the components, by their names.
        """
        own = {one.name for one in fields(self)}
        components = {key: value for key, value in changes.items() if key not in own}
        changed: dict[str, Any] = {
            key: {**getattr(self, key), **value} if isinstance(value, Mapping) else value
            for key, value in changes.items()
            if key in own
        }
        return replace(
            self, name=name, hub_id=hub_id, components={**self.components, **components}, **changed
        )


@dataclass(frozen=True, kw_only=True)
class BaseModel:
    """The published facts of the model that a LoRA was trained on. It holds no path.

    Attributes:
        hub_id: of its repository; None where a local folder does not show it.
        revision: commit of the repository, 40 hexadecimal digits; None where that is not known.
        release: the release that it is; None of any other model, also of one made from a release.
        architecture: as of a release; None where its settings are those of none.
    """

    hub_id: str | None = None
    revision: str | None = None
    release: Release | None = None
    architecture: str | None = None
    version: str | None = None
