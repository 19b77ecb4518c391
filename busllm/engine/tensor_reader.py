"""A checkpoint's tensors, handed out one by one.

Owns: the check that a checkpoint has exactly what is asked for, and the conversion to tensors of torch.
Does not know: file formats (`model_store`), which tensors a model has (`models/build.py`, `cpu/packed_model.py`).
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from busllm.errors import ModelError
from busllm.model_store.tensor_part import WHOLE, TensorPart
from busllm.model_store.weights import WeightTensor

_NAMED_AT_MOST = 5  # tensors that one message names


class TensorAccount:
    """Hands out stored tensors and keeps account of what did not fit, so that one error names all of it."""

    def __init__(self, tensors: Mapping[str, WeightTensor]) -> None:
        self._tensors = tensors
        self._taken: set[str] = set()
        self._missing: list[str] = []
        self._misshapen: list[str] = []
        self._not_finite: list[str] = []

    def has(self, name: str) -> bool:
        """Whether a tensor is there, for those that a model may go without."""
        return name in self._tensors

    def find(self, name: str, shape: tuple[int, ...]) -> WeightTensor | None:
        """The tensor, or None when it is missing or has another shape: `finish` raises then."""
        tensor = self._tensors.get(name)
        self._taken.add(name)
        if tensor is None:
            self._missing.append(name)
            return None
        if tuple(tensor.shape) != shape:
            self._misshapen.append(f"{name} is {_format(tensor.shape)} and should be {_format(shape)}")
            return None
        return tensor

    def not_finite(self, name: str) -> None:
        """Notes a tensor with values that are no numbers: `finish` raises then."""
        self._not_finite.append(name)

    def finish(self) -> None:
        """Checks that everything was there, is finite, and was used.

        Raises:
            ModelError: names the tensors.
        """
        left_over = [
            name for name in self._tensors if name not in self._taken and not name.endswith("rotary_emb.inv_freq")
        ]
        problems = [
            f"{verb} {_listed(names)}"
            for verb, names in (("missing:", self._missing), ("wrong shape:", self._misshapen), ("unknown:", left_over))
            if names
        ]
        if problems:
            raise ModelError(f"The weights do not match config.json. {'; '.join(problems)}.")
        if self._not_finite:
            raise ModelError(
                "The weights have values that are not finite, or too large for the number format they are kept in: "
                f"{_listed(self._not_finite)}."
            )


class TensorReader:
    """Reads tensors in one dtype onto one device."""

    def __init__(self, account: TensorAccount, device: torch.device, dtype: torch.dtype) -> None:
        self._account = account
        self._device = device
        self._dtype = dtype

    @property
    def device(self) -> torch.device:
        """Where tensors are put."""
        return self._device

    def has(self, name: str) -> bool:
        """Whether a tensor is there, for those that a model may go without."""
        return self._account.has(name)

    def take(self, name: str, shape: tuple[int, ...], part: TensorPart = WHOLE) -> torch.Tensor:
        """Reads one tensor, or a part of it.

        Args:
            shape: of the whole tensor.

        Returns:
            The values in the reader's dtype on its device. Zeros when the tensor is missing or has another shape: the
            account's `finish` raises then.
        """
        tensor = self._account.find(name, shape)
        if tensor is None:
            return torch.zeros(part.shape_of(shape), dtype=self._dtype, device=self._device)
        values = torch.tensor(tensor.to_float32(part)).to(self._device, self._dtype)
        # A sum costs no memory, and NaN and infinity come through; so may the sum of very large numbers.
        if not values.sum(dtype=torch.float32).isfinite() and not values.isfinite().all():
            self._account.not_finite(name)
        return values


def _listed(names: list[str]) -> str:
    more = len(names) - _NAMED_AT_MOST
    return ", ".join(names[:_NAMED_AT_MOST]) + (f" and {more} more" if more > 0 else "")


def _format(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape))
