"""This folder finds a pipeline's files, on disk or on the hub: its index, and where each component is."""

from diffsynth_lite.pipelines.base.folder.pipeline_folder import ComponentFile, PipelineFolder, resolve_folder

__all__ = ["ComponentFile", "PipelineFolder", "resolve_folder"]
