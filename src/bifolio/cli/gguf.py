"""`bifolio gguf`: split, merge and edit GGUF files without reading their weights."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

from bifolio.cli import commands

if TYPE_CHECKING:
    from bifolio.model.gguf.edit import Change, Edits
    from bifolio.model.gguf.new_file import NewFile

HELP = "Split, merge and edit GGUF files."
SPLIT_HELP = """Cut a GGUF file into parts that bifolio and llama.cpp open as one model.

The parts are NAME-00001-of-00003.gguf and so on; the first holds the metadata, and is the one to open. A model in parts
is cut anew. Without a limit, a part has 128 tensors."""
SPLIT_EPILOG = """Examples:

  bifolio gguf split model.gguf --max-size 2GB

  bifolio gguf split model.gguf parts/model --max-tensors 64 --dry-run"""
MERGE_HELP = """Join the parts of a model into one GGUF file."""
MERGE_EPILOG = """Examples:

  bifolio gguf merge model-00001-of-00003.gguf model.gguf"""
EDIT_HELP = """Change the metadata of a GGUF file; its tensors are copied as they are.

An existing key keeps its type, a new one needs --type: u8, i8, u16, i16, u32, i32, u64, i64, f32, f64, bool, str, or an
array such as arr[u32], which is written as JSON. A change with which the model would not open is refused."""
EDIT_EPILOG = """Examples:

  bifolio gguf edit model.gguf new.gguf --set general.name="My model" --remove general.url

  bifolio gguf edit model.gguf --in-place --set-file tokenizer.chat_template=template.jinja

  bifolio gguf edit model.gguf new.gguf --set my.rank=3 --set my.scale=0.5 --type my.rank=u32 --type my.scale=f32"""


class Assignment(NamedTuple):
    key: str
    text: str


def assignment(text: str) -> Assignment:
    """KEY=VALUE; the error follows the option's name."""
    key, sign, value = text.partition("=")
    if not sign or not key:
        raise argparse.ArgumentTypeError(f"{text!r} is no assignment: write KEY=VALUE")
    return Assignment(key, value)


Force = Annotated[bool, commands.option("--force", help="Permission to replace output files that exist.")]
DryRun = Annotated[bool, commands.option("--dry-run", help="A report of the work alone; no file is written.")]
AsJson = Annotated[bool, commands.option("--json", help="One JSON object as the output.")]


def register(app: commands.App) -> None:
    gguf = commands.App("gguf", HELP)
    gguf.command("split", help=SPLIT_HELP, epilog=SPLIT_EPILOG)(split)
    gguf.command("merge", help=MERGE_HELP, epilog=MERGE_EPILOG)(merge)
    gguf.command("edit", help=EDIT_HELP, epilog=EDIT_EPILOG)(edit)
    app.add_app(gguf)


def split(
    file: Annotated[Path, commands.argument(help="The GGUF file to cut, or a part of a split one.")],
    prefix: Annotated[
        Path | None, commands.argument(help="Path of the parts without -00001-of-00003.gguf; default: that of FILE.")
    ] = None,
    max_size: Annotated[
        str | None,
        commands.option("--max-size", help="Largest size of a part in bytes, header included: 2GB, 500MB, 1GiB."),
    ] = None,
    max_tensors: Annotated[
        int | None, commands.option("--max-tensors", min=1, help="Most tensors in a part; 128 if no limit is set.")
    ] = None,
    no_tensor_first_split: Annotated[
        bool, commands.option("--no-tensor-first-split", help="A first part with the metadata alone.")
    ] = False,
    force: Force = False,
    dry_run: DryRun = False,
    as_json: AsJson = False,
) -> None:
    from bifolio.engine.memory import parse_bytes
    from bifolio.model.gguf.split import open_whole_gguf
    from bifolio.model.gguf.split_writer import plan_split

    parts = plan_split(
        open_whole_gguf(file), prefix, max_bytes=None if max_size is None else parse_bytes(max_size),
        max_tensors=max_tensors, metadata_alone=no_tensor_first_split,
    )  # fmt: skip
    write(parts, "splitting", force=force, dry_run=dry_run)
    report(parts, dry_run, as_json)


def merge(
    first: Annotated[Path, commands.argument(help="The first part, NAME-00001-of-00003.gguf, with the others beside.")],
    out: Annotated[Path, commands.argument(help="The GGUF file to write.")],
    force: Force = False,
    dry_run: DryRun = False,
    as_json: AsJson = False,
) -> None:
    from bifolio.model.gguf.split import open_whole_gguf
    from bifolio.model.gguf.split_writer import plan_merge

    merged = plan_merge(open_whole_gguf(first), out)
    write([merged], "merging", force=force, dry_run=dry_run)
    report([merged], dry_run, as_json)


