"""Released models as data: what their folders hold, where each number is from, and what is not confirmed.

One file a model line. A family names its own as ``releases``; a family of another package does the same.
"""

from diffsynth_lite.releases.release import BaseModel, Release, ReleaseComponent, ReleaseTokenizer
from diffsynth_lite.releases.untrained import UNTRAINED, Untrained

__all__ = ["UNTRAINED", "BaseModel", "Release", "ReleaseComponent", "ReleaseTokenizer", "Untrained"]
