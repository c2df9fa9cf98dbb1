"""The interpreter that is quicker patches Triton's language as often as a launch needs, and leaves it as it was."""

import pytest
import torch

import tilewise as tw
from tilewise.testing.interpreter import quicken

tl = pytest.importorskip("triton.language")
from triton.runtime import interpreter  # noqa: E402


def attention(length: int) -> torch.Tensor:
    q, k, v = (torch.randn(1, 2, length, 16, generator=torch.Generator().manual_seed(i)) for i in range(3))
    return tw.attention(q, k, v, causal=True, backend="triton")


@pytest.fixture
def searches(monkeypatch):
    """The functions for which the language was searched."""
    assert quicken()
    found = []
    patch = interpreter._patch_lang.patch
    monkeypatch.setattr(interpreter._patch_lang, "patch", lambda fn: (found.append(fn.__name__), patch(fn))[1])
    return found


def test_a_launch_searches_once_however_many_functions_it_calls(searches):
    attention(16)
    few = list(searches)
    attention(90)
    # The kernel's own search, and one for what Triton's library of functions sees of the language.
    assert len(few) <= 2
    assert searches == few * 2


def test_the_language_is_put_back():
    load, table = tl.load, tl.tensor.__dict__.get("__bool__")
    attention(16)
    assert tl.load is load
    assert tl.tensor.__dict__.get("__bool__") is table


def test_it_is_put_back_after_an_error(monkeypatch):
    load = tl.load
    monkeypatch.setattr(interpreter.interpreter_builder, "create_dot", lambda *_, **__: 1 / 0)
    with pytest.raises(tw.BackendBroken):
        attention(16)
    assert tl.load is load
    monkeypatch.undo()
    assert attention(16).isfinite().all()


def test_the_numbers_are_those_of_the_interpreter_as_it_is(monkeypatch):
    quick = attention(70)
    monkeypatch.setattr(interpreter, "_patch_lang", interpreter._patch_lang.patch)
    monkeypatch.setattr(interpreter, "_get_np_dtype", interpreter._get_np_dtype.find)
    assert torch.equal(attention(70), quick)
