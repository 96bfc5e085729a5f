"""Devices, without a GPU: see `fake_card.py`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch.utils.backend_registration as registration


@pytest.mark.skipif(
    not hasattr(registration, "_setup_privateuseone_for_python_backend"), reason="torch has no Python backends"
)
def test_every_tensor_is_made_on_the_device_of_the_layer() -> None:
    script = Path(__file__).with_name("fake_card.py")
    run = subprocess.run([sys.executable, script], env=os.environ, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
    assert int(run.stdout.split()[-4]) > 110
