"""``python -m tilewise``: the same as the ``tilewise`` command."""

from .cli import main

raise SystemExit(main())
