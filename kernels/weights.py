"""Fill a model's parameters from safetensors files, and write such files (loading processes, trainer).

Memory-mapped, checked as a whole before a byte is copied, and parallel. Knows layouts (fp8 block scales,
interleaved qkv) but no model: callers say which checkpoint tensor goes where.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from transom.errors import CheckpointError

SCALE_SUFFIX = "_scale_inv"
_FLOATS = {"F64", "F32", "F16", "BF16"}
_FP8 = "F8_E4M3"

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Slot:
    """Where one checkpoint tensor goes.

    `target` is a view of a parameter with the checkpoint tensor's shape; `row_order`, if given, lists the
    checkpoint row of each target row. `grids` are the ways its rows may be cut into segments at which an fp8
    scale grid starts anew; the one that fits the scale tensor's shape is taken, the first if several do.
    """

    target: torch.Tensor
    row_order: torch.Tensor | None = None
    grids: tuple[tuple[int, ...], ...] = ()


@dataclass(frozen=True)
class TensorInfo:
    shape: tuple[int, ...]
    dtype: str
    file: Path


class TensorFiles:
    """The tensors of a checkpoint folder; a context manager that keeps the files mapped."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self.infos: dict[str, TensorInfo] = {}
        self._handles: dict[Path, Any] = {}
        self._stack = ExitStack()
        try:
            for path in paths:
                self._open(path)
        except BaseException:
            self._stack.close()
            raise

    @classmethod
    def in_folder(cls, folder: str | Path) -> Self:
        """Open model.safetensors or the files of its index, and MTP files that stand beside them."""
        return cls(checkpoint_files(Path(folder)))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self._stack.close()

    def read(self, name: str) -> torch.Tensor:
        """Return a tensor backed by the file's mapping: valid while this object is open."""
        tensor: torch.Tensor = self._handles[self.infos[name].file].get_tensor(name)
        return tensor

    def _open(self, path: Path) -> None:
        try:
            handle = self._stack.enter_context(safe_open(path, framework="pt"))
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"cannot read {path}: {error}") from error
        self._handles[path] = handle
        for name in handle.keys():  # noqa: SIM118  a safetensors handle is no mapping
            if name in self.infos:
                raise CheckpointError(f"tensor {name} is in {self.infos[name].file.name} and in {path.name}")
            part = handle.get_slice(name)
            self.infos[name] = TensorInfo(tuple(part.get_shape()), part.get_dtype(), path)


