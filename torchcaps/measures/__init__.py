"""What training, explain, evaluate and deploy share: predictions, accuracy, calibration, transforms, the style of
figures."""
