"""What `device` may be, and what is said of one that there is not."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from tests.patience import PATIENCE_S
from transom.encoder.engine import choose_device
from transom.errors import ConfigError

NONE = "device 'abacus' is none: expected auto, cpu, cuda or cuda:N"


def test_a_device_that_is_none_is_told_in_one_line() -> None:
    with pytest.raises(ConfigError) as caught:
        choose_device("abacus", "auto")
    assert caught.value.message == NONE


def test_the_cpu_computes_in_float32_unless_told_otherwise() -> None:
    assert choose_device("cpu", "auto", 3) == (torch.device("cpu"), "float32")
    assert choose_device("cpu", "bfloat16") == (torch.device("cpu"), "bfloat16")


@pytest.mark.process
def test_an_encoder_that_is_given_none_ends_and_says_why() -> None:
    command = [sys.executable, "-m", "transom", "encoder", "--device", "abacus", "--decode-workers", "1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert done.returncode != 0
    assert done.stdout == ""
    assert NONE in done.stderr
    assert "Traceback" not in done.stderr
