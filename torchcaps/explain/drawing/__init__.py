"""Figures, drawn with matplotlib from what the modules of :mod:`torchcaps.explain` compute."""
