"""``phocas aggregate``: merge files of tensors by a rule."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from phocas.cli.completion import complete_rule

if TYPE_CHECKING:
    from phocas.integrations.merging import Merged


def aggregate(
    files: Annotated[list[Path], typer.Argument(help="Files or folders, one for each client.")],
    rule: Annotated[
        str,
        typer.Option(
            help="Rule, for example phocas:b=2; see phocas rules.", autocompletion=complete_rule
        ),
    ],
    output: Annotated[
        Path,
        typer.Option(
            "--output", "-o", help="File or new folder to write, in the first one's format."
        ),
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
    rank: Annotated[
        int | None,
        typer.Option(help="Rank of merged LoRA adapters; by default their median."),
    ] = None,
    skip_bad: Annotated[
        bool,
        typer.Option("--skip-bad", help="Leave out files that are unreadable or do not fit."),
    ] = False,
    explain: Annotated[
        bool, typer.Option("--explain", help="Print the share of dropped values of each file.")
    ] = False,
    receipt: Annotated[
        Path | None, typer.Option(help="JSON file to write, with the digests of all files.")
    ] = None,
    verify: Annotated[
        Path | None,
        typer.Option(help="Receipt to verify: repeat the merge and compare; write nothing."),
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

    The files may be .safetensors, .npz, .npy or .pt, sharded checkpoints with
    their index, or folders. Keys, shapes and types must be the same in all of
    them. Files are mapped and merged in parts, so they may be larger than
    memory. Integers become the value that more than half of the files have.
    LoRA adapters are merged as products B A, and may have different ranks.
    """
    import tempfile

    from phocas.files import check_writable
    from phocas.integrations import merging
    from phocas.report.bytes import byte_bar
    from phocas.rules import parse_rule

    found = parse_rule(rule)
    numbers = None if weights is None else _numbers(weights)
    if verify is not None and receipt is not None:
        raise ValueError("--verify writes nothing: leave --receipt out")
    if receipt is not None:
        check_writable(receipt, "the receipt")
        if receipt in (output, base, *files):
            raise ValueError(f"the receipt must be a file of its own: got {receipt}")
    expected = None if verify is None else merging.read_receipt(verify)
    request = merging.MergeRequest(str(found), base, numbers, max_share, seed)
    with tempfile.TemporaryDirectory() if verify else nullcontext("") as folder:
        with byte_bar("merging", quiet=quiet) as progress:
            merged = merging.merge_files(
                files,
                found,
                output if expected is None else Path(folder, "merged"),
                base=base,
                weights=numbers,
                max_share=max_share,
                seed=seed,
                rank=rank,
                skip_bad=skip_bad,
                explain=explain or as_json,
                digest=receipt is not None or expected is not None,
                allow_nonfinite=allow_nonfinite,
                progress=progress,
            )
        for _, why in merged.left_out:
            typer.echo(f"left out: {why}", err=True)
        if expected is not None:
            _verify(output, expected, merging.receipt(merged, request))
            return
    if receipt is not None:
        written = merging.receipt(merged, request)
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
    typer.echo(f"{output}: {merged.columns:,} values of {len(merged.files)} files by {found}")
    if merged.rank is not None and merged.kept is not None:
        typer.echo(f"rank {merged.rank} keeps {merged.kept:.2%} of the merged products")


def _verify(output: Path, expected: dict[str, Any], found: dict[str, Any]) -> None:
    """Print what differs from a receipt, and end with status 1 if anything does."""
    from phocas.integrations.merging.merged import content_digest
    from phocas.integrations.merging.receipt import differences, parts_of

    lines = differences(expected, found)
    parts = parts_of(output)
    if not parts:
        lines.append(f"{output}: there is no such output")
    elif content_digest(parts) != expected["output"]["sha256"]:
        lines.append(f"{output} has another content than the output of the receipt")
    for line in lines:
        typer.echo(f"differs: {line}", err=True)
    if lines:
        raise typer.Exit(1)
    typer.echo(f"{output}: verified, {len(found['inputs'])} files by {found['rule']}")


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
        "left_out": [{"file": str(path), "why": why} for path, why in merged.left_out],
        "rank": merged.rank,
        "kept": merged.kept,
        "files": [
            {"file": str(path), "dropped": float(share)}
            for path, share in zip(merged.files, shares, strict=True)
        ],
        "tensors": {
            name: list(map(float, lost)) for name, lost in (merged.by_tensor or {}).items()
        },
    }
