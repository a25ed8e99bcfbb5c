"""Which layer gets which format: ordered rules, the first that matches wins.

A rule is ``pattern=format``, its pattern the exact name of a layer, a glob, or ``re:`` and a regular expression that must
match the whole name; the format ``none`` leaves the layer as it is. Grammar of the command line:
``PATTERN=FORMAT[(option=value;option=value)]``, several separated by commas.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import inspect
import json
import logging
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from kitchen_core.errors import UnsupportedError
from kitchen_core.formats import Format, get_format

from .files import printable

log = logging.getLogger("kitchen")

MIN_FEATURES = 64  # a layer narrower than this saves next to nothing and is too small for a useful rotation group
UNMATCHED = "no rule matches it"
QUANTIZABLE = (torch.float32, torch.float16, torch.bfloat16)

# Asked after the user's rules and before the default format. Matched against the layer's name, in lower or upper case.
DEFAULT_EXCLUDES = {
    "re:(?i).*embed.*": "embeddings stay as they are",
    "re:(?i)(.*[._])?(wte|wpe|shared)": "embeddings stay as they are",
    "re:(?i).*norm.*": "norms, and the modulation in front of them, stay as they are",
    "re:(?i)(.*[._])?lm_head": "the output head stays as it is",
}


@dataclasses.dataclass(frozen=True)
class Rule:
    """``format`` None excludes; ``options`` go to the format's ``config_for``; ``why`` is said in listings.

    ``default`` marks the rules that nobody wrote: they leave layers below MIN_FEATURES as they are.
    """

    pattern: str
    format: str | None
    options: tuple[tuple[str, Any], ...] = ()
    why: str = ""
    default: bool = False

    def matches(self, layer: str) -> bool:
        """Exact name, glob, or ``re:`` with a full match."""
        if self.pattern.startswith("re:"):
            return re.fullmatch(self.pattern[3:], layer) is not None
        return self.pattern == layer or fnmatch.fnmatchcase(layer, self.pattern)

    def __str__(self) -> str:
        options = ";".join(f"{key}={value}" for key, value in self.options)
        return f"{self.pattern}={self.format or 'none'}" + (f"({options})" if options else "")


@dataclasses.dataclass(frozen=True)
class Rules:
    """An ordered list of rules. Make one with ``Rules.of``."""

    rules: tuple[Rule, ...]

    @classmethod
    def of(cls, rules: Any = (), format: str | None = None, options: Mapping[str, Any] | None = None) -> Rules:
        """User rules, then the default excludes and ``format`` for all the rest, if one is given.

        ``rules``: a Rules, the name of a format (short for ``format=``), text in the command line's grammar, a mapping
        from pattern to format (or None, or (format, options)), or an iterable of texts, pairs and Rule objects.
        ``options`` belong to ``format``. Raises UnsupportedError for bad grammar, PluginError or FormatError for a format
        that is not installed or unknown.
        """
        if isinstance(rules, Rules):
            made = list(rules.rules)
        elif isinstance(rules, str) and "=" not in rules:
            if format is not None:
                raise UnsupportedError(f"rules={rules!r} names a format, and so does format={format!r}; give one")
            made, format = [], rules
        elif not isinstance(rules, Iterable):
            raise UnsupportedError(
                "rules are the name of a format, 'pattern=format', a mapping from pattern to format, or a list of rules; got "
                f"{rules!r}"
            )
        else:
            entries = rules.items() if isinstance(rules, Mapping) else [rules] if isinstance(rules, str) else rules
            made = [rule for entry in entries for rule in _rules_of(entry)]
        if format is not None:
            made += [Rule(pattern, None, (), why, True) for pattern, why in DEFAULT_EXCLUDES.items()]
            made.append(Rule("*", format, tuple(sorted((options or {}).items())), "the default", True))
        elif options:
            raise UnsupportedError(f"options {sorted(options)} were given without a format that they belong to")
        for rule in made:
            check_rule(rule)
        return cls(tuple(made))

    @classmethod
    def read(cls, path: str | Path) -> list[Rule]:
        """The rules of a file: one a line, blank lines and lines that start with # ignored."""
        try:
            lines = Path(path).read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise UnsupportedError(f"cannot read the rules file {str(path)!r}: {error}") from error
        return [_parse_rule(line.strip()) for line in lines if line.strip() and not line.strip().startswith("#")]

    def match(self, layer: str) -> Rule | None:
        """The first rule that matches, or None."""
        return next((rule for rule in self.rules if rule.matches(layer)), None)

    def warn_of_unmatched(self, layers: Iterable[str]) -> None:
        """Log the rules that somebody wrote and that match no layer: a misspelt name must not pass in silence."""
        names = list(layers)
        for rule in self.rules:
            if not rule.default and not any(rule.matches(name) for name in names):
                log.warning(
                    "kitchen: rule %s matches none of the %d layers; names are matched whole: use * or re: for parts of them",
                    rule, len(names),
                )  # fmt: skip


