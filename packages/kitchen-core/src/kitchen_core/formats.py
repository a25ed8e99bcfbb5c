"""What a storage format is, and the registry of the installed ones.

A format is a class with no instances: how a weight is quantized, stored, named in a checkpoint, dequantized, and which
op its linear calls. Packages offer theirs through entry points of group ``kitchen.formats``.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import os
from typing import Any, ClassVar

import torch

from . import plugins as plugin_registry
from .abi import KITCHEN_ABI
from .activation import QuantizedActivation
from .arithmetic import is_power_of_4
from .devices import DeviceFacts
from .errors import FormatError, PluginError, UnsupportedError
from .known_formats import KNOWN_FORMATS, install_hint

Tensors = dict[str, torch.Tensor]


@dataclasses.dataclass(frozen=True)
class TensorSpec:
    """One stored tensor of a format: its name in Python, its key in a checkpoint (below the layer), other spellings."""

    name: str
    key: str
    required: bool = True
    aliases: tuple[str, ...] = ()


class Format:
    """Base of all formats. Subclasses are plugged in by entry point and used as classes.

    ``Config`` is a frozen dataclass of plain values that says all that the tensors do not; ``tensors`` lists what is
    stored, the codes first. ``column_planes`` names tensors whose rows are several planes, each over all columns, with the
    planes' relative widths: such a row cannot be cut at one place.
    """

    abi: ClassVar[int] = KITCHEN_ABI
    name: ClassVar[str]
    package: ClassVar[str]
    Config: ClassVar[type]
    tensors: ClassVar[tuple[TensorSpec, ...]]
    activation_kind: ClassVar[str] = "float"
    uses_calibration: ClassVar[bool] = False
    # Whether ``linear`` and ``linear_quantized`` take ``part``, (first, rows): the stored weight is the rows from ``first``
    # on of one of so many rows, and sums are to be added in the order of the whole's. For formats whose sums are floats.
    takes_part: ClassVar[bool] = False
    column_planes: ClassVar[dict[str, tuple[int, ...]]] = {}

    # ------------------------------------------------------------------------------ what every format supplies

    @classmethod
    def config_for(cls, out_features: int, in_features: int, **options: Any) -> Any:
        """The config for a layer of this shape: the documented rule for groups that do not divide K is applied here.

        Raises UnsupportedError where the format cannot hold such a layer, naming shape and reason.
        """
        raise NotImplementedError

    @classmethod
    def quantize(cls, weight: torch.Tensor, config: Any, seed: int = 0, **calibration: Any) -> Tensors:
        """A float weight [N, K] as this format's tensors, by name. ``seed`` > 0 rounds stochastically where it can.

        Formats that set ``uses_calibration`` take ``calibration=``, a ``kitchen_core.Calibration`` of the layer's inputs,
        and then make its outputs on such inputs close instead of the weight. Shapes and dtypes are the same.
        """
        raise NotImplementedError

    @classmethod
    def requantize(cls, tensors: Tensors, config: Any, weight: torch.Tensor, seed: int = 0) -> Tensors:
        """Another float weight in the place of stored tensors. Formats that keep some of them (a table) override it."""
        return cls.quantize(weight, config, seed=seed)

    @classmethod
    def dequantize(cls, tensors: Tensors, config: Any, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """The dense weight [N, K] in the basis of x, computed in fp32 and rounded once."""
        raise NotImplementedError

    @classmethod
    def linear(
        cls,
        x: torch.Tensor,
        tensors: Tensors,
        config: Any,
        bias: torch.Tensor | None = None,
        out_dtype: torch.dtype | None = None,
        input_act: str = "none",
        input_act_weight: torch.Tensor | None = None,
        input_act_eps: float = 0.0,
        residual: torch.Tensor | None = None,
        residual_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """x [..., K] -> [..., N] through this format's op; activation in front and residual behind included."""
        raise NotImplementedError

    @classmethod
    def quantize_activation(
        cls, x: torch.Tensor, tensors: Tensors, config: Any, **input_act: Any
    ) -> QuantizedActivation:
        """x quantized as this weight wants it, to be used for several weights."""
        raise NotImplementedError

    @classmethod
    def linear_quantized(
        cls,
        activation: QuantizedActivation,
        tensors: Tensors,
        config: Any,
        bias: torch.Tensor | None = None,
        out_dtype: torch.dtype | None = None,
        residual: torch.Tensor | None = None,
        residual_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """As ``linear``, from an activation that is quantized already and known to fit (``check_fits``)."""
        raise NotImplementedError

    @classmethod
    def activation_traits(cls, tensors: Tensors, config: Any) -> tuple[tuple[str, object], ...]:
        """What a shared activation must have in common with this weight."""
        return ()

    @classmethod
    def shape(cls, tensors: Tensors, config: Any) -> tuple[int, int]:
        """(out_features, in_features) of the stored weight."""
        raise NotImplementedError

    @classmethod
    def check(cls, tensors: Tensors, config: Any) -> None:
        """Raises FormatError, naming tensor, found and allowed, unless shapes and dtypes fit the config and each other."""
        raise NotImplementedError

    @classmethod
    def marker(cls, config: Any) -> dict[str, Any]:
        """The JSON object that marks a layer of this format in a checkpoint."""
        raise NotImplementedError

    @classmethod
    def config_from_marker(cls, marker: dict[str, Any], shapes: dict[str, tuple[int, ...]]) -> Any:
        """The config of a stored layer from its marker and its tensors' shapes by name. Unknown keys are tolerated."""
        raise NotImplementedError

    # ---------------------------------------------------------- the resident layout, of formats that have one

    # Of the stored tensors, those that such a layout holds as one, under the first one's name (``kitchen_core.resident``).
    resident_tensors: ClassVar[tuple[str, ...]] = ()

    @classmethod
    def is_resident(cls, tensors: Tensors) -> bool:
        """Whether they are in the resident layout. The tensors themselves say so, by a dtype and a shape that no stored one
        has: whatever way they came, they are taken for what they are.
        """
        return False

    @classmethod
    def why_not_resident(cls, tensors: Tensors, config: Any, facts: DeviceFacts | None) -> str | None:
        """Why stored tensors cannot be laid out so, in words, or None if they can; ``facts`` of the GPU that they are on."""
        return f"{cls.name} has no resident layout"

    @classmethod
    def lay_resident(cls, tensors: Tensors, config: Any, storage: torch.Tensor | None = None) -> Tensors:
        """Stored tensors in the resident layout: in ``storage``, the bytes of the ``resident_tensors``, or in new memory.

        Nothing may fail once ``storage`` is written to. Raises FormatError for tensors that are laid out so.
        """
        raise NotImplementedError

    @classmethod
    def stored(cls, tensors: Tensors, config: Any) -> Tensors:
        """The tensors as they are saved: themselves, or made anew of the resident layout, which lives in memory only."""
        return tensors

    # --------------------------------------------------------------------------------------- shared behaviour

    @classmethod
    def check_names(cls, tensors: Tensors) -> None:
        """Raises FormatError unless all required tensors are there, none is unknown, and they are as they are stored."""
        if cls.is_resident(tensors):
            raise FormatError(
                f"{cls.name}: these tensors are in the resident layout, which lives in memory only; give what is stored: "
                "format.stored(tensors, config)"
            )
        known = {spec.name for spec in cls.tensors}
        missing = [spec.name for spec in cls.tensors if spec.required and tensors.get(spec.name) is None]
        unknown = sorted(set(tensors) - known)
        if missing or unknown:
            raise FormatError(
                f"{cls.name} needs the tensors {', '.join(s.name for s in cls.tensors if s.required)}"
                f" (optional: {', '.join(s.name for s in cls.tensors if not s.required) or 'none'});"
                + (f" missing: {', '.join(missing)}" if missing else "")
                + (f" unknown: {', '.join(unknown)}" if unknown else "")
            )

    @classmethod
    def state_dict(cls, tensors: Tensors, prefix: str = "") -> Tensors:
        """The tensors by checkpoint key, ``prefix`` being the layer's name with its dot."""
        return {prefix + s.key: tensors[s.name] for s in cls.tensors if tensors.get(s.name) is not None}

    @classmethod
    def from_state_dict(cls, state: Tensors, prefix: str = "") -> Tensors:
        """The tensors by name out of a state dict, under any accepted spelling of their keys."""
        found = {}
        for spec in cls.tensors:
            for key in (spec.key, *spec.aliases):
                if prefix + key in state:
                    found[spec.name] = state[prefix + key]
                    break
        return found


def marker_tensor(marker: dict[str, Any]) -> torch.Tensor:
    """A marker as checkpoints store it: a 1-D uint8 tensor of UTF-8 JSON."""
    return torch.tensor(list(json.dumps(marker, sort_keys=True).encode()), dtype=torch.uint8, device="cpu")


def read_marker(tensor: torch.Tensor) -> dict[str, Any]:
    """The JSON object of a marker tensor; {} for an empty one. Trailing NULs are tolerated. Raises FormatError else."""
    if tensor.dtype not in (torch.uint8, torch.int8) or tensor.dim() != 1:
        raise FormatError(
            f"a comfy_quant marker is a 1-D uint8 tensor, got {tensor.dtype} of shape {list(tensor.shape)}"
        )
    text = bytes(tensor.view(torch.uint8).tolist()).rstrip(b"\0 \n")
    if not text:
        return {}
    try:
        marker = json.loads(text.decode("utf-8"))
    except (ValueError, RecursionError) as error:  # of the text, of the JSON, of an absurd number
        raise FormatError(f"a comfy_quant marker must hold UTF-8 JSON, got {text[:60]!r}: {error}") from error
    if not isinstance(marker, dict):
        raise FormatError(f"a comfy_quant marker must be a JSON object, got {type(marker).__name__}")
    nested = marker.get("params")
    return {**marker, **nested} if isinstance(nested, dict) else marker


def canonical_name(name: str) -> str:
    """A format's name from any of its names: its own, an alias in files, the short name of commands."""
    for canonical, (_, aliases, short) in KNOWN_FORMATS.items():
        if name in (canonical, short, *aliases):
            return canonical
    return name


def installed_formats() -> dict[str, plugin_registry.Plugin]:
    """Installed formats by name, from metadata alone: nothing is imported."""
    return plugin_registry.plugins("kitchen.formats")


def get_format(name: str) -> type[Format]:
    """The format of this name (alias and short names too).

    Raises PluginError saying what to install where the format is known and absent, or broken; FormatError where it is
    unknown.
    """
    if not isinstance(name, str):
        raise FormatError(f"a format is named by a string, got {name!r}")
    canonical = canonical_name(name)
    plugin = installed_formats().get(canonical)
    if plugin is not None:
        return plugin.require()
    if canonical in KNOWN_FORMATS:
        package = KNOWN_FORMATS[canonical][0]
        if plugin_registry.is_excluded("kitchen.formats", canonical):
            raise PluginError(
                f"format {canonical!r} is installed but left out by KITCHEN_PLUGINS={os.environ['KITCHEN_PLUGINS']!r}; "
                "add its package to the variable, or unset it"
            )
        raise PluginError(f"format {canonical!r} is not installed. Install its package: {install_hint(package)}")
    short = ", ".join(f"{full} ({names[2]})" for full, names in sorted(KNOWN_FORMATS.items()))
    known = ", ".join([short, *sorted(set(installed_formats()) - set(KNOWN_FORMATS))])
    raise FormatError(
        f"unknown format {name!r}; formats known to this version: {known}. "
        "A newer file may need newer packages: pip install --upgrade kitchen-core and the package of its format"
    )


def check_float_weight(weight: torch.Tensor) -> None:
    """Raises UnsupportedError unless ``weight`` is a finite float matrix [N, K] with N, K >= 1.

    A NaN or inf in a weight would spoil a whole row or group silently, so it is named by its position.
    """
    if weight.layout is not torch.strided:
        raise UnsupportedError(f"a weight to quantize must be dense, got layout {weight.layout}; pass its to_dense()")
    if weight.dim() != 2 or weight.numel() == 0:
        raise UnsupportedError(f"a weight to quantize must be [N, K] with N, K >= 1, got shape {list(weight.shape)}")
    if weight.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        raise UnsupportedError(f"a weight to quantize must be float32, float16 or bfloat16, got {weight.dtype}")
    if weight.device.type != "meta" and not torch.isfinite(weight).all():
        bad = (~torch.isfinite(weight)).nonzero()
        row, column = bad[0].tolist()
        raise UnsupportedError(
            f"the weight has {len(bad)} elements that are inf or NaN, the first at [{row}, {column}] = "
            f"{weight[row, column].item()}; repair the checkpoint or leave this layer unquantized"
        )


def convrot_group(name: str, marker: dict[str, Any], rotated_by_default: bool) -> int:
    """The ConvRot group that a marker says, 0 for none. Raises FormatError for flags that are no booleans or contradict."""
    rotated = marker.get("convrot", rotated_by_default)
    if type(rotated) is not bool:
        raise FormatError(f"{name}: convrot must be true or false in the marker, got {rotated!r}")
    group = marker.get("convrot_groupsize", 256)
    if rotated and group == 0 and "convrot" in marker:
        raise FormatError(f"{name}: the marker says convrot and a convrot_groupsize of 0; one of them is wrong")
    return group if rotated else 0


def check_convrot(name: str, group: Any, in_features: int) -> None:
    """Raises FormatError unless a marker's ConvRot group is 0 or a power of 4 that divides K."""
    if type(group) is not int or (group and (group < 4 or not is_power_of_4(group) or in_features % group)):
        raise FormatError(
            f"{name}: convrot_groupsize must be a power of 4 that divides K={in_features}, got {group!r}; "
            "the file's marker does not fit its weight"
        )


def config_of(format: type[Format], weight: torch.Tensor, options: dict[str, Any]) -> Any:
    """The format's config for a weight, by the rule of its ``config_for``. Raises UnsupportedError for bad options, and
    FormatError for what is no format.
    """
    if not hasattr(format, "config_for"):
        raise FormatError(f"a format is a name, such as 'int8', or the class of a format, got {format!r}")
    if not isinstance(weight, torch.Tensor) or weight.dim() != 2:
        found = f"shape {list(weight.shape)}" if isinstance(weight, torch.Tensor) else type(weight).__name__
        raise UnsupportedError(
            f"{format.name} quantizes a weight [N, K], got {found}; reshape it, or take .weight of a layer"
        )
    known = options_of(format)
    unknown = sorted(set(options) - set(known))
    if unknown:
        raise UnsupportedError(
            f"format {format.name!r} has no option {', '.join(unknown)}; it has: {', '.join(known) or 'none'}"
        )
    for name, value in options.items():
        if type(known[name]) is int and type(value) is not int:
            raise UnsupportedError(
                f"{format.name}: {name} must be a whole number, such as {known[name]}, got {value!r}"
            )
    try:
        return format.config_for(*weight.shape, **options)
    except TypeError as error:
        raise UnsupportedError(f"{format.name} takes the options {', '.join(known)}; {error}") from error


def options_of(format: type[Format]) -> dict[str, Any]:
    """The options of a format's ``config_for`` by name, each with what it is where it is not given."""
    parameters = list(inspect.signature(format.config_for).parameters.values())[2:]  # after the shape
    known = {p.name: p.default for p in parameters if p.kind is not p.VAR_KEYWORD}
    if len(known) < len(parameters):  # **options are fields of the config
        known |= {field.name: field.default for field in dataclasses.fields(format.Config) if field.name not in known}
    return known
