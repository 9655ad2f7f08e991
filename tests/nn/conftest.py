"""Inside the library no dtype is promoted by accident."""

import jax
import pytest


@pytest.fixture(autouse=True)
def _strict_dtypes():
    with jax.numpy_dtype_promotion("strict"):
        yield
