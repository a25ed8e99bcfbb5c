"""kitchen's formats in torchao's ``quantize_``: its rules by name, our layers.

Importing this module imports torchao and registers the handler:

    from torchao.quantization import FqnToConfig, quantize_
    from kitchen_models.integrations.torchao import KitchenConfig

    quantize_(model, KitchenConfig("int8"))
    rules = {"re:.*attn.to_[qkv]": KitchenConfig("int8"), "re:.*mlp.fc[12]": KitchenConfig("w4a8")}
    quantize_(model, FqnToConfig(rules), filter_fn=None)

Each nn.Linear becomes a QuantizedLinear, an nn.Linear over plain tensors; no tensor subclass is involved.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Any

import torch

from kitchen_core import QuantizedLinear
from kitchen_core.errors import UnsupportedError
from kitchen_core.formats import config_of, get_format

from ..quantize import quantized_linear
from ..rows import check_finite
from ..rules import Decision

try:
    from torchao.core.config import ALLOWED_AO_MODULES, AOBaseConfig
    from torchao.quantization.transform_module import register_quantize_module_handler
except ImportError as error:
    raise UnsupportedError(f"torchao cannot be imported ({error}); install torchao>=0.15") from error

log = logging.getLogger("kitchen")


@dataclass
class KitchenConfig(AOBaseConfig):
    """A format by any of its names, and the options of its ``config_for``. torchao writes it to JSON and reads it again.

    Raises UnsupportedError, FormatError or PluginError for a format that is unknown or not installed.
    """

    format: str = "int8"
    options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        get_format(self.format)


ALLOWED_AO_MODULES.add(__name__)  # else torchao refuses to read the config from JSON


@register_quantize_module_handler(KitchenConfig)
def quantize_module(module: torch.nn.Module, config: KitchenConfig, parameter_name: str = "weight") -> torch.nn.Module:
    """The layer in the place of ``module``; ``module`` itself, with a warning, where the format cannot hold it.

    ``parameter_name``: patterns of FqnToConfig match parameters too; of a linear the weight alone counts.

    Raises UnsupportedError for what is no plain nn.Linear, is quantized already or has inf or NaN.
    """
    if parameter_name != "weight":
        return module
    if isinstance(module, QuantizedLinear):
        raise UnsupportedError(
            f"a layer is quantized already ({module.format.name}); give quantize_ a filter that leaves it out"
        )
    if type(module) is not torch.nn.Linear:
        raise UnsupportedError(
            f"a kitchen format takes the place of nn.Linear, got {type(module).__name__}; give quantize_ a filter_fn, or "
            "FqnToConfig patterns, that match linears alone"
        )
    weight = module.weight.detach()
    if type(weight) is not torch.Tensor or weight.is_meta:
        found = "on the meta device" if weight.is_meta else f"a {type(weight).__name__}"
        raise UnsupportedError(f"a weight is {found}, and a plain float tensor is needed; load the float model first")
    format = get_format(config.format)
    try:
        chosen = format.config_for(*weight.shape, **config.options)
    except TypeError:
        config_of(format, weight, config.options)  # which says which options there are
        raise
    except UnsupportedError as error:
        log.warning("kitchen: a layer %s stays as it is: %s", list(weight.shape), error)
        return module
    check_finite(weight)
    decision = Decision("", tuple(weight.shape), weight.dtype, format, chosen, "", "torchao")
    return quantized_linear(module, weight, decision)
