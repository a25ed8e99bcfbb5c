"""The subcommands that kitchen-models adds to ``kitchen``. Nothing heavy is imported before one of them runs."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

_CHECKPOINT = "a .safetensors file, or the .safetensors.index.json of a sharded one"


def _add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="machine-readable output")


def _print(options: argparse.Namespace, as_json: dict[str, Any], render: Callable[[], None]) -> None:
    if options.json:
        print(json.dumps(as_json, indent=2))
    else:
        render()


@contextlib.contextmanager
def _folder_of(output: str | None, name: str = "OUT") -> Iterator[None]:
    """Makes the folder of a file where it is missing; one that is still empty after a refusal goes again. None: no file."""
    folder = os.path.dirname(os.path.realpath(output)) if output is not None else "."
    missing = []
    while not os.path.lexists(folder):
        missing.append(folder)
        folder = os.path.dirname(folder)
    try:
        if missing:
            os.makedirs(missing[0], exist_ok=True)
        yield
    except BaseException as error:
        for made in missing:
            with contextlib.suppress(OSError):  # it holds something, or was never made
                os.rmdir(made)
        if missing and isinstance(error, OSError) and error.filename in missing:
            from kitchen_core.errors import FormatError

            raise FormatError(
                f"cannot make the folder {missing[0]!r}: {error.strerror}; give another {name}"
            ) from error
        raise


def inspect_command(subparsers: argparse._SubParsersAction) -> None:
    """Add ``kitchen inspect``."""
    parser = subparsers.add_parser(
        "inspect", help="what is in a checkpoint, from its header alone",
        description="List layers, formats, shapes and bytes. No weight is read. Exit code 1: a layer has a problem.",
    )  # fmt: skip
    parser.add_argument("file", help=_CHECKPOINT)
    _add_json(parser)
    parser.set_defaults(func=_inspect)


def _inspect(options: argparse.Namespace) -> int:
    from .inspect import inspect_file, render

    report = inspect_file(options.file)
    _print(options, report, lambda: render(report))
    return 1 if report["problems"] else 0


def quantize_command(subparsers: argparse._SubParsersAction) -> None:
    """Add ``kitchen quantize``."""
    parser = subparsers.add_parser(
        "quantize", help="quantize a checkpoint of any size",
        description="Quantize the linear layers of a safetensors file, layer by layer. Without --format only layers that a "
        "rule names are touched. Embeddings, norms, the output head and layers under 64 features stay as they are unless "
        "a rule names them. OUT appears complete or not at all; its folder is made where it is missing.",
    )  # fmt: skip
    parser.add_argument("input", metavar="IN", help=_CHECKPOINT)
    parser.add_argument("output", metavar="OUT", help="the .safetensors file to write")
    parser.add_argument("--format", help="format of all layers that no rule names: int8, w4a8, w6a8, awq, svdquant")
    parser.add_argument(
        "--rules", action="append", default=[], metavar="PATTERN=FORMAT,...",
        help="which layers get which format; the first that matches wins; FORMAT none leaves a layer; PATTERN is a name, "
        "a glob or re:REGEX (full match); options in brackets: '*.mlp.*=w4a8(group_size=32)'",
    )  # fmt: skip
    parser.add_argument("--rules-file", metavar="FILE", help="rules, one a line, asked after those of --rules")
    parser.add_argument("--group-size", type=int, metavar="G", help="quantization group of --format")
    parser.add_argument("--convrot-groupsize", type=int, metavar="G", help="rotation group of --format; 0: no rotation")
    parser.add_argument("--rank", type=int, metavar="R", help="rank of the low-rank branch of --format")
    parser.add_argument(
        "--option", action="append", default=[], metavar="NAME=VALUE", help="any other option of --format"
    )
    parser.add_argument(
        "--calibration",
        metavar="FILE",
        help="what kitchen_models.save_calibration wrote: makes 4 bits far more accurate",
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="list every layer, its rule and the reason; write nothing"
    )
    parser.add_argument("--report", metavar="DIR", help="then compare, and write pictures and report.html to DIR")
    _add_json(parser)
    parser.set_defaults(func=_quantize)


def _quantize(options: argparse.Namespace) -> int:
    from kitchen_core.errors import UnsupportedError

    from .console import print_table, progress_bar, size
    from .quantize import quantize_file
    from .rules import Rules, parse_option, shown

    rules = [*options.rules, *(Rules.read(options.rules_file) if options.rules_file else [])]
    if not rules and options.format is None:
        raise UnsupportedError("nothing says what to do: give --format, --rules or --rules-file")
    own = {name: getattr(options, name) for name in ("group_size", "convrot_groupsize", "rank")}
    given = {name: value for name, value in own.items() if value is not None}
    for name, value in map(parse_option, options.option):
        if given.setdefault(name, value) != value:
            raise UnsupportedError(f"{name} is given twice, as {given[name]} and as {value}; give it once")
    if options.report and not options.dry_run:
        from .report import check_folder

        if os.path.realpath(options.report) == os.path.realpath(options.output):
            raise UnsupportedError(
                f"--report {options.report!r} is OUT itself; give the folder of the report another name"
            )
        check_folder(options.report)
    with _folder_of(None if options.dry_run else options.output), progress_bar() as progress:
        report = quantize_file(
            options.input, options.output, rules, options.format, given, options.dry_run, progress, options.calibration
        )  # fmt: skip
    if report.rank > 0:  # of several processes, one speaks
        return 0
    if options.report and not options.dry_run:
        from .report import write_report

        write_report(options.input, options.output, options.report, options.calibration)
    if options.json:
        print(json.dumps({**report.as_json(), "dry_run": options.dry_run, "summary": report.summary()}, indent=2))
        report.refuse_nothing()
        return 0
    if options.dry_run:
        print_table(
            ["layer", "shape", "dtype", "format", "config", "rule", "reason"], [shown(d) for d in report.decisions]
        )
        report.refuse_nothing()
    speed = f" ({size(report.bytes_before / report.seconds)}/s)" if report.seconds >= 1 else ""  # else it says nothing
    ending = "dry run: nothing was written" if options.dry_run else f"{report.seconds:.1f} s{speed}: {options.output}"
    print(f"{report.summary()}; {ending}")
    if report.uncalibrated:
        formats = ", ".join(f"{count} {name}" for name, count in report.uncalibrated.items())
        print(
            f"kitchen quantize: {formats} without --calibration FILE, which makes it more accurate, at 4 bits by far: "
            "kitchen_models.calibrate sees the model run, kitchen_models.save_calibration writes FILE",
            file=sys.stderr,
        )
    return 0


def verify_command(subparsers: argparse._SubParsersAction) -> None:
    """Add ``kitchen verify``."""
    parser = subparsers.add_parser(
        "verify", help="per-layer error of a quantized checkpoint against its original",
        description="Compare the weights layer by layer, worst first. Exit code 1: --max-error is exceeded or has "
        "nothing to judge, or a tensor of the original is missing.",
    )  # fmt: skip
    parser.add_argument("original", metavar="IN", help="the checkpoint before quantization")
    parser.add_argument("quantized", metavar="OUT", help="the quantized checkpoint")
    parser.add_argument(
        "--plot", metavar="FILE.png",
        help="draw the errors of the worst layers; its folder is made where it is missing",
    )  # fmt: skip
    parser.add_argument("--max-error", type=_error, metavar="E", help="largest relative L2 error allowed for a layer")
    _add_json(parser)
    parser.set_defaults(func=_verify)


def _error(text: str) -> float:
    """A number that an error can exceed."""
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if not number >= 0:
        raise argparse.ArgumentTypeError(f"must be a number of 0 or more, such as 0.02, got {text!r}")
    return number


def _verify(options: argparse.Namespace) -> int:
    from . import verify

    if options.plot is not None:
        verify.check_plot(options.plot)
    with _folder_of(options.plot, "--plot"):
        result = verify.verify_files(options.original, options.quantized)
        _print(options, result.as_json(), lambda: verify.render(result))
        if options.plot is not None:  # last: a place that cannot be written costs the picture alone
            verify.plot(result, options.plot)
            print(f"plot: {options.plot}", file=sys.stderr if options.json else sys.stdout)
    if options.max_error is not None and not result.compared:
        print(
            "kitchen verify: --max-error has nothing to judge: no float layer of IN is quantized in OUT",
            file=sys.stderr,
        )
        return 1
    over = [e for e in result.layers if options.max_error is not None and not e.relative_l2 <= options.max_error]
    if over:
        print(f"kitchen verify: {len(over)} layers exceed --max-error {options.max_error:g}", file=sys.stderr)
    return 1 if over or result.missing else 0


def report_command(subparsers: argparse._SubParsersAction) -> None:
    """Add ``kitchen report``."""
    parser = subparsers.add_parser(
        "report", help="errors, distributions and bytes of a quantized checkpoint, as pictures and one HTML page",
        description="Compare a quantized checkpoint with its original and write error.png, weights.png, outliers.png, "
        "bytes.png, report.json and report.html, which holds all of it, to DIR.",
    )  # fmt: skip
    parser.add_argument("original", metavar="IN", help="the checkpoint before quantization")
    parser.add_argument("quantized", metavar="OUT", help="the quantized checkpoint")
    parser.add_argument("folder", metavar="DIR", help="where to write; made where it is missing")
    parser.add_argument("--calibration", metavar="FILE", help="adds the error of the layers' outputs on such inputs")
    parser.set_defaults(func=_report)


def _report(options: argparse.Namespace) -> int:
    from .report import write_report

    made = write_report(options.original, options.quantized, options.folder, options.calibration)
    print(f"{made.summary()}: {os.path.join(options.folder, 'report.html')}")
    return 0


def demo_command(subparsers: argparse._SubParsersAction) -> None:
    """Add ``kitchen demo``."""
    parser = subparsers.add_parser(
        "demo", help="quantize a real model with each installed format and compare what it computes",
        description="all-MiniLM-L6-v2, its weights from an installed package: quantize, load, embed sentences, compare "
        "with fp32. Nothing is downloaded. Exit code 1: a format falls below its threshold.",
    )  # fmt: skip
    parser.add_argument("--format", action="append", help="only this format; may be repeated")
    parser.add_argument("--device", default="cpu", help="where to run the model: cpu, cuda, cuda:1")
    _add_json(parser)
    parser.set_defaults(func=_demo)


def _demo(options: argparse.Namespace) -> int:
    from . import demo

    report = demo.run(options.format, options.device)
    _print(options, report, lambda: demo.render(report))
    return 0 if report["passed"] else 1


def convert_command(subparsers: argparse._SubParsersAction) -> None:
    """Add ``kitchen convert``."""
    parser = subparsers.add_parser(
        "convert", help="a quantized checkpoint of one toolkit in the form of another",
        description="Codes and scales are put into another order under other names; nothing is quantized again. What the "
        "target cannot hold is refused with the layer's name. OUT appears complete or not at all; a killed run goes on when "
        "started again. Forms that are read: comfy, nunchaku, AutoAWQ, GPTQ, compressed-tensors.",
    )  # fmt: skip
    parser.add_argument("input", metavar="IN", help=_CHECKPOINT)
    parser.add_argument(
        "output", metavar="OUT",
        help="a .safetensors file, or a .safetensors.index.json for shards; its folder is made where it is missing",
    )  # fmt: skip
    parser.add_argument(
        "--to", required=True, metavar="DIALECT",
        help="comfy, comfy-quants, nunchaku, nunchaku-v1, autoawq, autoawq-gemv, autoawq-gemv-fast, gptq, gptq_v2, "
        "compressed-tensors",
    )  # fmt: skip
    parser.add_argument(
        "--from", dest="dialect", metavar="DIALECT",
        help="what IN is, where its keys and config do not say: comfy, nunchaku, autoawq, gptq, gptq_v2, compressed-tensors",
    )  # fmt: skip
    parser.add_argument(
        "--unsigned", action="append", metavar="PATTERN",
        help="nunchaku layers that run on shifted activations; replaces the list of known names ('' for none)",
    )  # fmt: skip
    parser.add_argument(
        "--adaln", action="append", default=[], metavar="PATTERN=PARTS",
        help="nunchaku modulations whose outputs are interleaved in so many parts, 0 for none; asked before the known names",
    )  # fmt: skip
    parser.add_argument(
        "--shard-size", default="5GB", metavar="SIZE", help="of OUT's shards: bytes, or 500MB, 5GB, 4GiB"
    )
    parser.add_argument("--dry-run", action="store_true", help="say what would be done, write nothing")
    _add_json(parser)
    parser.set_defaults(func=_convert)


def _convert(options: argparse.Namespace) -> int:
    from kitchen_core.errors import UnsupportedError

    from .console import parse_size, progress_bar
    from .convert import convert_file
    from .foreign import Hints

    parts = {}
    for text in options.adaln:
        pattern, _, number = text.rpartition("=")
        if not pattern or number not in ("0", "3", "6"):
            raise UnsupportedError(f"--adaln takes PATTERN=PARTS with 0, 3 or 6 parts, got {text!r}")
        parts[pattern] = int(number)
    unsigned = None if options.unsigned is None else tuple(text for text in options.unsigned if text)
    try:
        with _folder_of(None if options.dry_run else options.output), progress_bar() as progress:
            report = convert_file(
                options.input, options.output, options.to, Hints(options.dialect, unsigned, parts),
                parse_size(options.shard_size), options.dry_run, progress,
            )  # fmt: skip
    except KeyboardInterrupt:
        print("kitchen convert: interrupted; the same command goes on where this one was", file=sys.stderr)
        return 130
    if options.json:
        print(json.dumps({**report.as_json(), "dry_run": options.dry_run, "summary": report.summary()}, indent=2))
        return 0
    ending = "dry run: nothing was written" if options.dry_run else f"{report.seconds:.1f} s: {options.output}"
    print(f"{report.summary()}; {ending}")
    if report.config_file:
        print(f"{report.config_file}: the source's, with the new quantization_config")
    elif report.config is not None:
        print(f"for the model's config.json: {json.dumps({'quantization_config': report.config})}")
    return 0
