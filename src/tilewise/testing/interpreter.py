"""Triton's interpreter, without a search that takes half of its time.

Where a kernel calls another ``@triton.jit`` function, the interpreter looks through all of ``triton.language`` for what it must
replace by its own, though the launch of the kernel has done so and nothing has been put back yet. ``quicken`` has it look once in
each launch; and it keeps which type of numpy stands for which of Triton.
"""

from __future__ import annotations

from typing import Any

__all__ = ["quicken"]


class _Once:
    """``_patch_lang`` of the interpreter, for as long as the scope that a launch opened is open."""

    def __init__(self, patch: Any, languages: tuple[Any, ...]):
        self.patch, self.languages = patch, languages
        self.scope: Any = None
        self.patched: tuple[bool, ...] = ()

    def __call__(self, fn: Any) -> Any:
        values = fn.__globals__.values()
        wanted = tuple(any(value is language for value in values) for language in self.languages)
        if self.scope is not None and all(there or not asked for there, asked in zip(self.patched, wanted, strict=True)):
            return self.scope
        scope = self.patch(fn)
        if self.scope is not None:
            self.patched = tuple(a or b for a, b in zip(self.patched, wanted, strict=True))
        else:
            self.scope, self.patched = scope, wanted
            restore = scope.restore

            def close() -> None:
                self.scope = None
                restore()

            scope.restore = close
        return scope


class _Kept:
    """``_get_np_dtype`` of the interpreter, kept by the name of an element's type."""

    def __init__(self, find: Any):
        self.find = find
        self.found: dict[str, Any] = {}

    def __call__(self, dtype: Any) -> Any:
        name = dtype.scalar.name
        if name not in self.found:
            self.found[name] = self.find(dtype)
        return self.found[name]


def quicken() -> bool:
    """Do so in this process from now on. False where there is no Triton, none that interprets, or one that works otherwise."""
    try:
        import triton
        from triton.runtime import interpreter
    except ImportError:
        return False
    known = all(hasattr(interpreter, name) for name in ("_LangPatchScope", "_patch_lang", "_get_np_dtype"))
    if not known or not triton.knobs.runtime.interpret:  # pyright: ignore[reportAttributeAccessIssue]
        return False
    if not isinstance(interpreter._patch_lang, _Once):
        interpreter._patch_lang = _Once(interpreter._patch_lang, (interpreter.tl, interpreter.tl.core))
        interpreter._get_np_dtype = _Kept(interpreter._get_np_dtype)
    return True
