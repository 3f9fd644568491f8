"""A training that was interrupted, however and wherever, and goes on, ends in the weights of one that was not."""

import os
import random
import re
import shlex
import subprocess
import sys
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pooch
import pytest
import torch
from encoders import make_encoder
from interruptions import Killed

from torchcaps.cli import main
from torchcaps.training.checkpoints import LastCheckpoints

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")

QUIET = ["--trainer.enable_progress_bar=false", "--trainer.enable_model_summary=false", "--trainer.accelerator=cpu"]
SHORT = [*QUIET, "--trainer.limit_train_batches=4", "--trainer.limit_test_batches=1"]
NARROW = ["--model.network.channels=2", "--model.network.primary_types=1", "--model.network.decoder=[4]"]
DIGITS = ["quickstart", *SHORT, *NARROW, "--data.shift=1", "--data.batch_size=8"]
OVERLAYS = ["--data.epoch_size=14", "--data.test_size=4", "--data.batch_size=4", *QUIET]
EPOCHS = "--trainer.max_epochs=3"
STEPS = ["--trainer.max_epochs=-1", "--trainer.max_steps=10"]  # of 4 in an epoch


@pytest.fixture(autouse=True)
def _own_folder(tmp_path, monkeypatch, images_of_noise):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TORCHCAPS_DATA", str(images_of_noise))
    monkeypatch.setattr(pooch, "os_cache", lambda project: tmp_path / "cache")
    Path("digits.yaml").write_text(
        "extends: quickstart\n"
        "model: {network: {class_path: torchcaps.CapsNet, init_args: {in_channels: 1, image_size: 8, classes: 10, "
        "channels: 2, kernel_size: 3, primary_types: 1, primary_pose: 4, primary_kernel_size: 3, class_pose: 4, "
        "primary_stride: 2, decoder: [4], "
        "routing: {class_path: torchcaps.DynamicRouting, init_args: {iterations: 2}}}}}\n"
    )
    Path("dropout.yaml").write_text(
        "extends: sabour2017/mnist-cnn\n"
        "model: {network: {class_path: torchcaps.ConvNet, init_args: {in_channels: 1, image_size: 28, classes: 10, "
        "channels: [2, 2, 2], hidden: [8, 8], dropout: 0.5}}}\n"
        "data: {init_args: {batch_size: 4}}\n"
    )
