"""The ``tilewise`` command. Each subcommand is a module with ``add_parser(subparsers)`` that sets ``func``, an ``args -> int``."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence

from ..errors import AttentionError

__all__ = ["main"]

COMMANDS = ("demo", "check", "bench", "explain", "tune")
# Packages that only the command line needs: the extra "demo" installs them.
EXTRA_PACKAGES = ("matplotlib", "tqdm")

_DESCRIPTION = """\
Exact softmax attention for PyTorch, computed on tiles: linear memory, one meaning on every device.
"""
_EXAMPLES = """\
examples:
  tilewise demo                                      train on real text, measure one long sequence, draw a picture
  tilewise check                                     hold every backend of this machine against float64
  tilewise explain "seqlen=4096 head_dim=128 mask=causal arch=sm_90"
  tilewise bench --help                              what can be timed, and against what
  tilewise tune --help                               measure tile sizes on this GPU for later calls

exit status: 0 success, 1 a check failed or a package is missing, 2 bad arguments
"""


class _Version(argparse.Action):
    """``--version``: ours, PyTorch's and Triton's, which a bug report needs."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        import torch

        from .. import __version__
        from ..arch import runtime

        triton = runtime().triton
        software = f"torch {torch.__version__}, triton {'.'.join(map(str, triton)) if triton else 'not installed'}"
        print(f"tilewise {__version__} ({software})")
        parser.exit()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="tilewise",
        description=_DESCRIPTION,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="print the versions of tilewise, PyTorch and Triton, and exit")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name in COMMANDS:
        importlib.import_module(f"{__name__}.{name}").add_parser(subparsers)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    try:
        args = _parser().parse_args(argv)
        return args.func(args)
    except AttentionError as error:
        print(f"tilewise: error: {error}", file=sys.stderr)
        return 2
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in EXTRA_PACKAGES:
            raise
        print(
            f"tilewise: error: this command needs {package}, which is not installed: run  pip install 'tilewise[demo]'",
            file=sys.stderr,
        )
        return 1
    except KeyboardInterrupt:
        print("tilewise: interrupted", file=sys.stderr)
        return 130
