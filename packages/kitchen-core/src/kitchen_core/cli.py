"""The ``kitchen`` command. ``doctor``, ``explain`` and ``formats`` live here; plug-ins of group ``kitchen.commands`` add
more. ``kitchen --help`` imports neither torch nor any plug-in's heavy module."""

from __future__ import annotations

import argparse
import difflib
import io
import json
import os
import sys
from collections.abc import Sequence
from importlib.metadata import version
from typing import NoReturn

from . import plugins as plugin_registry
from .errors import KitchenError, UnsupportedError
from .known_formats import KNOWN_FORMATS, install_hint

EXIT_PROBLEM = 1  # the command ran and found a problem
EXIT_ERROR = 2  # the command could not do what was asked
_SIZES = ("M", "N", "K", "group", "rotation", "rank", "bits")
EXIT_BROKEN_PIPE = 141  # as a shell reports a process that SIGPIPE ended


def build_parser() -> argparse.ArgumentParser:
    """The command line: own subcommands, then the plug-ins'. A plug-in that fails to load is named in the help."""
    parser = argparse.ArgumentParser(prog="kitchen", description="Quantized linear layers: what runs, where and why.")
    parser.add_argument("--version", action="store_true", help="of every kitchen package that is installed")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND")
    _add_doctor(subparsers)
    _add_explain(subparsers)
    _add_formats(subparsers)
    broken = []
    for plugin in plugin_registry.plugins("kitchen.commands").values():
        add = plugin.load()
        if add is None:
            broken.append(f"{plugin.name}: {plugin.why_not()}")
        else:
            add(subparsers)
    if broken:
        parser.epilog = "commands that could not be loaded: " + "; ".join(broken)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit code. A KitchenError is shown as one message, without a traceback."""
    for name in ("stdout", "stderr"):  # closed, as by `2>&-`: its number must not become that of a file that is written
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115 - for as long as the process lives
    for stream in (sys.stdout, sys.stderr):  # what a terminal cannot show becomes an escape, not a traceback
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    # Read when torch is loaded. Else its threads spin while they wait, and take a busy machine's cores from those at work.
    if "torch" not in sys.modules and "GOMP_SPINCOUNT" not in os.environ:
        os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    parser = build_parser()
    options, unknown = parser.parse_known_args(arguments)
    if unknown:
        _refuse(unknown, _parser_of(options.command, parser))
    if options.version:
        print(_versions())
        return 0
    if options.command is None:
        parser.print_help()
        return EXIT_ERROR
    try:
        return options.func(options) or 0
    except KeyboardInterrupt:
        print(f"kitchen {options.command}: interrupted; nothing half-made is left behind", file=sys.stderr)
        return 130
    except KitchenError as error:
        print(f"kitchen {options.command}: {error}", file=sys.stderr)
        return EXIT_ERROR
    except BrokenPipeError:  # the reader left, as `| head` does: what was found is not known, so this is no success
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else the interpreter's last flush complains
        return EXIT_BROKEN_PIPE
    except OSError as error:  # of the system, not of the command: a disk that fails, a file that cannot be read
        print(f"kitchen {options.command}: {error}", file=sys.stderr)
        return EXIT_ERROR


def _versions() -> str:
    """kitchen-core and the distributions of all plug-ins, from metadata alone."""
    plugins = [plugin for group in plugin_registry.GROUPS for plugin in plugin_registry.plugins(group).values()]
    others = {plugin.distribution for plugin in plugins}
    return "\n".join([f"kitchen-core {version('kitchen-core')}", *sorted(others)])


def _parser_of(command: str | None, parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """The parser of a subcommand; the given one without any."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction) and command in action.choices:
            return action.choices[command]
    return parser


def _refuse(unknown: list[str], parser: argparse.ArgumentParser) -> NoReturn:
    """End with the usage of this command, what it does not know, and what may have been meant."""
    given, known = [word.partition("=")[0] for word in unknown if word.startswith("-")], parser._option_string_actions
    near = [match for word in given for match in difflib.get_close_matches(word, known, n=1)]
    meant = f"; did you mean {' or '.join(near)}?" if near else ""
    parser.error(f"unrecognized arguments: {' '.join(unknown)}{meant}")


def _add_device_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--as", dest="simulate", metavar="SM", help="pretend to have this GPU: sm_70, sm_90, h100, ...")
    parser.add_argument("--name", help="name of the pretended GPU, such as 'NVIDIA GeForce GTX 1660'")
    parser.add_argument("--json", action="store_true", help="machine-readable output")


def _add_doctor(subparsers: argparse._SubParsersAction) -> None:
    parser = subparsers.add_parser(
        "doctor", help="what is installed, what each GPU can do, what would run and why",
        description="Report versions, GPUs, plug-ins and the kernel that each op would use. Exit code 1: a problem.",
    )  # fmt: skip
    _add_device_options(parser)
    parser.add_argument(
        "-v",
        "--verbose",
        action="store_true",
        help="every plug-in by itself, and each op on the CPU with its reasons too",
    )
    parser.set_defaults(func=_doctor)


