"""``phocas aggregate``: merge files of tensors by a rule."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from phocas.integrations.merging import Merged


def aggregate(
    files: Annotated[list[Path], typer.Argument(help="Files, one for each worker or client.")],
    rule: Annotated[str, typer.Option(help="Rule, for example phocas:b=2; see phocas rules.")],
    output: Annotated[
        Path, typer.Option("--output", "-o", help="File to write, in the first file's format.")
    ],
    base: Annotated[
        Path | None,
        typer.Option(help="Common starting point; the differences to it are aggregated."),
    ] = None,
    weights: Annotated[
        str | None,
        typer.Option(help="Weight of each file, in their order: 600,450,800."),
    ] = None,
    max_share: Annotated[
        float | None, typer.Option(help="Largest share of the total weight that one file has.")
    ] = None,
    seed: Annotated[
        int | None, typer.Option(help="Seed, for rules that draw random numbers.")
    ] = None,
    explain: Annotated[
        bool, typer.Option("--explain", help="Print the share of dropped values of each file.")
    ] = False,
    receipt: Annotated[
        Path | None, typer.Option(help="JSON file to write, with the digests of all files.")
    ] = None,
    allow_nonfinite: Annotated[
        bool,
        typer.Option("--allow-nonfinite", help="Write the result even if it has NaN or inf."),
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON: dropped shares by file and by tensor.")
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="Show no progress.")] = False,
) -> None:
    """Merge files of tensors by a rule.

    The files may be .safetensors, .npz, .npy or .pt. Keys, shapes and types
    must be the same in all of them. Files are mapped and merged in parts, so
    they may be larger than memory. Integers become the value that more than
    half of the files have.
    """
    from phocas.files import check_writable
    from phocas.integrations import merging
    from phocas.report.bytes import byte_bar
    from phocas.rules import parse_rule

    found = parse_rule(rule)
    numbers = None if weights is None else _numbers(weights)
    if receipt is not None:
        check_writable(receipt, "the receipt")
        if receipt in (output, base, *files):
            raise ValueError(f"the receipt must be a file of its own: got {receipt}")
    with byte_bar("merging", quiet=quiet) as progress:
        merged = merging.merge_files(
            files,
            found,
            output,
            base=base,
            weights=numbers,
            max_share=max_share,
            seed=seed,
            explain=explain or as_json,
            digest=receipt is not None,
            allow_nonfinite=allow_nonfinite,
            progress=progress,
        )
    if receipt is not None:
        told = merging.Request(str(found), base, numbers, max_share, seed)
        written = merging.receipt(merged, told)
        merging.write_receipt(receipt, written)
        _tell_copies(written, merged)
    for first, again in merged.same:
        typer.echo(f"warning: {again} is {first}: it counts as two workers", err=True)
    if merged.not_finite:
        typer.echo(f"warning: {merged.not_finite:,} values of the merge are not finite", err=True)
    if as_json:
        print(json.dumps(_as_json(merged, str(found)), indent=1))
        return
    if explain:
        _print_dropped(merged)
    typer.echo(f"{output}: {merged.columns:,} values of {len(files)} files by {found}")


def _numbers(text: str) -> list[float]:
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise ValueError(f"--weights must be numbers with commas between: got {text!r}") from None


def _tell_copies(receipt: dict[str, object], merged: Merged) -> None:
    """Warn of files with one content under two names."""
    seen: dict[str, str] = {}
    known = {again for _, again in merged.same}
    inputs = receipt["inputs"]
    for path, entry in zip(merged.files, inputs if isinstance(inputs, list) else [], strict=True):
        first = seen.setdefault(entry["sha256"], entry["name"])
        if first != entry["name"] and path not in known:
            typer.echo(f"warning: {entry['name']} has the content of {first}", err=True)


def _print_dropped(merged: Merged) -> None:
    from phocas.report.tables import print_table

    if merged.dropped is None:
        return
    print_table(
        {
            "file": merged.names,
            "dropped": [f"{share:.1%}" for share in merged.dropped],
            "beyond expected": [f"{share - merged.expected:+.1%}" for share in merged.dropped],
        },
        right=("dropped", "beyond expected"),
    )


def _as_json(merged: Merged, rule: str) -> dict[str, object]:
    shares = merged.dropped if merged.dropped is not None else ()
    return {
        "output": str(merged.output),
        "rule": rule,
        "values": merged.columns,
        "not_finite": merged.not_finite,
        "expected": merged.expected,
        "files": [
            {"file": str(path), "dropped": float(share)}
            for path, share in zip(merged.files, shares, strict=True)
        ],
        "tensors": {
            name: list(map(float, lost)) for name, lost in (merged.by_tensor or {}).items()
        },
    }
