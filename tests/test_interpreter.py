"""The interpreter that is quicker makes the numbers and raises the errors of Triton's own, and can be taken away again."""

import numpy as np
import pytest
import torch

import tilewise as tw
from tilewise.testing import gauntlet
from tilewise.testing import interpreter as testing_interpreter
from tilewise.testing.calls import evaluate
from tilewise.testing.interpreter import as_it_is, quicken

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


@pytest.mark.parametrize(
    "name, dtype",
    [
        ("thin_window", torch.float16),
        ("gqa", torch.bfloat16),
        ("one_key", torch.float32),
        ("dropout", torch.float32),
        ("softcap_bias", torch.float16),
        ("column_sums_ragged", torch.bfloat16),
        ("very_low", torch.float16),
    ],
    ids=str,
)
def test_the_numbers_are_those_of_the_interpreter_as_it_is(name, dtype):
    call = gauntlet.entry(name).build(dtype=dtype)
    quick = evaluate(call, "triton")
    with as_it_is():
        plain = evaluate(call, "triton")
    assert quick.keys() == plain.keys()
    for output, t in plain.items():
        assert torch.equal(quick[output].nan_to_num(7.0), t.nan_to_num(7.0)), output


def test_it_can_be_taken_away():
    def there():
        return [vars(owner).get(name, getattr(owner, name)) for owner, name, *_ in testing_interpreter._replaced]

    assert there() == [quick for *_, quick in testing_interpreter._replaced]
    with as_it_is():
        assert there() == [plain for *_, plain, _ in testing_interpreter._replaced]
    assert there() == [quick for *_, quick in testing_interpreter._replaced]
    assert all(plain is not quick for *_, plain, quick in testing_interpreter._replaced)


def _raises(call):
    try:
        call()
    except Exception as error:
        return repr(error)
    return pytest.fail("nothing was raised")


semantic, handle = interpreter.interpreter_semantic, interpreter.TensorHandle


POINTER = tl.pointer_type(tl.int32)


def _tensor(shape, dtype=tl.int32):
    return tl.tensor(handle(np.ones(shape, np.int32), dtype), tl.block_type(dtype, list(shape)))


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: handle(np.zeros(2), tl.float32),
        lambda: tl.block_type(tl.float32, [3]),
        lambda: tl.block_type(tl.float32, []),
        lambda: semantic.add(_tensor((2, 4)), _tensor((4, 4)), True),
        lambda: semantic.add(_tensor((4,)), 1 << 40, True),
        lambda: semantic.mod(_tensor((4,)), _tensor((4,), tl.uint32)),
        lambda: semantic.add(tl.tensor(handle(np.zeros(1, np.uint64), POINTER), POINTER), 1.0, True),
    ],
)
def test_the_errors_are_those_of_the_interpreter_as_it_is(wrong):
    quick = _raises(wrong)
    with as_it_is():
        assert _raises(wrong) == quick


@pytest.mark.parametrize("operation", ["add", "sub", "mul"])
def test_integers_wrap_as_they_do_without(operation):
    def run():
        big = tl.tensor(handle(np.array([2**31 - 1, -(2**31), 3], np.int32), tl.int32), tl.block_type(tl.int32, [1]))
        with np.errstate(over="ignore"):
            return getattr(semantic, operation)(big, big, True).handle.data

    quick = run()
    with as_it_is():
        plain = run()
    assert quick.dtype == plain.dtype
    assert (quick == plain).all()


def test_what_was_made_before_can_be_used():
    with as_it_is():
        before = _tensor((2, 4))
    assert (semantic.add(before, before, True).handle.data == 2).all()
    assert tl.tensor(before.handle, before.type).shape == [2, 4]


def test_one_number_spread_over_a_block_is_as_good_as_a_block():
    block, one = _tensor((2, 4)), semantic.scalar_constant(5, tl.int32)
    for total in (semantic.add(block, one, True), semantic.add(one, block, True)):
        assert (total.handle.data == np.full((2, 4), 6)).all()
        assert total.type == block.type
