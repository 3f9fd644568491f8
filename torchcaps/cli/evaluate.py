"""Measure what a trained network keeps of what capsules promise: viewpoints, overlaps, parts, poses, attacks."""