def _rules_of(entry: Any) -> Iterable[Rule]:
    if isinstance(entry, Rule):
        return [entry]
    if isinstance(entry, str):
        return [_parse_rule(text) for text in _split(entry)]
    if isinstance(entry, tuple | list) and len(entry) == 2:
        pattern, target = entry
        name, options = target if isinstance(target, tuple | list) and len(target) == 2 else (target, {})
        if isinstance(pattern, str) and (name is None or isinstance(name, str)) and isinstance(options, Mapping):
            return [Rule(pattern, None if name in (None, "none") else name, tuple(sorted(options.items())))]
    raise UnsupportedError(
        f"a rule is 'pattern=format', a pair (pattern, format), (pattern, None) or (pattern, (format, options)); got {entry!r}"
    )


def _split(text: str) -> list[str]:
    """Split at commas that stand in no bracket, so that ``re:.{1,2}=int8`` is one rule."""
    parts, depth, start = [], 0, 0
    for position, letter in enumerate(text):
        depth = max(0, depth + (letter in "([{") - (letter in ")]}"))
        if letter == "," and depth == 0:
            parts.append(text[start:position])
            start = position + 1
    return [part.strip() for part in (*parts, text[start:]) if part.strip()]


def _parse_rule(text: str) -> Rule:
    found = re.fullmatch(r"(?P<pattern>.+)=\s*(?P<format>\w+)\s*(\((?P<options>[^()]*)\))?", text)
    unclosed = found and "=" in found["pattern"] and not found["pattern"].startswith("re:")  # a=int8(group_size=32
    if found is None or unclosed:
        raise UnsupportedError(
            f"a rule is PATTERN=FORMAT or PATTERN=FORMAT(option=value;option=value), got {text!r}; "
            "for example 'blocks.*.attn.*=int8', 're:.*mlp[.]fc2=w4a8(group_size=32)', 'head=none'"
        )
    words = [word.strip() for word in (found["options"] or "").split(";") if word.strip()]
    options = tuple(sorted(parse_option(word) for word in words))
    name = found["format"]
    return Rule(found["pattern"].strip(), None if name.lower() == "none" else name, options)


def parse_option(text: str) -> tuple[str, Any]:
    """``name=value`` with the value read as JSON where it is, else as a word. Raises UnsupportedError."""
    name, equals, value = text.partition("=")
    if not equals or not name.strip():
        raise UnsupportedError(f"an option is name=value, such as group_size=32, got {text!r}")
    try:
        parsed = json.loads(value)
    except ValueError:
        parsed = value.strip()
    return name.strip().replace("-", "_"), parsed


def check_rule(rule: Rule) -> None:
    """Raises unless the pattern is valid, the format is installed and it knows the options."""
    if rule.pattern.startswith("re:"):
        try:
            re.compile(rule.pattern[3:])
        except re.error as error:
            raise UnsupportedError(f"the pattern {rule.pattern!r} is not a regular expression: {error}") from error
    if rule.format is None:
        return
    format = get_format(rule.format)
    parameters = list(inspect.signature(format.config_for).parameters.values())[2:]  # after the shape
    names = [p.name for p in parameters if p.kind is not inspect.Parameter.VAR_KEYWORD]
    if len(names) < len(parameters):  # **options are fields of the config
        names += [field.name for field in dataclasses.fields(format.Config) if field.name not in names]
    unknown = sorted({key for key, _ in rule.options} - set(names))
    if unknown:
        raise UnsupportedError(
            f"format {rule.format!r} has no option {', '.join(unknown)}; it has: {', '.join(names) or 'none'}"
        )