def _doctor(options: argparse.Namespace) -> int:
    from . import doctor

    report = doctor.examine(options.simulate, options.name)
    print(json.dumps(report, indent=2) if options.json else doctor.render(report, options.verbose))
    return EXIT_PROBLEM if report["problems"] else 0


def _add_explain(subparsers: argparse._SubParsersAction) -> None:
    parser = subparsers.add_parser(
        "explain", help="which kernel would run one op, and why the others would not",
        description="Ask every kernel of one op about one call, and show each answer. Nothing is run. What is not given is "
        "taken from a typical layer and said. Exit code 1: the op refuses the call, or no kernel can run it.",
        epilog="example: kitchen explain int8_linear -M 4096 -N 12288 -K 3072 --as sm_90",
    )  # fmt: skip
    parser.add_argument("op", help="an op of torch.ops.kitchen, such as int8_linear, w4a8_linear, awq_linear")
    number = {"type": _count, "metavar": "NUMBER"}
    parser.add_argument("-M", "--m", dest="M", help="rows of x: batch times sequence", **number)
    parser.add_argument("-N", "--n", dest="N", help="out features", **number)
    parser.add_argument("-K", "--k", dest="K", help="in features", **number)
    parser.add_argument("--group", help="columns of a weight that share a scale; 0: the whole row", **number)
    parser.add_argument("--rotation", help="columns of a ConvRot group; 0: not rotated", **number)
    parser.add_argument("--rank", help="of the low-rank branch; 0: none", **number)
    parser.add_argument("--bits", help="bits per weight", **number)
    parser.add_argument(
        "--dtype", choices=("float32", "float16", "bfloat16"), help="of the float operands and the output"
    )
    parser.add_argument(
        "--option",
        action="append",
        default=[],
        metavar="WORD",
        help="bias, residual, input_act=swiglu, ...; may be repeated",
    )
    _add_device_options(parser)
    parser.set_defaults(func=_explain)


def _count(text: str) -> int:
    """A number of rows, columns or bits, no larger than a tensor can have them."""
    try:
        number = int(text)
    except ValueError:
        number = -1
    if not 0 <= number < 2**63:
        allowed = "at most 2^63 - 1, as sizes of tensors are" if number >= 0 else "a whole number of 0 or more"
        raise argparse.ArgumentTypeError(f"must be {allowed}, got {text[:40]!r}{'...' if len(text) > 40 else ''}")
    return number


def _explain(options: argparse.Namespace) -> int:
    import torch

    from . import doctor
    from .explanation import explain
    from .ops._define import problem_builders
    from .typical import typical, usual_rotation

    dtype = getattr(torch, options.dtype) if options.dtype else None
    fields = typical(options.op, M=1, dtype=dtype)
    asked = {name: getattr(options, name) for name in _SIZES if getattr(options, name) is not None}
    foreign = [name for name in asked if not fields.get(name)]
    if foreign and options.op in problem_builders():
        own = ", ".join(name for name in _SIZES if fields.get(name))
        raise UnsupportedError(f"{options.op} has no {', '.join(foreign)}; what it depends on: {own}")
    if "rotation" not in asked:  # as a layer of this width is quantized
        fields["rotation"] = usual_rotation(options.op, asked.get("K", fields["K"]))
    assumed = [f"{name}={fields[name]}" for name in _SIZES if fields.get(name) and name not in asked]
    assumed += [] if options.dtype else ["bfloat16"]
    given = {word.partition("=")[0] for word in options.option}  # scales=float32 takes the place of scales=bfloat16
    usual = {word for word in fields.pop("options", ()) if word.partition("=")[0] not in given}
    words = tuple(sorted({*usual, *options.option}))
    with doctor.pretend(options.simulate, options.name) as device:
        if device == "cpu":
            assumed.append("the CPU (torch sees no GPU here; --as sm_90 pretends to have one)")
        result = explain(options.op, **{**fields, **asked, "options": words, "device": device})
        if options.json:
            print(json.dumps({**doctor.explanation_as_dict(result), "assumed": assumed}, indent=2))
        else:
            print(result)
            if assumed:
                print(f"  assumed, as not given: {', '.join(assumed)}")
    return 0 if result.chosen is not None else EXIT_PROBLEM


def _add_formats(subparsers: argparse._SubParsersAction) -> None:
    parser = subparsers.add_parser("formats", help="formats that are installed, and what to install for the others")
    parser.add_argument("--json", action="store_true", help="machine-readable output")
    parser.set_defaults(func=_formats)


def _formats(options: argparse.Namespace) -> int:
    installed = plugin_registry.plugins("kitchen.formats")
    rows = []
    for name in sorted({*KNOWN_FORMATS, *installed}):
        package, _, short = KNOWN_FORMATS.get(name, ("", (), ""))
        plugin = installed.get(name)
        state = f"installed: {plugin.distribution}" if plugin else f"not installed: {install_hint(package)}"
        rows.append({"format": name, "short_name": short, "installed": plugin is not None, "state": state})
    if options.json:
        print(json.dumps(rows, indent=2))
    else:
        for row in rows:
            print(f"{row['format']:18} {row['short_name']:10} {row['state']}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
