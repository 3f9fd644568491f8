"""What the packages above share: predictions, accuracy, calibration, transforms, and the style of figures."""
