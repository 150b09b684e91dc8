"""Where things are, and whether an NVIDIA GPU is among them."""

from __future__ import annotations

from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[2]
TESTS = ROOT / "tests"
NVIDIA = torch.cuda.is_available() and torch.version.cuda is not None