# -------------------------------------------------------------------------------------------------------- decisions


@dataclasses.dataclass(frozen=True)
class Decision:
    """What becomes of one layer: ``format`` and ``config``, or None and ``reason``; ``rule`` is the text of the rule."""

    layer: str
    shape: tuple[int, ...]
    dtype: torch.dtype | None
    format: type[Format] | None
    config: Any
    rule: str
    reason: str

    @property
    def is_matrix(self) -> bool:
        """Whether it is a float matrix: what one may expect to be quantized."""
        return len(self.shape) == 2 and self.dtype in QUANTIZABLE

    def describe_config(self) -> str:
        """The config in words: group_size=16, convrot_groupsize=256."""
        return describe_config(self.config)

    def as_json(self) -> dict[str, Any]:
        """Plain values for headers and ``--json``."""
        config = None if self.config is None else config_as_json(self.config)
        return {
            "layer": self.layer,
            "shape": list(self.shape),
            "dtype": str(self.dtype).removeprefix("torch."),
            "format": self.format.name if self.format else None,
            "config": config,
            "rule": self.rule,
            "why": self.reason,
        }


def config_as_json(config: Any) -> dict[str, Any]:
    """A format's config as plain JSON values."""
    return json.loads(json.dumps(dataclasses.asdict(config), default=str))


def describe_config(config: Any) -> str:
    """A config in words: ``group_size=16, convrot_groupsize=256``."""
    return "" if config is None else ", ".join(f"{key}={value}" for key, value in config_as_json(config).items())


def decide(layer: str, shape: tuple[int, ...], dtype: torch.dtype | None, rules: Rules, keep: str = "") -> Decision:
    """Apply the rules to one layer. ``keep`` is a reason, known to the caller, to leave it as it is.

    Raises UnsupportedError only for options that the format refuses for every layer; a layer that a format cannot hold
    is left, with the format's own reason.
    """

    def left(reason: str, rule: str = "") -> Decision:
        return Decision(layer, shape, dtype, None, None, rule, reason)

    if keep:
        return left(keep)
    if len(shape) != 2:
        return left(f"{len(shape)}-D, not the weight of a linear layer")
    if dtype not in QUANTIZABLE:
        return left(f"{str(dtype).removeprefix('torch.')}: only float32, float16 and bfloat16 weights are quantized")
    rule = rules.match(layer)
    if rule is None:
        return left(UNMATCHED)
    if rule.format is None:
        return left(rule.why or "excluded by rule", str(rule))
    if rule.default and min(shape) < MIN_FEATURES:
        return left(f"too small: fewer than {MIN_FEATURES} features in or out", str(rule))
    format = get_format(rule.format)
    try:
        config = format.config_for(*shape, **dict(rule.options))
    except UnsupportedError as error:
        own = f"{format.name} cannot hold "  # a format may begin so itself
        return left(str(error) if str(error).startswith(own) else f"{own}it: {error}", str(rule))
    except (TypeError, ValueError, AttributeError, ArithmeticError) as error:
        if not rule.options:
            raise
        raise UnsupportedError(
            f"the rule {rule} has an option of the wrong kind for {format.name}: {error}; write numbers as "
            "group_size=32, words as they are"
        ) from error
    return Decision(layer, shape, dtype, format, config, str(rule), rule.why or "chosen by rule")


def layer_of(key: str) -> str | None:
    """The layer whose weight this key is: "a.b" of "a.b.weight"; None for other keys."""
    return key.removesuffix("weight").removesuffix(".") if key == "weight" or key.endswith(".weight") else None


def shown(decision: Decision) -> list[str]:
    """A row of a listing: layer, shape, dtype, format, config, rule, reason."""
    dtype = str(decision.dtype).removeprefix("torch.") if decision.dtype else "?"
    shape = "x".join(map(str, decision.shape))
    name = decision.format.name if decision.format else "-"
    return [printable(decision.layer), shape, dtype, name, decision.describe_config(), decision.rule, decision.reason]
