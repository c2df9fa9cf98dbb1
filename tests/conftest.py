"""Triton's kernels run in its interpreter on CPU tensors, so that every test runs on every machine."""

import os
import sys

if "triton" in sys.modules and os.environ.get("TRITON_INTERPRET") != "1":
    raise RuntimeError("Triton was imported before the tests could ask for its interpreter: run them with TRITON_INTERPRET=1.")
# Before anything imports Triton.
os.environ.setdefault("TRITON_INTERPRET", "1")
# Records of whoever runs the tests are not theirs to be tested with: this folder is not there.
os.environ["TILEWISE_CONFIG_DIR"] = os.path.join(os.path.dirname(__file__), "no-records")

from tilewise.testing.interpreter import quicken

quicken()
