"""The parameters of `LanguageModel`: the tensors of a Hugging Face folder, their first values, and their use.

Most of them are taken by the network as they are. A family may store the rows of several matrices in one (`StoredForm`)
or multiply rows by factors; both are computed from the parameters in every pass, so that gradients flow through.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from torch import nn

from bifolio.config import ModelConfig
from bifolio.errors import ModelFileError
from bifolio.model.families import family_of
from bifolio.model.recurrent_tensors import RecurrentNames
from bifolio.model.tensor_names import network_tensors
from bifolio.model.unit_tensors import SHARPNESS
from bifolio.quant.formats import QuantFormat
from bifolio.quant.tensor import QuantizedTensor

INITIAL_STANDARD_DEVIATION = 0.02
SHORTEST_STEP, LONGEST_STEP = 0.001, 0.1  # of a recurrence at first: its heads forget at different speeds


class ParameterForm:
    """Names and shapes of the parameters of a network, and the tensors that it takes."""

    def __init__(self, config: ModelConfig) -> None:
        family = family_of(config)
        self.config, self.names = config, family.hf_names
        self._form, self._factors = family.folder_form(config), family.folder_factors

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of every parameter by name."""
        found: dict[str, tuple[int, ...]] = {}
        for name, shape in network_tensors(self.config, self.names).items():
            part = self._form.part_of(name)
            if part is None:
                found[self._form.in_file(name)] = shape
            else:
                found[part[2]] = (part[0].num_rows, *shape[1:])
        return found

    def tensor(self, name: str, shape: tuple[int, ...], parameter: Callable[[str], torch.Tensor]) -> torch.Tensor:
        """A tensor of the network."""
        part = self._form.part_of(name)
        if part is None:
            found = parameter(self._form.in_file(name))
            found = found.transpose(-1, -2) if self._form.is_turned(name) else found
            factors = self._factors(self.config, name)
            if factors is not None:
                found = found * torch.from_numpy(factors).to(found)[:, None]
            return found.T if self.names.is_transposed(name, shape) else found
        joined, role, stored = part
        found = parameter(stored)
        return found[torch.from_numpy(dict(joined.parts)[role]).to(found.device)]

    def initial(self, name: str, shape: Sequence[int], generator: torch.Generator | None) -> torch.Tensor:
        """GPT-2 initialisation: normal weights, smaller for projections into the residual stream; identity norms."""
        names, recurrent, sizes = self.names, self.names.recurrent, tuple(shape)
        if recurrent is not None and self.config.recurrent is not None:
            first = _initial_of_recurrence(recurrent, name, sizes)
            if first is not None:
                return first
        if len(shape) == 1:
            is_norm_weight = name.endswith("weight")
            return torch.full(sizes, 1.0 - self.config.norm_offset if is_norm_weight else 0.0)
        deviation = INITIAL_STANDARD_DEVIATION
        outputs = (names.output, names.down, *(() if recurrent is None else (recurrent.output,)))
        if name.endswith(tuple(f"{output}.weight" for output in outputs)):
            deviation /= math.sqrt(2 * self.config.num_layers)
        elif recurrent is not None and name.endswith(tuple(f"{conv}.weight" for conv in recurrent.conv_names)):
            deviation = 1 / math.sqrt(sizes[-1])  # each output is a sum over the width alone
        return torch.randn(sizes, generator=generator) * deviation

    def read(self, parameters: Mapping[str, nn.Parameter], tensors: Mapping[str, QuantizedTensor], source: str) -> None:
        """Copy the tensors of files into the parameters; names may have or lack the prefix of the base model."""
        prefix = self.names.embedding.split(".")[0] + "."

        def bare(name: str) -> str:
            name = name.replace("language_model.", "", 1)
            return name.removeprefix(prefix) if name.startswith(prefix) else name.removeprefix("model.")

        spellings = {bare(name): name for name in tensors}
        for name, parameter in parameters.items():
            spelling = spellings.get(bare(name))
            if spelling is None:
                raise ModelFileError(f"the tensor {name!r} is missing from {source}: fetch the whole model again")
            tensor = tensors[spelling]
            if tensor.shape != tuple(parameter.shape):
                raise ModelFileError(
                    f"the tensor {name!r} of {source} has shape {tensor.shape} where the model has "
                    f"{tuple(parameter.shape)}: the files do not belong together"
                )
            with torch.no_grad():
                parameter.copy_(torch.from_numpy(np.array(tensor.dequantize())))


def _initial_of_recurrence(names: RecurrentNames, name: str, shape: tuple[int, ...]) -> torch.Tensor | None:
    """The first values of a recurrence's vectors, as those of Mamba-2; None: another tensor."""
    if names.norm and name.endswith(f"{names.norm}.weight"):
        return torch.ones(shape)
    if names.skip and name.endswith(names.skip):
        return torch.ones(shape)
    heads = math.prod(shape)
    if names.units is not None and name.endswith(names.units.parameter):  # decays from 0.9 to 0.999 at open gates
        steps = -torch.linspace(0.9, 0.999, heads).log() / SHARPNESS
        return torch.log(torch.expm1(steps)).reshape(shape)  # softplus gives the steps
    if names.decay and name.endswith(names.decay):
        return torch.arange(1, heads + 1).float().log().reshape(shape)
    if names.bias and name.endswith(names.bias):
        steps = torch.logspace(math.log10(SHORTEST_STEP), math.log10(LONGEST_STEP), heads)
        return torch.log(torch.expm1(steps)).reshape(shape)  # softplus gives the steps
    return None


def file_tensor(parameter: torch.Tensor) -> QuantizedTensor | np.ndarray:
    """Convert a parameter to a file tensor of the same type."""
    tensor = parameter.detach().cpu().contiguous()
    if tensor.dtype == torch.bfloat16:
        words = tensor.view(torch.int16).numpy()
        data = words.reshape(math.prod(tensor.shape[:-1]), -1).view(np.uint8)
        return QuantizedTensor(QuantFormat.BF16, data, tuple(tensor.shape))
    return np.asarray(tensor.numpy())


def register(module: nn.Module, name: str, parameter: nn.Parameter) -> None:
    """Register a parameter under its dotted name, with a plain module for each part of the path."""
    *path, last = name.split(".")
    for part in path:
        if part not in module._modules:
            module.add_module(part, nn.Module())
        module = module.get_submodule(part)
    module.register_parameter(last, parameter)
