"""What is collected once a closure was traced: what tracing left, and nothing else is looked at."""

from __future__ import annotations

import gc
import weakref

import pytest

from het_tf.distribute.closure_runner import _num_traces, _old_objects_passed_over


class _Cycle:
    """Only a collection frees it."""

    def __init__(self):
        self.itself = self


@pytest.fixture(autouse=True)
def _by_hand():
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def test_new_garbage_goes_and_old_is_passed_over():
    old = weakref.ref(_Cycle())
    with _old_objects_passed_over():
        new = weakref.ref(_Cycle())
        gc.collect()
        assert new() is None
        assert old() is not None
    assert gc.get_freeze_count() == 0
    gc.collect()
    assert old() is None


def test_what_raises_leaves_nothing_frozen():
    with pytest.raises(KeyError), _old_objects_passed_over():
        raise KeyError
    assert gc.get_freeze_count() == 0


def test_what_a_user_has_frozen_stays_so():
    gc.freeze()
    try:
        with _old_objects_passed_over():
            garbage = weakref.ref(_Cycle())
            gc.collect()
            assert garbage() is None
        assert gc.get_freeze_count() > 0
    finally:
        gc.unfreeze()


def test_a_python_function_is_never_traced():
    assert _num_traces(lambda: None) is None
