"""Model families kept outside of diffsynth_lite."""
