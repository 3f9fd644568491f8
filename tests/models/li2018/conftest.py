"""The layers without routing are compared in float64, the networks (../test_li2018.py) run in float32."""

import pytest
import torch


@pytest.fixture(autouse=True)
def _float64():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)