def edit(
    file: Annotated[Path, commands.argument(help="The GGUF file, or the first part of a split one.")],
    out: Annotated[Path | None, commands.argument(help="The GGUF file to write, unless --in-place.")] = None,
    values: Annotated[
        list[Assignment] | None,
        commands.option("--set", read=assignment, help="A key and its new value, KEY=VALUE; repeatable."),
    ] = None,
    files: Annotated[
        list[Assignment] | None,
        commands.option(
            "--set-file", read=assignment, help="A key and a text file of its value, KEY=FILE; repeatable."
        ),
    ] = None,
    remove: Annotated[list[str] | None, commands.option("--remove", help="A key to remove; repeatable.")] = None,
    rename: Annotated[
        list[Assignment] | None,
        commands.option("--rename", read=assignment, help="A key and its new name, OLD=NEW; repeatable."),
    ] = None,
    type: Annotated[
        list[str] | None,
        commands.option("--type", help="Type of new keys, or KEY=TYPE of one key, new or not; repeatable."),
    ] = None,
    in_place: Annotated[
        bool, commands.option("--in-place", help="FILE as the output: it is replaced when the new file is complete.")
    ] = False,
    allow_broken: Annotated[
        bool, commands.option("--allow-broken", help="Permission for changes with which the model does not open.")
    ] = False,
    force: Force = False,
    dry_run: DryRun = False,
    as_json: AsJson = False,
) -> None:
    from bifolio.model.gguf.edit import plan_edit

    if in_place == (out is not None):
        raise commands.BadParameter("name the file to write, OUT, or pass --in-place: one of them")
    edits = edits_of(values or [], files or [], remove or [], rename or [], type or [])
    new, changes = plan_edit(file, file if out is None else out, edits, allow_broken=allow_broken)
    write([new], "copying", force=force or in_place, dry_run=dry_run, in_place=in_place)
    report([new], dry_run, as_json, changes)


def edits_of(
    values: Sequence[Assignment],
    files: Sequence[Assignment],
    removed: Sequence[str],
    renamed: Sequence[Assignment],
    types: Sequence[str],
) -> Edits:
    from bifolio.model.gguf.edit import Edits
    from bifolio.text.utf8 import read_text

    texts = [*values, *(Assignment(key, read_text(Path(name), "--set-file")) for key, name in files)]
    for named, option in ((texts, "--set"), (renamed, "--rename")):
        keys = [key for key, _ in named]
        if twice := [key for key in keys if keys.count(key) > 1]:
            raise commands.BadParameter(f"{option}: {twice[0]} occurs twice")
    single = [name for name in types if "=" not in name]
    if len(single) > 1:
        raise commands.BadParameter(f"--type: {single[0]} and {single[1]} for all new keys: write KEY=TYPE")
    return Edits(
        dict(texts), removed, dict(renamed), dict(assignment(name) for name in types if "=" in name),
        single[0] if single else None,
    )  # fmt: skip


def write(files: Sequence[NewFile], title: str, *, force: bool, dry_run: bool, in_place: bool = False) -> None:
    from bifolio.cli.progress import bytes_bar
    from bifolio.model.gguf.new_file import check_files, write_files

    if dry_run:
        check_files(files, overwrite=force, in_place=in_place)
        return
    with bytes_bar(title) as bar:
        write_files(files, overwrite=force, in_place=in_place, progress=bar)


def report(files: Sequence[NewFile], dry_run: bool, as_json: bool, changes: Sequence[Change] = ()) -> None:
    """The files with their sizes, and the changed keys."""
    from bifolio.cli.inspect import one_line, plain_value
    from bifolio.engine.memory import show_bytes

    if as_json:
        rows: list[dict[str, Any]] = [
            {"path": str(file.path), "bytes": file.size, "tensors": len(file.tensors)} for file in files
        ]
        keys = [
            {"key": change.key, "new_key": change.new_key, "type": change.type,
             "old": None if change.old_value is None else plain_value(change.old_value),
             "new": None if change.new_value is None else plain_value(change.new_value)}
            for change in changes
        ]  # fmt: skip
        commands.echo(json.dumps({"files": rows, "changes": keys, "written": not dry_run}, ensure_ascii=False))
        return
    for change in changes:
        old, new = (None if v is None else one_line(plain_value(v)) for v in (change.old_value, change.new_value))
        if change.new_key is None:
            commands.echo(f"{change.key}: removed (was {old})")
        elif change.new_key != change.key:
            commands.echo(f"{change.key}: now {change.new_key}")
        else:
            commands.echo(f"{change.key} ({change.type}): {new}" + ("" if old is None else f" (was {old})"))
    for file in files:
        verb = "would write" if dry_run else "wrote"
        commands.echo(f"{verb} {file.path}: {len(file.tensors)} tensors, {show_bytes(file.size)}")
