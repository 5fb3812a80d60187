"""numpy's arrays in the processes of tasks that have numpy: made of what crosses between them as typed JSON."""

from __future__ import annotations

from typing import Any

import numpy as np


def made(dtype: str, shape: tuple[int, ...], items: list[Any]) -> Any:
    """The array of these elements in C order. ValueError for elements that its type cannot hold."""
    # The second character of a dtype such as `<f8` or `|O` is the kind.
    kind = dtype[1]
    if kind == "O":  # filled one by one: numpy would take elements that are lists for another axis
        array = np.empty(len(items), object)
        for at, item in enumerate(items):
            array[at] = item
        return array.reshape(shape)
    try:
        # The longest element says how long the texts are: a type of many characters would take memory for each.
        return np.array(items, kind if kind in "US" else dtype).reshape(shape)
    except (TypeError, OverflowError) as error:
        raise ValueError(f"not a typed value: an array of {dtype} of other elements: {error}") from None
