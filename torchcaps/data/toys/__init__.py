"""Stereo toys: a stand-in for smallNORB whose pictures are rendered on the user's machine."""

from torchcaps.data.toys.stereo_toys import StereoToys

__all__ = ["StereoToys"]