def save_tensors(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Write a safetensors file that every user may read, like any other file of a checkpoint."""
    stored = {name: tensor.detach().to("cpu").contiguous() for name, tensor in tensors.items()}
    save_file(stored, path, metadata={"format": "pt"})
    path.chmod(0o644)  # the library creates the file for its owner alone


def checkpoint_files(folder: Path) -> list[Path]:
    """Return the safetensors files that make up the checkpoint in `folder`."""
    index = folder / "model.safetensors.index.json"
    if (folder / "model.safetensors").is_file():
        names = {"model.safetensors"}
    elif index.is_file():
        names = _indexed_files(index)
    else:
        raise CheckpointError(f"{folder} has neither model.safetensors nor {index.name}")
    names |= {path.name for path in folder.glob("*mtp*.safetensors")}
    absent = sorted(name for name in names if not (folder / name).is_file())
    if absent:
        raise CheckpointError(f"{folder} lacks files that {index.name} lists: {', '.join(absent)}")
    return [folder / name for name in sorted(names)]


def _indexed_files(index: Path) -> set[str]:
    try:
        names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise CheckpointError(f"{index} is no safetensors index: {error!r}") from error
    outside = sorted(str(name) for name in names if not isinstance(name, str) or Path(name).name != name)
    if outside:
        raise CheckpointError(f"{index} names files outside its folder: {', '.join(outside)}")
    return names


def fill_slots(
    files: TensorFiles,
    slots: Mapping[str, Slot],
    *,
    ignore: Callable[[str], bool] = lambda name: False,
    block: tuple[int, int] = (128, 128),
    progress: Progress | None = None,
    threads: int = 8,
) -> None:
    """Copy every slot's tensor into place, converted to the target's dtype and device.

    Every tensor must have a slot, be the scale of one, or be ignored. Before anything is copied, raise one
    CheckpointError that lists all missing, mis-shaped and unexpected tensors. `progress` gets (bytes done,
    bytes in all) on the calling thread.
    """
    problems = _find_problems(files.infos, slots, ignore, block)
    if problems:
        lines = "\n  ".join(_fold_alike(problems))
        raise CheckpointError(f"the checkpoint does not fit its config:\n  {lines}")
    sizes = {name: slot.target.numel() * slot.target.element_size() for name, slot in slots.items()}
    total, done = sum(sizes.values()), 0
    with ThreadPoolExecutor(threads, thread_name_prefix="load") as pool:
        futures = {pool.submit(_fill, files, name, slot, block): name for name, slot in slots.items()}
        for future in as_completed(futures):
            future.result()
            done += sizes[futures[future]]
            if progress is not None:
                progress(done, total)


def _find_problems(
    infos: Mapping[str, TensorInfo],
    slots: Mapping[str, Slot],
    ignore: Callable[[str], bool],
    block: tuple[int, int],
) -> list[str]:
    missing, misshaped, scales = [], [], set()
    for name, slot in slots.items():
        wanted = tuple(slot.target.shape)
        info = infos.get(name)
        if info is None:
            missing.append(f"missing: {name} {list(wanted)}")
            continue
        if info.shape != wanted:
            misshaped.append(f"mis-shaped: {name} expected {list(wanted)}, found {list(info.shape)}")
        if info.dtype in _FLOATS:
            continue
        if info.dtype != _FP8 or len(wanted) != 2:
            misshaped.append(f"wrong dtype: {name} {list(wanted)} is {info.dtype}")
            continue
        scale_name = name + SCALE_SUFFIX
        scales.add(scale_name)
        scale = infos.get(scale_name)
        grids = [grid_shape(grid, wanted, block) for grid in _grids(slot)]
        if scale is None:
            missing.append(f"missing: {scale_name} {list(grids[0])}")
        elif scale.shape not in grids:
            expected = " or ".join(str(list(grid)) for grid in dict.fromkeys(grids))
            misshaped.append(f"mis-shaped: {scale_name} expected {expected}, found {list(scale.shape)}")
    unexpected = [
        f"unexpected: {name} {list(info.shape)}"
        for name, info in infos.items()
        if name not in slots and name not in scales and not ignore(name)
    ]
    return missing + misshaped + unexpected


_INDEX = re.compile(r"(?<=\.)\d+(?=\.)")
_FOLD_ABOVE = 8


def _fold_alike(problems: Sequence[str]) -> list[str]:
    """Turn many lines that differ in layer or expert only into one: a real model has 36,000 tensors."""
    alike: dict[str, list[str]] = {}
    for problem in problems:
        alike.setdefault(_INDEX.sub("{}", problem), []).append(problem)
    folded = []
    for lines in alike.values():
        if len(lines) <= _FOLD_ABOVE:
            folded += lines
            continue
        columns = zip(*([int(index) for index in _INDEX.findall(line)] for line in lines))
        spans = [f"{{{min(column)}-{max(column)}}}" for column in columns]
        between = _INDEX.split(lines[0])
        whole = "".join(text + span for text, span in zip(between, [*spans, ""]))
        folded.append(f"{whole} ({len(lines)} of them)")
    return folded


def _fill(files: TensorFiles, name: str, slot: Slot, block: tuple[int, int]) -> None:
    value = files.read(name)
    if value.dtype == torch.float8_e4m3fn:
        scale = files.read(name + SCALE_SUFFIX)
        shapes = {grid_shape(grid, value.shape, block): grid for grid in reversed(_grids(slot))}
        value = dequantise(value, scale, shapes[scale.shape[0], scale.shape[1]], block)
    if slot.row_order is not None:
        value = value.index_select(0, slot.row_order)
    with torch.no_grad():
        slot.target.copy_(value)


def _grids(slot: Slot) -> tuple[tuple[int, ...], ...]:
    return slot.grids or ((slot.target.shape[0],),)


def grid_shape(grid: Sequence[int], shape: Sequence[int], block: tuple[int, int]) -> tuple[int, int]:
    """Shape of the fp8 scales of a (rows, columns) weight whose grid starts anew at each segment of rows."""
    return sum(-(-rows // block[0]) for rows in grid), -(-shape[1] // block[1])


def dequantise(
    weight: torch.Tensor, scale: torch.Tensor, grid: Sequence[int], block: tuple[int, int]
) -> torch.Tensor:
    """Multiply each block of an e4m3 weight (rows, columns) by its scale; the result is fp32.

    Scale rows count on from segment to segment of `grid`, the last block of a segment being cut short.
    """
    rows = torch.cat([torch.arange(segment) // block[0] for segment in grid])
    firsts = torch.tensor([-(-segment // block[0]) for segment in grid]).cumsum(0)
    offsets = torch.cat([firsts.new_zeros(1), firsts[:-1]]).repeat_interleave(torch.tensor(grid))
    columns = torch.arange(weight.shape[1]) // block[1]
    return weight.float() * scale.float()[rows + offsets].index_select(1, columns)


def fused_qkv_order(sizes: Sequence[int], shards: int) -> torch.Tensor:
    """Return the checkpoint row of each row of [all q | all k | all v].

    The checkpoint interleaves by tensor-parallel shard: each shard holds [its q | its k | its v].
    """
    if any(size % shards for size in sizes):
        raise CheckpointError(f"fused qkv rows {list(sizes)} do not divide into {shards} shards")
    parts = [torch.arange(size).view(shards, -1) for size in sizes]
    shard_rows = sum(sizes) // shards
    starts = torch.arange(shards)[:, None] * shard_rows
    order, inside = [], 0
    for part in parts:
        width = part.shape[1]
        order.append((starts + inside + torch.arange(width)).flatten())
        inside += width
    return torch.cat(order)
