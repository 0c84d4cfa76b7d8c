"""What `device` may be for the language model."""

from __future__ import annotations

import pytest
import torch

from transom.errors import ConfigError
from transom.llm.build import pick_device


def test_a_device_that_is_none_is_told_in_one_line() -> None:
    assert pick_device("cpu") == torch.device("cpu")
    with pytest.raises(ConfigError) as caught:
        pick_device("abacus")
    assert caught.value.message == "device 'abacus' is none: expected auto, cpu, cuda or cuda:N"
