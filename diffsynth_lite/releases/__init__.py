"""How released models are written down, as data: what their folders hold, and where each number is from.

A family names its own as ``releases``, in its file or its folder; here is only what several families share.
"""

from diffsynth_lite.releases.release import BaseModel, Release, ReleaseComponent, ReleaseTokenizer
from diffsynth_lite.releases.untrained import UNTRAINED, Untrained

__all__ = ["UNTRAINED", "BaseModel", "Release", "ReleaseComponent", "ReleaseTokenizer", "Untrained"]
